"""The embedding: files of rows that a host gathers from, and, where the head is tied to it, the head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto

from edgevlm.export.graph import GraphBuilder, external_tensor, save_slices, tensor_type
from edgevlm.export.precisions import Float32, Layout, Parts

FILES = {"weight": "embedding.npy", "codes": "embedding.npy", "scales": "embedding-scales.npy"}  # part -> file
_ROWS = 8192  # rounded at once


@dataclass(frozen=True, slots=True)
class Table:
    """Rows ``[vocab, hidden]`` of a layout, in files beside the graphs."""

    layout: Layout
    tensors: tuple[TensorProto, ...]
    shape: tuple[int, int]

    @property
    def files(self) -> tuple[str, ...]:
        """The codes, or the numbers themselves; then the scales, if there are."""
        return tuple(tensor.external_data[0].value for tensor in self.tensors)

    def multiply(self, graph: GraphBuilder, name: str, rows: str) -> str:
        """Nodes for ``rows @ table.T``; the graph refers to the table's own files."""
        graph.initializers += self.tensors
        return self.layout.multiply(graph, name, rows, [tensor.name for tensor in self.tensors], self.shape)


def write_table(folder: Path, layout: Layout, weight: Float32) -> Table:
    """Write ``weight [vocab, hidden]`` into ``folder``, a file a part, rounding a slice of rows at a time. Raises OSError."""
    vocab, hidden = weight.shape

    def slices(part: str) -> Iterator[np.ndarray]:
        return (layout.parts(weight[row : row + _ROWS])[part] for row in range(0, vocab, _ROWS))

    first: Parts = layout.parts(weight[:1])
    tensors = []
    for part, array in first.items():
        start = save_slices(folder / FILES[part], vocab, slices(part))
        length = vocab * array[0].nbytes
        shape = (vocab, *array.shape[1:])
        tensors.append(external_tensor(f"head.{part}", FILES[part], tensor_type(array.dtype), shape, start, length))
    return Table(layout, tuple(tensors), (vocab, hidden))
