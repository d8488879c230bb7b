"""What ``edgevlm calibrate`` measured of a model: its bundle's ``calibration.json``, ``choices.json`` and ``evidence.json``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Literal, get_args

FORMAT = 1
CALIBRATION = "calibration.json"

LayerClass = Literal["shallow", "middle", "deep"]


@dataclass(frozen=True, slots=True)
class Calibration:
    """One model's measurements; all lists have one entry a layer unless they say otherwise.

    clips, frames: what was watched, and how many frames of each. cv: coefficient of variation of value norms over vision
    tokens. thresholds: tau1 < tau2 < tau3 on it (InfiniPot-V, Alg. 2). ages: share of the attention to vision tokens that goes
    to frames of each age, newest first. recency: the share of the newest tenth of the frames; flat: that share were attention
    even. periodicity: autocorrelation of log attention at the lag of one frame. classes: HERMES's, by the rule in
    docs/internals/calibration.md; middle_from, deep_from: the depths that fit them best. agreement: per candidate CLIE layer
    0, 1, ... Spearman's correlation of PureKV's estimate with the layer's own importance, null up to the candidate; clie: the
    best one.
    """

    edgevlm: str
    date: str  # ISO 8601, UTC
    clips: tuple[str, ...]
    frames: tuple[int, ...]
    questions: tuple[str, ...]
    cv: tuple[float, ...]
    thresholds: tuple[float, float, float]
    ages: tuple[tuple[float, ...], ...]  # [layers][frames]
    recency: tuple[float, ...]
    flat: float
    periodicity: tuple[float, ...]
    classes: tuple[LayerClass, ...]
    middle_from: int
    deep_from: int
    agreement: tuple[tuple[float | None, ...], ...]  # [candidates][layers]
    clie: int

    def __post_init__(self) -> None:
        layers = len(self.cv)
        per_layer = (self.recency, self.periodicity, self.classes, self.ages, *self.agreement)
        if not layers or any(len(values) != layers for values in per_layer):
            raise ValueError("lists of different length")
        shares = (share for of_layer in self.ages for share in of_layer)
        numbers = (*self.cv, *self.thresholds, *self.recency, *self.periodicity, self.flat, *shares)
        if not all(math.isfinite(x) for x in numbers):
            raise ValueError("a value that is not a number")
        if len(self.thresholds) != 3 or any(a >= b for a, b in pairwise(self.thresholds)):
            raise ValueError("thresholds that do not rise")
        if set(self.classes) - set(get_args(LayerClass)) or not 0 <= self.middle_from <= self.deep_from <= layers:
            raise ValueError("layer classes that are none")
        if self.clie not in range(len(self.agreement)):
            raise ValueError("a clie that is no candidate")

    def to_json(self) -> bytes:
        """The bytes of ``calibration.json``."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=True, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Calibration:
        """Read it again. Raises ValueError, which says what is wrong with it."""
        try:
            values = json.loads(raw)
            version = values["format"]
            if version != FORMAT:
                raise ValueError(f"is of calibration format {version!r} and this edgevlm reads format {FORMAT}")
            return cls(**{field.name: _tuples(values[field.name]) for field in fields(cls)})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"does not describe a calibration ({error!r})") from None

    @property
    def described(self) -> str:
        """When and on what it was measured, for one line."""
        clips = self.clips[0] if len(self.clips) == 1 else f"{len(self.clips)} clips"
        return f"{self.date[:10]} on {clips}, {sum(self.frames)} frames"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


CHOICES_FORMAT = 2
CHOICES = "choices.json"

