"""Append only what changed: which tokens of a frame differ from those that were last appended at their patches."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError, nearest
from edgevlm.runtime.stateful import Stateful

Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]

AUTO, ALL, CHANGED = "auto", "all", "changed"
TAU = 0.97
NUMBER = re.compile(r"\d{1,9}(?:\.\d{0,9})?|\.\d{1,9}")


@dataclass(frozen=True, slots=True)
class AppendChanged:
    """tau: a token is appended if the cosine of its feature to its patch's reference is below it. refresh: a patch is appended
    again after so many frames whatever it shows; 0 never."""

    tau: float = TAU
    refresh: int = 0

    def __str__(self) -> str:
        return f"{CHANGED}:tau={self.tau:g}" + (f",refresh={self.refresh}" if self.refresh else "")


@dataclass(frozen=True, slots=True)
class AppendSetting:
    """``--append`` as typed: ``auto``, ``all``, or ``changed`` with its settings. tau: None for the model's own."""

    name: str = AUTO
    tau: float | None = None
    refresh: int = 0

    def for_model(self, calibrated: float | None) -> AppendChanged | None:
        """None for whole frames. calibrated: the model's tau; without, ``auto`` is ``all``, ``changed`` takes the preset."""
        if self.name == ALL or (self.name == AUTO and calibrated is None):
            return None
        return AppendChanged(self.tau or calibrated or TAU, self.refresh)


def split_changed(option: str, text: str, usual: Mapping[str, float]) -> tuple[str, dict[str, float]]:
    """``auto``, ``all`` or ``changed[:key=number,..]`` as name and settings, whose keys are those of ``usual``.

    Raises UserError for anything else.
    """
    name, _, settings = text.partition(":")
    if name not in (AUTO, ALL, CHANGED):
        raise UserError(f"{option} {text!r}: {nearest(name, [AUTO, ALL, CHANGED])}")
    if name != CHANGED and settings:
        raise UserError(f"{option} {text!r}: {name} has no settings")
    values: dict[str, float] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in usual or not NUMBER.fullmatch(value):
            example = ",".join(f"{key}={value:g}" for key, value in usual.items())
            raise UserError(f"{option} {text!r}: give {CHANGED}:{example}")
        values[key] = float(value)
    return name, values


def parse_append(text: str) -> AppendSetting:
    """``auto``, ``all`` or ``changed[:tau=T,refresh=N]``. Raises UserError for anything else."""
    name, values = split_changed("append", text, {"tau": TAU, "refresh": 0})
    tau, refresh = values.get("tau"), values.get("refresh", 0)
    if tau is not None and not 0 < tau <= 1:
        raise UserError(f"append {text!r}: tau is a cosine above 0, at most 1")
    if refresh != int(refresh):
        raise UserError(f"append {text!r}: refresh is an integer (frames)")
    return AppendSetting(name, tau, int(refresh))


class References(Stateful):
    """Of each patch, the feature of the token last appended there, normalised.

    A frame is compared with what was *appended*, not with the frame before it, so slow drift cannot hide.
    """

    state_fields = ("_features", "_age", "seq")

    def __init__(self, settings: AppendChanged, tokens: int, width: int) -> None:
        self.settings = settings
        self._features = np.zeros((tokens, width), np.float32)
        self._age = np.zeros(tokens, np.int32)  # frames since a patch was appended
        self.seq = np.full(tokens, -1, np.int64)  # the token appended last at each patch

    def changed(self, unit: Float32) -> Bool:
        """Which tokens of a frame to append, ``[tokens]``, by its :func:`unit_features`. The first frame's are all."""
        changed: Bool = np.einsum("pw,pw->p", unit, self._features) < self.settings.tau
        if self.settings.refresh:
            changed |= self._age + 1 >= self.settings.refresh
        return changed

    def appended(self, unit: Float32, changed: Bool, seq: NDArray[np.int64]) -> None:
        """The ``changed`` tokens of a frame are in the memory now, as ``seq``."""
        self.seq[changed] = seq
        self._features[changed] = unit[changed]
        self._age += 1
        self._age[changed] = 0

    def copy(self) -> References:
        """Which goes on by itself."""
        other = copy.copy(self)
        other._features, other._age, other.seq = self._features.copy(), self._age.copy(), self.seq.copy()
        return other


def unit_features(features: Float32) -> Float32:
    """Features ``[..., width]`` of length 1; zeros stay."""
    norms = np.sqrt(np.einsum("...w,...w->...", features, features))[..., None]
    unit: Float32 = features / np.maximum(norms, np.finfo(np.float32).tiny)
    return unit
