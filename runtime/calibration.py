"""What ``edgevlm calibrate`` measured of a model: its bundle's ``calibration.json``, ``choices.json`` and ``evidence.json``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from edgevlm.errors import first_problem

if TYPE_CHECKING:
    from typing_extensions import Self

CALIBRATION, CHOICES, EVIDENCE = "calibration.json", "choices.json", "evidence.json"

LayerClass = Literal["shallow", "middle", "deep"]
Measure = Literal["streamqa", "kl"]
"""streamqa: fraction of the demo world's questions answered right. kl: mean KL(full KV || policy) of next tokens, in nats."""
Number = Annotated[float, Ge(-1e12), Le(1e12)]  # finite
Count = Annotated[int, Ge(0), Le(1 << 53)]


@cache
def _schema(kind: Any) -> Any:
    from pydantic import TypeAdapter  # slow to import, for commands that load nothing

    return TypeAdapter(kind)


class JsonFile:
    """A dataclass that is a file of a bundle. ``_file``: its newest format, and what it describes."""

    _file: ClassVar[tuple[int, str]]

    def to_json(self) -> bytes:
        """The bytes of the file."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return (json.dumps({"format": self._file[0], **fields}, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Read it again, in this or an earlier format. Raises ValueError, one line."""
        from pydantic import ValidationError
        from pydantic_core import from_json

        newest, what = cls._file
        try:
            if (version := from_json(raw)["format"]) not in range(1, newest + 1):
                raise ValueError(f"is of format {version!r:.40} and this edgevlm reads up to format {newest}")
            read: Self = _schema(cls).validate_json(raw, strict=True)  # type: ignore[arg-type]
            return read
        except ValidationError as error:
            raise ValueError(f"does not describe {what} ({first_problem(error)})") from None
        except (KeyError, TypeError):
            raise ValueError(f"does not describe {what}") from None


