"""Profiles: how the decoder builder writes graphs for one kind of runtime.

They differ in the operators of norms and rotary positions, in the cache, and in how matrices lie; the rest of the decoder is
the same. docs/internals/engines.md has the inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.precisions import Layouts, load_precision
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, check_profile
from edgevlm.runtime.kv import KVType
from edgevlm.runtime.plugins import names


class Operators(Protocol):
    """Norms and rotary positions of a decoder; rows are ``[1, S, n]``, float32."""

    def tables(self) -> None:
        """The inputs ``cos`` and ``sin`` ``[1, S, D/2]``, in the form that ``rotate`` takes."""
        ...

    def norm(self, name: str, gamma: np.ndarray, residual: str, delta: str | None) -> tuple[str, str]:
        """RMS norm of ``residual + delta`` on the last axis; returns the normed rows and the sum."""
        ...

    def rotate(self, name: str, rows: str, heads: int) -> str:
        """Rotate-half of ``[1, S, heads D]`` by this call's cos and sin (row ``s`` of the call uses row ``s`` of them)."""
        ...


class Cache(Protocol):
    """Keys and values in one graph."""

    def start(self) -> None:
        """Inputs and nodes that all layers share."""
        ...

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        """Causal attention over the valid rows and those of the call, ``[1, S, heads D]``: ``[1, S, Hq D]``."""
        ...


@dataclass(frozen=True, slots=True)
class Profile:
    """opset, ir_version: of decoder graphs. kv: what keys and values may be. variants: the decoder graphs there are."""

    name: str
    opset: int
    ir_version: int
    operators: Callable[[GraphBuilder, DecoderShape], Operators]
    cache: Callable[[GraphBuilder, DecoderShape, KVType], Cache]
    kv: tuple[KVType, ...]
    variants: tuple[str, ...]

    @property
    def is_tensorrt(self) -> bool:
        return self.name != ONNXRUNTIME

    def precision(self, name: str) -> Layouts:
        """The layouts of a weight precision; raises UserError for one that is unknown, or that the profile has not."""
        chosen = load_precision(name)
        layouts = chosen.tensorrt if self.is_tensorrt else chosen.onnxruntime
        if layouts is None:
            known = [other for other in names("precisions") if load_precision(other).tensorrt is not None]
            raise UserError(f"--precision {name} cannot be written for {self.name}; give {' or '.join(known)}")
        return layouts

    def check_kv(self, kv: KVType) -> None:
        """Raises UserError for keys and values that its graphs cannot keep."""
        if kv not in self.kv:
            raise UserError(f"--kv {kv} cannot be written for {self.name}; give {' or '.join(self.kv)}")

    def check_operators(self, graphs: Iterable[Path]) -> None:
        """Assert that TensorRT's parser has every operator of these graphs, for the types they use it with."""
        if self.is_tensorrt:
            from edgevlm.export.profiles.allowed import Allowed

            allowed = Allowed.load(self.name)
            for graph in graphs:
                allowed.check(graph)

    def graph(self, name: str, weights: Any, precision: str) -> GraphBuilder:
        """An empty graph for weights of a precision."""
        return GraphBuilder(name, weights, max(self.opset, load_precision(precision).least_opset), self.ir_version)


def load_profile(name: str) -> Profile:
    """The profile called ``name``; raises UserError naming the nearest known one."""
    check_profile(name)
    from edgevlm.export.profiles import onnxruntime, tensorrt

    return onnxruntime.PROFILE if name == ONNXRUNTIME else tensorrt.PROFILES[name]
