"""Write the weights of the embedding and the head, which may be tied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto

from edgevlm.export.graph import ExportJournal, GraphBuilder, WeightsFile, external_tensor, save_slices, tensor_type
from edgevlm.export.precisions import Float32, Layout, Parts

FILES = {"weight": "embedding.npy", "codes": "embedding.npy", "scales": "embedding-scales.npy"}
Read = Callable[[], Iterator[Float32]]  # each call starts again and yields slices of whole rows


@dataclass(frozen=True, slots=True)
class WeightTable:
    """The weights of the embedding or the head, stored in files next to the graphs. The shape is ``[vocab, hidden]``."""

    layout: Layout
    tensors: tuple[TensorProto, ...]
    shape: tuple[int, int]

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the table's files. If there is a file of scales, it comes last."""
        return tuple(tensor.external_data[0].value for tensor in self.tensors)

    def multiply(self, graph: GraphBuilder, name: str, rows: str) -> str:
        graph.initializers += self.tensors
        return self.layout.multiply(graph, name, rows, [tensor.name for tensor in self.tensors], self.shape)


def write_table(folder: Path, layout: Layout, shape: tuple[int, int], read: Read, journal: ExportJournal) -> WeightTable:
    """Write the embedding, one file for each stored array, unless the journal lists this step as finished."""

    def write() -> list[tuple[str, str, int, list[int], int, int]]:
        written = []
        for part, kept, dtype in parts_of(layout, shape):
            start = save_slices(folder / FILES[part], shape[0], (layout.parts(rows)[part] for rows in read()))
            length = int(np.prod(kept)) * dtype.itemsize
            written.append((f"head.{part}", FILES[part], tensor_type(dtype), list(kept), start, length))
        return written

    return WeightTable(layout, tuple(external_tensor(name, *at) for name, *at in journal.once(FILES["weight"], write)), shape)


def head_table(weights: WeightsFile, layout: Layout, shape: tuple[int, int], read: Read) -> WeightTable:
    """Write a head that does not share the embedding's weights to the graphs' weights file. Raises OSError."""
    tensors = (
        weights.add_slices(f"head.{part}", kept, dtype, (layout.parts(rows)[part] for rows in read()))
        for part, kept, dtype in parts_of(layout, shape)
    )
    return WeightTable(layout, tuple(tensors), shape)


def parts_of(layout: Layout, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    """Return the name, shape and dtype of each array that ``layout`` stores for a matrix of this shape."""
    first: Parts = layout.parts(np.zeros((1, shape[1]), np.float32))
    return [(part, (shape[0], *array.shape[1:]), array.dtype) for part, array in first.items()]
