"""Writing an ONNX graph by hand: a thin builder over ``onnx.helper`` and one file of external weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
IR_VERSION = 10  # what ONNX Runtime 1.22 reads
ALIGNMENT = 64
CONTRIB = "com.microsoft"
_AS_THEY_ARE = (np.float16, np.uint8)


def external_tensor(name: str, file: str, dtype: int, shape: Sequence[int], offset: int, length: int) -> TensorProto:
    """An initializer whose bytes lie in ``file``, beside the graph."""
    tensor = TensorProto(name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def tensor_type(dtype: np.dtype) -> int:
    """ONNX's name of a numpy dtype."""
    kind: int = helper.np_dtype_to_tensor_dtype(dtype)
    return kind


def save_array(path: Path, array: NDArray[Any]) -> int:
    """Write ``array`` as an .npy file; returns where its bytes start. (``np.save`` does not say that a disk is full.)"""
    return save_slices(path, len(array), [array])


def save_slices(path: Path, length: int, slices: Iterable[NDArray[Any]]) -> int:
    """Write arrays that follow one another on the first axis, ``length`` in all, as one .npy file; returns where they start."""
    with path.open("wb") as stream:
        start = 0
        for array in slices:
            if not start:
                header = np.lib.format.header_data_from_array_1_0(array) | {"shape": (length, *array.shape[1:])}
                np.lib.format.write_array_header_1_0(stream, header)
                start = stream.tell()
            stream.write(np.ascontiguousarray(array).data)
    return start


class WeightsFile:
    """Tensors one after another, 64-byte aligned, written as they come: one in memory at a time.

    Graphs that share the file share its tensors: a name is written once.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.stream = stream
        self.name = name
        self._written: dict[str, TensorProto] = {}

    def add(self, name: str, array: NDArray[Any]) -> TensorProto:
        """The initializer that refers to ``array``, appended to the file the first time that ``name`` comes.

        float16 and uint8 are stored as they are, everything else as float32.
        """
        if name not in self._written:
            self._written[name] = self._append(name, array)
        return self._written[name]

    def _append(self, name: str, array: NDArray[Any]) -> TensorProto:
        data = np.ascontiguousarray(array, array.dtype if array.dtype in _AS_THEY_ARE else np.float32)
        self.stream.write(b"\0" * (-self.stream.tell() % ALIGNMENT))
        offset = self.stream.tell()
        self.stream.write(data.data if data.size else b"")
        return external_tensor(name, self.name, tensor_type(data.dtype), data.shape, offset, data.nbytes)


class GraphBuilder:
    """Nodes, initializers, inputs and outputs of one graph; names are unique and readable."""

    def __init__(self, name: str, weights: WeightsFile) -> None:
        self.name = name
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def weight(self, name: str, array: NDArray[Any]) -> str:
        """An initializer kept in the weights file."""
        self.initializers.append(self.weights.add(name, array))
        return name

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """A small initializer kept in the graph itself; the same name twice is one constant."""
        if all(tensor.name != name for tensor in self.initializers):
            self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        """Add a node and return its first output."""
        name = next(output for output in outputs if output)
        self.nodes.append(helper.make_node(op, inputs, outputs, name=f"{op}:{name}", domain=domain, **attributes))
        return name

    def save(self, path: Path) -> None:
        """Write the graph; its weights file is written already."""
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgevlm")
        path.write_bytes(model.SerializeToString(deterministic=True))
