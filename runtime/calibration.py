"""The results of ``edgevlm calibrate``, kept in a bundle's ``calibration.json``, ``choices.json`` and ``evidence.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
"""streamqa: fraction of the demo world's questions answered correctly. kl: mean KL(full KV || policy) of next tokens, nats."""
Number = Annotated[float, Ge(-1e12), Le(1e12)]  # these bounds exclude infinities
Count = Annotated[int, Ge(0), Le(1 << 53)]
Loss = Annotated[Number, "Fraction of right answers (with kl: of equal next tokens) lost compared with whole frames."]
Low = Annotated[Number, "Lower end of the 95 % interval of the loss."]
High = Annotated[Number, "Upper end of the same interval."]
Bound = Annotated[Number, "Upper bound of the loss."]


@cache
def _schema(kind: Any) -> Any:
    from pydantic import TypeAdapter  # imported here because pydantic is slow to import and few commands need it

    return TypeAdapter(kind)


class JsonFile:
    """A dataclass stored as a file of a bundle. ``_file``: the current format's number, and what the file should contain."""

    _file: ClassVar[tuple[int, str]]

    def to_json(self) -> bytes:
        """Return the JSON file's content as bytes."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return (json.dumps({"format": self._file[0], **fields}, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Parse a file of the newest or an earlier format. Raises a one-line ValueError for an invalid file."""
        from pydantic import ValidationError
        from pydantic_core import from_json

        newest, what = cls._file
        try:
            version = from_json(raw)["format"]
            if version not in range(1, newest + 1):
                raise ValueError(f"has format {version!r:.40}, but this edgevlm supports up to format {newest}")
            read: Self = _schema(cls).validate_json(raw, strict=True)  # type: ignore[arg-type]
            return read
        except ValidationError as error:
            raise ValueError(f"is not {what} ({first_problem(error)})") from None
        except (KeyError, TypeError):
            raise ValueError(f"is not {what}") from None

    def check(self, layers: int, heads: int) -> None:
        """Raise ValueError unless the file fits a model with this many layers and query heads per layer."""


@dataclass(frozen=True, slots=True)
class Calibration(JsonFile):
    """One model's measurements. docs/internals/calibration.md explains how measurements determine the layers' classes."""

    _file = (1, "a valid calibration")

    edgevlm: Annotated[str, "The version of edgevlm that measured. With --no-layers this field and those after it are missing."]
    date: Annotated[str, "When the command ran: ISO 8601, UTC."]
    clips: Annotated[tuple[str, ...], "The videos or streams that were watched."]
    frames: Annotated[tuple[Count, ...], "Frames of each clip."]
    questions: Annotated[tuple[str, ...], "Questions asked."]
    cv: Annotated[tuple[Number, ...], "Per layer: coefficient of variation of the value norms over vision tokens."]
    thresholds: Annotated[tuple[Number, Number, Number], "InfiniPot-V's three rising thresholds on cv (Alg. 2)."]
    ages: Annotated[tuple[tuple[Number, ...], ...], "Per layer: fraction of attention by age of frame, newest first."]
    recency: Annotated[tuple[Number, ...], "Per layer: fraction of attention on the newest tenth of the frames."]
    flat: Annotated[Number, "What recency would be if attention were uniform."]
    periodicity: Annotated[tuple[Number, ...], "Per layer: autocorrelation of log attention at a lag of one frame."]
    classes: Annotated[tuple[LayerClass, ...], "Per layer: shallow, middle or deep (HERMES)."]
    middle_from: Annotated[Count, "First middle layer."]
    deep_from: Annotated[Count, "First deep layer."]
    agreement: Annotated[
        tuple[tuple[Number | None, ...], ...],
        "Per candidate layer: Spearman's rank correlation with every layer above it (PureKV); null up to it.",
    ]
    clie: Annotated[Count, "The candidate that ranks best."]

    def __post_init__(self) -> None:
        layers = len(self.cv)
        per_layer = (self.recency, self.periodicity, self.classes, self.ages, *self.agreement)
        if not layers or any(len(values) != layers for values in per_layer):
            raise ValueError("lists differ in length")
        if any(a >= b for a, b in pairwise(self.thresholds)):
            raise ValueError("thresholds must increase")
        if not 0 <= self.middle_from <= self.deep_from <= layers or self.clie not in range(len(self.agreement)):
            raise ValueError("invalid layer classes or clie")

    def check(self, layers: int, heads: int) -> None:
        if len(self.cv) != layers:
            raise ValueError(f"has {len(self.cv)} layers, but the model has {layers}")

    @property
    def described(self) -> str:
        clips = self.clips[0] if len(self.clips) == 1 else f"{len(self.clips)} clips"
        return f"{self.date[:10]} on {clips}, {sum(self.frames)} frames"


