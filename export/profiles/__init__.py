"""Profiles, one file each and one line in the registry: how the decoder builder writes graphs for one kind of runtime.

They differ in the operators of norms and rotary positions, in the cache, and in how matrices lie; the rest of the decoder is
the same. docs/engines.md has the inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.export.checkpoint import nearest
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.precisions import Precision, load_precision
from edgevlm.runtime.engine import KVType
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, PROFILES, TENSORRT_10_3, TENSORRT_10_15

# profile -> module with ``PROFILE``
MODULES: dict[str, str] = {
    ONNXRUNTIME: "edgevlm.export.profiles.onnxruntime",
    TENSORRT_10_3: "edgevlm.export.profiles.tensorrt_10_3",
    TENSORRT_10_15: "edgevlm.export.profiles.tensorrt_10_15",
}
LEAST_OPSET = {"int4": 21}  # the first with numbers of 4 bits, and blocks that share a scale


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


class MakesOperators(Protocol):
    def __call__(self, graph: GraphBuilder, shape: DecoderShape) -> Operators: ...


class MakesCache(Protocol):
    def __call__(self, graph: GraphBuilder, shape: DecoderShape, kv: KVType) -> Cache: ...


@dataclass(frozen=True, slots=True)
class Profile:
    """opset, ir_version: of decoder graphs. kv: what keys and values may be. precisions: its own layouts, None for
    :mod:`edgevlm.export.precisions`. variants: the decoder graphs there are. vision: the precisions of towers.
    """

    name: str
    opset: int
    ir_version: int
    operators: MakesOperators
    cache: MakesCache
    kv: tuple[KVType, ...]
    precisions: Mapping[str, Precision] | None
    variants: tuple[str, ...]
    vision: tuple[str, ...]

    @property
    def is_tensorrt(self) -> bool:
        return self.name != ONNXRUNTIME

    def precision(self, name: str) -> Precision:
        """The layouts of a weight precision; raises UserError for one that is unknown, or that the profile has not."""
        chosen = load_precision(name)
        if self.precisions is None:
            return chosen
        if name not in self.precisions:
            raise UserError(f"--precision {name} cannot be written for {self.name}; give {' or '.join(self.precisions)}")
        return self.precisions[name]

    def check_kv(self, kv: KVType) -> None:
        """Raises UserError for keys and values that its graphs cannot keep."""
        if kv not in self.kv:
            raise UserError(f"--kv {kv} cannot be written for {self.name}; give {' or '.join(self.kv)}")

    def vision_precision(self, wanted: str | None, precision: str) -> str:
        """The tower's precision; unless one is wanted, that of the products. Raises UserError for one that it cannot have."""
        chosen = wanted or ("fp16" if self.is_tensorrt and precision != "fp32" else "fp32")
        if chosen not in self.vision:
            raise UserError(f"--vision-precision {chosen!r} is not known for {self.name}; there is {' and '.join(self.vision)}")
        return chosen

    def check_operators(self, graphs: Iterable[Path]) -> None:
        """Assert that TensorRT's parser has every operator of these graphs, for the types they use it with."""
        if self.is_tensorrt:
            from edgevlm.export.profiles.allowed import Allowed

            allowed = Allowed.load(self.name)
            for graph in graphs:
                allowed.check(graph)

    def graph(self, name: str, weights: Any, precision: str) -> GraphBuilder:
        """An empty graph for weights of a precision."""
        return GraphBuilder(name, weights, max(self.opset, LEAST_OPSET.get(precision, 0)), self.ir_version)


def load_profile(name: str) -> Profile:
    """The profile called ``name``; raises UserError naming the nearest known one."""
    if name not in MODULES:
        raise UserError(f"no profile is called {name!r}; {nearest(name, PROFILES)}")
    module: Any = import_module(MODULES[name])
    profile: Profile = module.PROFILE
    return profile