Measure = Literal["streamqa", "kl"]
"""streamqa: share of the demo world's questions answered right. kl: mean KL(full KV || policy) of next tokens, in nats."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy at one budget.

    tokens: the |M| at which cache and policy take no more bytes than a plain window of the budget. value, ci_low, ci_high: by
    the measure, with its 95 % interval; top1: share of the next tokens that are full KV's (``kl`` alone). compress_ms: what the
    compressions of a stream took, on average. bytes: the most that cache and policy took together.
    """

    policy: str
    tokens: int
    value: float
    ci_low: float
    ci_high: float
    compress_ms: float
    bytes: int
    top1: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy chosen at a budget of |M| tokens, among candidates; skipped: policies that cannot run at it, and why.

    chosen: None where no candidate is clearly better than the policy that ``auto`` falls back to.
    """

    budget: int
    chosen: str | None
    candidates: tuple[Candidate, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Candidate | None:
        """The candidate that was chosen."""
        return next((candidate for candidate in self.candidates if candidate.policy == self.chosen), None)


@dataclass(frozen=True, slots=True)
class AppendTrial:
    """A tau under full KV, beside whole frames. appended: fraction of the tokens.

    loss, ci_low, ci_high: by streamqa of accuracy, paired; by kl the fraction of next tokens that are not the same.
    """

    tau: float
    appended: float
    loss: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True, slots=True)
class AppendChoice:
    """What ``--append auto`` does. tau: None for whole frames, where no trial's loss surely stays within ``bound``.

    refreshed: what would be appended at tau if each patch were again after ``refresh`` frames.
    """

    tau: float | None
    bound: float
    trials: tuple[AppendTrial, ...]
    refresh: int
    refreshed: float | None = None

    @property
    def best(self) -> AppendTrial | None:
        """The trial that was chosen."""
        return next((trial for trial in self.trials if trial.tau == self.tau), None)


@dataclass(frozen=True, slots=True)
class EncodeTrial:
    """A ``setting`` of ``--encode`` under full KV, beside whole frames. encoded: fraction of the patches.

    loss, ci_low, ci_high: as an AppendTrial's. low_cosine: of a hundred features one is farther from the whole tower's; None
    by streamqa.
    """

    setting: str
    encoded: float
    loss: float
    ci_low: float
    ci_high: float
    low_cosine: float | None = None


@dataclass(frozen=True, slots=True)
class EncodeChoice:
    """What ``--encode auto`` does. setting: None for whole frames, where no trial's loss surely stays within ``bound``."""

    setting: str | None
    bound: float
    trials: tuple[EncodeTrial, ...]

    @property
    def best(self) -> EncodeTrial | None:
        """The trial that was chosen."""
        return next((trial for trial in self.trials if trial.setting == self.setting), None)


