"""Weight precisions, one file each and one line in the registry: how a decoder's matrices are stored and multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import nearest
from edgevlm.export.graph import GraphBuilder

Float32 = NDArray[np.float32]
Parts = Mapping[str, NDArray]

# --precision -> module with ``PRECISION``
PRECISIONS: dict[str, str] = {
    "fp32": "edgevlm.export.precisions.fp32",
    "fp16": "edgevlm.export.precisions.fp16",
    "int8": "edgevlm.export.precisions.int8",
    "int4": "edgevlm.export.precisions.int4",
    "int4-zp": "edgevlm.export.precisions.int4_zp",
}
DEFAULT_PRECISION = "fp32"


class Layout(Protocol):
    """How a matrix ``[out, in]`` lies in files, and the nodes that multiply by it."""

    def parts(self, weight: Float32) -> Parts:
        """The arrays to store, by name; what is rounded, is rounded here."""
        ...

    def multiply(self, graph: GraphBuilder, name: str, rows: str, tensors: list[str], shape: tuple[int, int]) -> str:
        """Nodes for ``rows [..., in] @ weight.T``: ``[..., out]``, float32. tensors: the initializers of ``parts``."""
        ...


@dataclass(frozen=True, slots=True)
class Precision:
    """``matrices``: of the layers. ``table``: of the embedding and the head.

    A table's parts are by row, as the engine gathers them: numbers, or codes of 8 bits without zeros, and scales.
    """

    matrices: Layout
    table: Layout


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix of ``shape`` (out, in) as it will be stored: rounded once, for all graphs that share it."""

    layout: Layout
    parts: Parts
    shape: tuple[int, int]

    @classmethod
    def of(cls, layout: Layout, weight: Float32) -> Stored:
        return cls(layout, layout.parts(weight), (weight.shape[0], weight.shape[1]))

    @classmethod
    def written(cls, layout: Layout, weight: Float32) -> Stored:
        """One whose parts lie in the weights file already, where nothing but their names is asked for: they are of one row."""
        return cls(layout, layout.parts(weight[:1]), (weight.shape[0], weight.shape[1]))

    def multiply(self, graph: GraphBuilder, name: str, rows: str) -> str:
        """Nodes for ``rows @ weight.T``; the parts go to the weights file, as ``name.part``."""
        tensors = [graph.weight(f"{name}.{part}", array) for part, array in self.parts.items()]
        return self.layout.multiply(graph, name, rows, tensors, self.shape)


def load_precision(name: str) -> Precision:
    """The precision called ``name``; raises UserError naming the nearest known one."""
    if name not in PRECISIONS:
        raise UserError(f"--precision {name!r} is not known; {nearest(name, PRECISIONS)}")
    module: Any = import_module(PRECISIONS[name])
    precision: Precision = module.PRECISION
    return precision