@dataclass(frozen=True, slots=True)
class Candidate:
    """The measurements of one policy at one budget."""

    policy: Annotated[str, "The policy measured."]
    tokens: Annotated[Count, "The tokens that the policy uses in no more bytes than a sliding window of this budget takes."]
    value: Annotated[Number, "The measure."]
    ci_low: Annotated[Number, "Lower end of the 95 % interval."]
    ci_high: Annotated[Number, "Upper end of the same interval."]
    compress_ms: Annotated[Number, "Mean time of compression per stream, in milliseconds."]
    bytes: Annotated[Count, "Largest size of cache and policy together, in bytes."]
    top1: Annotated[Number | None, "Fraction of next tokens equal to full KV's; with kl only."] = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy chosen for a memory budget in tokens. ``skipped``: the policies that cannot run at this budget, with reasons.

    ``chosen`` is None if no candidate is clearly better than the policy that ``auto`` falls back to.
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
    """The measurements of one setting of ``--append``, compared with appending whole frames."""

    tau: Annotated[Number, "Threshold of --append changed, under full KV."]
    appended: Annotated[Number, "Fraction of the frames' tokens that entered the memory."]
    loss: Loss
    ci_low: Low
    ci_high: High


@dataclass(frozen=True, slots=True)
class AppendChoice:
    """The setting that ``--append auto`` uses. None means whole frames, because no measured setting clearly loses less than
    ``bound``.
    """

    tau: Annotated[Number | None, "What --append auto uses; null means all."]
    bound: Bound
    trials: tuple[AppendTrial, ...]


@dataclass(frozen=True, slots=True)
class EncodeTrial:
    """The measurements of one setting of ``--encode``, compared with encoding whole frames."""

    setting: Annotated[str, "Setting of --encode, under full KV."]
    encoded: Annotated[Number, "Fraction of the frames' patches that were encoded."]
    loss: Loss
    ci_low: Low
    ci_high: High
    low_cosine: Annotated[
        Number | None, "Cosine similarity to the whole tower's features that 99 % of the features reach; null with streamqa."
    ] = None


@dataclass(frozen=True, slots=True)
class EncodeChoice:
    """The setting that ``--encode auto`` uses. None means whole frames, because no measured setting clearly loses less than
    ``bound``.
    """

    setting: Annotated[str | None, "What --encode auto uses; null means all."]
    bound: Bound
    trials: tuple[EncodeTrial, ...]


@dataclass(frozen=True, slots=True)
class Choices(JsonFile):
    """The policies and settings that ``edgevlm calibrate`` chose.

    ``budgets``: one choice per budget, in ascending order. ``watched``: the names of the measured clips, or the number of demo
    worlds and their seed. ``frames``: the number of frames in the longest stream. ``known``: every bounded policy that existed
    at calibration, measured or not.
    """

    _file = (2, "a valid list of choices")

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
            raise ValueError(f"tau must be above 0 and at most 1, not {self.append.tau}")
        if self.encode and self.encode.setting not in (None, *(trial.setting for trial in self.encode.trials)):
            raise ValueError(f"encode setting {self.encode.setting!r} was not measured")
        tokens = [0, *(choice.budget for choice in self.budgets)]
        if len(tokens) == 1 or any(a >= b for a, b in pairwise(tokens)):
            raise ValueError("budgets must increase")
        if unknown := [choice.chosen for choice in self.budgets if choice.chosen is not None and choice.best is None]:
            raise ValueError(f"chosen policy {unknown[0]!r} was not measured")

    def nearest(self, budget: int) -> Choice:
        """Return the choice for the measured budget that is nearest to this one by ratio."""
        return min(self.budgets, key=lambda choice: abs(math.log(choice.budget / max(budget, 1))))


@dataclass(frozen=True, slots=True)
class EvidenceHeads(JsonFile):
    """The attention heads that show which frames an answer came from.

    ``weights``: one number for each of ``QuestionAttention.features``, ``[3 x heads + 3]``; empty without a calibration. If the
    features' weighted sum plus ``bias`` is above 0, the memory holds the evidence.
    """

    _file = (1, "a valid choice of evidence heads")

    layer: Count
    heads: tuple[Count, ...]
    weights: tuple[Number, ...] = ()
    bias: Number = 0.0

    @classmethod
    def uncalibrated(cls, layers: int, heads: int, windows: Sequence[int] = ()) -> EvidenceHeads:
        """Return all heads of one layer, near two thirds of the model's depth and, if possible, without a sliding window."""
        whole = [layer for layer in range(layers) if not (windows and windows[layer])] or range(layers)
        return cls(min(whole, key=lambda layer: abs(layer - 2 * layers // 3)), tuple(range(heads)))

    def check(self, layers: int, heads: int) -> None:
        if not (self.layer < layers and self.heads and max(self.heads) < heads):
            raise ValueError(f"lists a layer or heads outside the model's {layers} layers and {heads} heads")
        if len(self.weights) not in (0, 3 * len(self.heads) + 3):
            raise ValueError("must have three weights per head, plus three")