@dataclass(frozen=True, slots=True)
class Choices:
    """A choice a budget, budgets rising.

    watched: the clips, or the worlds' seed. frames: of the longest stream. known: the bounded policies there were, measured or
    not, so that newer ones can be told.
    """

    edgevlm: str
    date: str  # ISO 8601, UTC
    measure: Measure
    watched: tuple[str, ...]
    frames: int
    known: tuple[str, ...]
    budgets: tuple[Choice, ...]
    append: AppendChoice | None = None
    encode: EncodeChoice | None = None

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise ValueError(f"policies chosen by {self.measure!r}, which is no measure")
        tau = self.append.tau if self.append else None
        if tau is not None and not 0 < tau <= 1:
            raise ValueError(f"a tau of {tau}, which is no cosine above 0")
        if self.encode is not None and self.encode.setting is not None and self.encode.best is None:
            raise ValueError(f"a way to encode, {self.encode.setting!r}, that was not tried")
        tokens = [choice.budget for choice in self.budgets]
        if not tokens or tokens[0] < 1 or any(a >= b for a, b in pairwise(tokens)):
            raise ValueError("budgets of policies that do not rise")
        for choice in self.budgets:
            if choice.chosen is not None and choice.chosen not in [candidate.policy for candidate in choice.candidates]:
                raise ValueError(f"a policy {choice.chosen!r} chosen that was not measured")
            numbers = [x for c in choice.candidates for x in (c.value, c.ci_low, c.ci_high, c.compress_ms, c.bytes)]
            if not all(math.isfinite(x) for x in numbers):
                raise ValueError("a value that is not a number")

    def to_json(self) -> bytes:
        """The bytes of ``choices.json``."""
        return (
            json.dumps({"format": CHOICES_FORMAT, **asdict(self)}, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
        ).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Choices:
        """Read it again. Raises ValueError, which says what is wrong with it."""
        try:
            values = json.loads(raw)
            if values["format"] not in (1, CHOICES_FORMAT):
                raise ValueError(
                    f"is of choices format {values['format']!r} and this edgevlm reads formats 1 to {CHOICES_FORMAT}"
                )
            return cls._from_dict(values)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"does not describe choices ({error!r})") from None

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> Choices:
        append, encode = values.get("append"), values.get("encode")
        trials = () if append is None else tuple(AppendTrial(**trial) for trial in append["trials"])
        encode_trials = () if encode is None else tuple(EncodeTrial(**trial) for trial in encode["trials"])
        return cls(
            edgevlm=str(values["edgevlm"]),
            date=str(values["date"]),
            measure=values["measure"],
            watched=tuple(values["watched"]),
            frames=int(values["frames"]),
            known=tuple(values["known"]),
            budgets=tuple(
                Choice(
                    int(of["budget"]),
                    None if of["chosen"] is None else str(of["chosen"]),
                    tuple(Candidate(**candidate) for candidate in of["candidates"]),
                    tuple((str(policy), str(why)) for policy, why in of["skipped"]),
                )
                for of in values["budgets"]
            ),
            append=None if append is None else AppendChoice(**(append | {"trials": trials})),
            encode=None if encode is None else EncodeChoice(**(encode | {"trials": encode_trials})),
        )

    def nearest(self, budget: int) -> Choice:
        """The choice at the measured budget nearest to ``budget`` by ratio, the smaller of two as near."""
        return min(self.budgets, key=lambda choice: abs(math.log(choice.budget / max(budget, 1))))


EVIDENCE_FORMAT = 1
EVIDENCE = "evidence.json"


@dataclass(frozen=True, slots=True)
class EvidenceHeads:
    """Where to look: ``heads`` of ``layer``.

    weights: of ``Look.features``, ``[3 x heads + 3]``; with ``bias`` they sum to more than 0 where what answers the question
    is held. Empty: nobody has calibrated it.
    """

    layer: int
    heads: tuple[int, ...]
    weights: tuple[float, ...] = ()
    bias: float = 0.0

    @classmethod
    def uncalibrated(cls, layers: int, heads: int) -> EvidenceHeads:
        """All heads of the layer at two thirds of the depth."""
        return cls(2 * layers // 3, tuple(range(heads)))

    def to_json(self) -> bytes:
        """The bytes of ``evidence.json``."""
        return (json.dumps({"format": EVIDENCE_FORMAT, **asdict(self)}, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes, layers: int, heads: int) -> EvidenceHeads:
        """Read it again, for a model of so many layers and query heads. Raises ValueError, which says what is wrong."""
        try:
            values = json.loads(raw)
            if values.pop("format") != EVIDENCE_FORMAT or set(values) != {field.name for field in fields(cls)}:
                raise ValueError(f"is not of evidence format {EVIDENCE_FORMAT}")
            read = cls(int(values["layer"]), tuple(values["heads"]), tuple(values["weights"]), float(values["bias"]))
            numbers = [*read.weights, read.bias]
            known = all(type(head) is int and 0 <= head < heads for head in read.heads)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"does not describe where evidence is found ({error!r})") from None
        if not (0 <= read.layer < layers and read.heads and known):
            raise ValueError(f"names a layer or heads that the model's {layers} layers of {heads} heads do not have")
        if len(read.weights) not in (0, 3 * len(read.heads) + 3) or not all(map(math.isfinite, numbers)):
            raise ValueError("has weights that are not three finite numbers a head, and three")
        return read
