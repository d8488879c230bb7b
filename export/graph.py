"""Write ONNX graphs and their weights, and record which steps of an export have finished."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray
from onnx import TensorProto, helper, numpy_helper

from edgevlm.runtime.files import JsonLines

OPSET = 18
IR_VERSION = 10  # ONNX Runtime 1.22 reads this version
ALIGNMENT = 64
CONTRIB = "com.microsoft"
INT4 = np.dtype(ml_dtypes.int4)
_AS_THEY_ARE = (np.float16, np.uint8, np.int8, INT4)
SLICE = 4 << 20


def external_tensor(name: str, file: str, dtype: int, shape: Sequence[int], offset: int, length: int) -> TensorProto:
    """Return an initializer whose bytes are in ``file``. The file must be in the graph's folder."""
    tensor = TensorProto(name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def tensor_type(dtype: np.dtype) -> int:
    """Return the TensorProto.DataType of a numpy dtype."""
    kind: int = helper.np_dtype_to_tensor_dtype(dtype)
    return kind


def save_slices(path: Path, length: int, slices: Iterable[NDArray[Any]]) -> int:
    """Write an array that is given in slices to one .npy file, and return the offset of the array's data.

    ``np.save`` is not used because it does not report a full disk. ``length``: the total number of rows in all slices.
    """
    with path.open("wb") as stream:
        start = 0
        for array in slices:
            if not start:
                header = np.lib.format.header_data_from_array_1_0(array) | {"shape": (length, *array.shape[1:])}
                np.lib.format.write_array_header_1_0(stream, header)
                start = stream.tell()
            stream.write(np.ascontiguousarray(array).data)
        flush(stream)
    return start


def flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def pairs(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack an even number of int4 numbers in row-major order, two per byte, the first in the low half."""
    nibbles = codes.astype(np.int8).reshape(-1, 2).view(np.uint8)
    return np.bitwise_or(nibbles[:, 0] & 15, np.left_shift(nibbles[:, 1], 4), dtype=np.uint8)


class ExportJournal(JsonLines):
    """Records the finished steps of an export, with a JSON value for each step, in the file ``path`` or only in memory."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path, key=lambda line: line[0], sync=True)

    def once(self, step: str, work: Callable[[], Any]) -> Any:
        """Return the step's JSON value, calling ``work`` only if the step has not finished before. Raises OSError."""
        if step not in self.records:
            self.add([step, work()])  # ``work`` itself flushes its files to the disk
        return self.records[step][1]


class WeightsFile:
    """A file of 64-byte aligned tensors, written one after another in slices.

    Several graphs use the same tensors, so a tensor is written only once. When an export continues, the file is truncated after
    the tensors of the last finished step.
    """

    def __init__(self, stream: BinaryIO, name: str, journal: ExportJournal | None = None) -> None:
        self.stream, self.name, self.journal = stream, name, journal or ExportJournal()
        self.written: dict[str, TensorProto] = {}
        self._new: list[tuple[Any, ...]] = []
        end = 0
        for _, value in self.journal.records.values():
            if isinstance(value, dict) and value.get("file") == name:
                end = value["end"]
                self.written |= {row[0]: external_tensor(*row) for row in value["tensors"]}
        if stream.seek(0, os.SEEK_END) < end:
            raise OSError(f"{name} is shorter than its journal records")
        stream.seek(end)
        stream.truncate()

    def add(self, name: str, array: NDArray[Any]) -> TensorProto:
        """Append an array to the file, unless it already holds an array of this name, and return the array's initializer.

        float16, uint8, int8 and int4 arrays are stored unchanged, all others as float32.
        """
        step = max(1, SLICE // max(1, int(np.prod(array.shape[1:]))))
        slices = (array[start : start + step] for start in range(0, len(array), step))
        return self.add_slices(name, array.shape, array.dtype, slices)

    def add_slices(self, name: str, shape: Sequence[int], dtype: DTypeLike, slices: Iterable[NDArray[Any]]) -> TensorProto:
        """Append a tensor like :meth:`add`, but from slices of whole rows."""
        if name not in self.written:
            row = self._append(name, shape, np.dtype(dtype if dtype in _AS_THEY_ARE else np.float32), slices)
            self._new.append(row)
            self.written[name] = external_tensor(*row)
        return self.written[name]

    def finish(self, step: str) -> None:
        """Flush the file and record the step in the journal as finished. Raises OSError."""
        if step not in self.journal.records:
            flush(self.stream)
            self.journal.add([step, {"file": self.name, "end": self.stream.tell(), "tensors": self._new}])
        self._new = []

    def _append(self, name: str, shape: Sequence[int], kept: np.dtype, slices: Iterable[NDArray[Any]]) -> tuple[Any, ...]:
        self.stream.write(b"\0" * (-self.stream.tell() % ALIGNMENT))
        offset = self.stream.tell()
        for rows in slices:
            data = pairs(rows) if kept == INT4 else np.ascontiguousarray(rows, kept)
            self.stream.write(data.data if data.size else b"")
        return name, self.name, tensor_type(kept), list(shape), offset, self.stream.tell() - offset


class GraphBuilder:
    """Builds an ONNX graph of nodes, initializers, inputs and outputs with unique, readable names.

    ``for_cpu``: whether the graph runs only on ONNX Runtime's CPU provider, and may use operators that other providers lack.
    """

    def __init__(self, name: str, weights: WeightsFile, opset: int = OPSET, ir_version: int = IR_VERSION) -> None:
        self.name = name
        self.weights = weights
        self.opset, self.ir_version, self.for_cpu = opset, ir_version, False
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
        """Add an initializer that is stored in the weights file, and return its name."""
        self.initializers.append(self.weights.add(name, array))
        return name

    def shared(self, name: str) -> bool:
        """If the weights file already has a tensor of this name, add the tensor to the graph and return True."""
        if (tensor := self.weights.written.get(name)) is not None:
            self.initializers.append(tensor)
        return tensor is not None

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """Add a small initializer to the graph itself, unless ``name`` exists already, and return its name."""
        if all(tensor.name != name for tensor in self.initializers):
            self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def integers(self, *numbers: int) -> str:
        """Return an int64 constant, such as a shape."""
        return self.constant("int64." + ".".join(map(str, numbers)), np.array(numbers, np.int64))

    def number(self, value: float) -> str:
        return self.constant(f"float.{value!r}", np.float32(value))

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        name = next(output for output in outputs if output)
        self.nodes.append(helper.make_node(op, inputs, outputs, name=f"{op}:{name}", domain=domain, **attributes))
        return name

    def fused(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one of ONNX Runtime's own operators, and return its first output."""
        return self.node(op, inputs, outputs, CONTRIB, **attributes)

    def cast(self, tensor: str, name: str, dtype: DTypeLike) -> str:
        return self.node("Cast", [tensor], [name], to=tensor_type(np.dtype(dtype)))

    def save(self, path: Path) -> None:
        graph = helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, self.initializers)
        opsets = [helper.make_opsetid("", self.opset)]
        if any(node.domain == CONTRIB for node in self.nodes):
            opsets.append(helper.make_opsetid(CONTRIB, 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=self.ir_version, producer_name="edgevlm")
        path.write_bytes(model.SerializeToString(deterministic=True))
