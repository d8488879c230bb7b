"""What ``edgevlm calibrate`` measured of a model, as its bundle's ``calibration.json`` keeps it."""

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
    docs/calibration.md; middle_from, deep_from: the depths that fit them best. agreement: per candidate CLIE layer 0, 1, ...
    Spearman's correlation of PureKV's estimate with the layer's own importance, null up to the candidate; clie: the best one.
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