@dataclass(frozen=True, slots=True)
class Calibration(JsonFile):
    """One model's measurements; lists have one entry a layer unless they say otherwise.

    clips, frames: what was watched, and how many frames of each. cv: coefficient of variation of value norms over vision
    tokens. thresholds: tau1 < tau2 < tau3 on it (InfiniPot-V, Alg. 2). ages: fraction of the attention to vision tokens that
    goes to frames of each age, newest first. recency: that of the newest tenth of the frames; flat: the same of even
    attention. periodicity: autocorrelation of log attention at the lag of one frame. classes: HERMES's, by the rule in
    docs/internals/calibration.md; middle_from, deep_from: the depths that fit them best. agreement: per candidate CLIE layer
    Spearman's correlation of PureKV's estimate with the layer's own importance, null up to the candidate; clie: the best one.
    """

    _file = (1, "a calibration")

    edgevlm: str
    date: str  # ISO 8601, UTC
    clips: tuple[str, ...]
    frames: tuple[Count, ...]
    questions: tuple[str, ...]
    cv: tuple[Number, ...]
    thresholds: tuple[Number, Number, Number]
    ages: tuple[tuple[Number, ...], ...]  # [layers][frames]
    recency: tuple[Number, ...]
    flat: Number
    periodicity: tuple[Number, ...]
    classes: tuple[LayerClass, ...]
    middle_from: Count
    deep_from: Count
    agreement: tuple[tuple[Number | None, ...], ...]  # [candidates][layers]
    clie: Count

    def __post_init__(self) -> None:
        layers = len(self.cv)
        per_layer = (self.recency, self.periodicity, self.classes, self.ages, *self.agreement)
        if not layers or any(len(values) != layers for values in per_layer):
            raise ValueError("lists of different length")
        if any(a >= b for a, b in pairwise(self.thresholds)):
            raise ValueError("thresholds that do not rise")
        if not 0 <= self.middle_from <= self.deep_from <= layers or self.clie not in range(len(self.agreement)):
            raise ValueError("layer classes or a clie that are none")

    @property
    def described(self) -> str:
        clips = self.clips[0] if len(self.clips) == 1 else f"{len(self.clips)} clips"
        return f"{self.date[:10]} on {clips}, {sum(self.frames)} frames"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy at one budget.

    tokens: the |M| at which cache and policy take no more bytes than a sliding window of the budget. value, ci_low, ci_high: by
    the measure, with its 95 % interval; top1: fraction of the next tokens that are full KV's (only ``kl``). compress_ms: mean
    time that a stream's compressions took. bytes: the most that cache and policy took together.
    """

    policy: str
    tokens: Count
    value: Number
    ci_low: Number
    ci_high: Number
    compress_ms: Number
    bytes: Count
    top1: Number | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy chosen at a budget of |M| tokens, among candidates; skipped: policies that cannot run at it, and why.

    chosen: None where no candidate is clearly better than the policy that ``auto`` falls back to.
    """

    budget: Count
    chosen: str | None
    candidates: tuple[Candidate, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Candidate | None:
        return next((candidate for candidate in self.candidates if candidate.policy == self.chosen), None)


@dataclass(frozen=True, slots=True)
class AppendTrial:
    """A tau under full KV, beside whole frames. appended: fraction of the tokens.

    loss, ci_low, ci_high: paired loss of accuracy (streamqa), or the fraction of next tokens that differ (kl).
    """

    tau: Number
    appended: Number
    loss: Number
    ci_low: Number
    ci_high: Number


@dataclass(frozen=True, slots=True)
class AppendChoice:
    """What ``--append auto`` does. tau: None for whole frames, where no trial's loss surely stays within ``bound``."""

    tau: Number | None
    bound: Number
    trials: tuple[AppendTrial, ...]

    @property
    def best(self) -> AppendTrial | None:
        return next((trial for trial in self.trials if trial.tau == self.tau), None)


@dataclass(frozen=True, slots=True)
class EncodeTrial:
    """A ``setting`` of ``--encode`` under full KV, as an AppendTrial. encoded: fraction of the patches.

    low_cosine: the first percentile of features' cosines to the whole tower's; None by streamqa.
    """

    setting: str
    encoded: Number
    loss: Number
    ci_low: Number
    ci_high: Number
    low_cosine: Number | None = None


@dataclass(frozen=True, slots=True)
class EncodeChoice:
    """What ``--encode auto`` does. setting: None for whole frames, where no trial's loss surely stays within ``bound``."""

    setting: str | None
    bound: Number
    trials: tuple[EncodeTrial, ...]

    @property
    def best(self) -> EncodeTrial | None:
        return next((trial for trial in self.trials if trial.setting == self.setting), None)


@dataclass(frozen=True, slots=True)
class Choices(JsonFile):
    """A choice a budget, budgets rising. watched: the clips, or the worlds' seed. frames: of the longest stream.

    known: the bounded policies there were, measured or not, so that newer ones can be found.
    """

    _file = (2, "choices")

    edgevlm: str
    date: str  # ISO 8601, UTC
    measure: Measure
    watched: tuple[str, ...]
    frames: Count
    known: tuple[str, ...]
    budgets: tuple[Choice, ...]
    append: AppendChoice | None = None
    encode: EncodeChoice | None = None

    def __post_init__(self) -> None:
        if self.append and self.append.tau is not None and not 0 < self.append.tau <= 1:
            raise ValueError(f"a tau of {self.append.tau}, which is no cosine above 0")
        if self.encode and self.encode.setting is not None and self.encode.best is None:
            raise ValueError(f"a way to encode, {self.encode.setting!r}, that was not tried")
        tokens = [0, *(choice.budget for choice in self.budgets)]
        if len(tokens) == 1 or any(a >= b for a, b in pairwise(tokens)):
            raise ValueError("budgets of policies that do not rise")
        if unknown := [choice.chosen for choice in self.budgets if choice.chosen is not None and choice.best is None]:
            raise ValueError(f"a policy {unknown[0]!r} chosen that was not measured")

    def nearest(self, budget: int) -> Choice:
        """The choice at the measured budget nearest to ``budget`` by ratio, the smaller of two as near."""
        return min(self.budgets, key=lambda choice: abs(math.log(choice.budget / max(budget, 1))))


@dataclass(frozen=True, slots=True)
class EvidenceHeads(JsonFile):
    """Where to look: ``heads`` of ``layer``.

    weights: of ``QuestionAttention.features``, ``[3 x heads + 3]``; with ``bias`` they sum to more than 0 where what answers
    the question is held. Empty without a calibration.
    """

    _file = (1, "where evidence is found")

    layer: Count
    heads: tuple[Count, ...]
    weights: tuple[Number, ...] = ()
    bias: Number = 0.0

    @classmethod
    def uncalibrated(cls, layers: int, heads: int) -> EvidenceHeads:
        """All heads of the layer at two thirds of the depth."""
        return cls(2 * layers // 3, tuple(range(heads)))

    def check(self, layers: int, heads: int) -> None:
        """Raise ValueError where they are not those of a model with ``layers`` layers of ``heads`` query heads."""
        if not (self.layer < layers and self.heads and max(self.heads) < heads):
            raise ValueError(f"names a layer or heads that the model's {layers} layers of {heads} heads do not have")
        if len(self.weights) not in (0, 3 * len(self.heads) + 3):
            raise ValueError("has weights that are not three numbers a head, and three")
