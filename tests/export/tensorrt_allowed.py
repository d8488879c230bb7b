"""What TensorRT's ONNX parser takes, one data file a version, and the check that a graph stays within it.

A file has the opsets, the ``operators`` by the types that they take, the inputs that must be ``constants``, and ``sources``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx
from onnx import TensorProto

Types = Mapping[str, str]  # tensor -> its type


@dataclass(frozen=True, slots=True)
class Allowed:
    """operators: each with the types that it takes. opset_with_int4: the newest, of graphs that have numbers of 4 bits."""

    tensorrt: str
    opsets: tuple[int, int]
    opset_with_int4: int
    operators: Mapping[str, frozenset[str]]
    constants: Mapping[str, tuple[int, ...]]

    @classmethod
    @cache
    def load(cls, profile: str) -> Allowed:
        """Of a TensorRT profile."""
        data = json.loads(Path(__file__).with_name(f"{profile}.json").read_text(encoding="utf-8"))
        return cls(
            tensorrt=data["tensorrt"],
            opsets=(data["opsets"][0], data["opsets"][1]),
            opset_with_int4=data.get("opset_with_int4", data["opsets"][1]),
            operators={op: frozenset(types.split()) for types, ops in data["operators"].items() for op in ops},
            constants={op: tuple(inputs) for op, inputs in data["constants"].items()},
        )

    def check(self, path: Path) -> None:
        """Raises AssertionError, which is a defect of the exporter, naming every node that the parser would not take."""
        model = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False), strict_mode=True, data_prop=True)
        types, refused = _types(model.graph), []
        fixed = {tensor.name for tensor in model.graph.initializer}
        for opset in model.opset_import:
            most = max(self.opsets[1], self.opset_with_int4 if "INT4" in types.values() else 0)
            if opset.domain or not self.opsets[0] <= opset.version <= most:
                refused.append(f"opset {opset.domain or 'ai.onnx'} {opset.version}")
        for node in model.graph.node:
            fixed.update(node.output if node.op_type == "Constant" else ())
            refused += [f"{node.name or node.op_type}: {why}" for why in self._refused(node, types, fixed)]
        assert not refused, f"{path.name} has what TensorRT {self.tensorrt} does not take: {'; '.join(refused)}"

    def _refused(self, node: onnx.NodeProto, types: Types, fixed: set[str]) -> Iterable[str]:
        if node.domain or node.op_type not in self.operators:
            yield f"no operator {node.op_type} {node.domain}".rstrip()
            return
        for name in _data(node):
            kind = types.get(name, "unknown")
            if kind not in self.operators[node.op_type]:
                yield f"{name} is {kind}"
        for index in self.constants.get(node.op_type, ()):
            if len(node.input) > index and node.input[index] not in fixed:
                yield f"{node.input[index]} is not constant"
        if node.op_type in ("Attention", "LayerNormalization") and len(node.output) > 1:
            yield "has more than one output"


def _data(node: onnx.NodeProto) -> list[str]:
    """The tensors whose types an operator's line in the table is about: not its axes, lengths and indices."""
    if node.op_type in ("Constant", "ConstantOfShape"):
        return list(node.output)
    if node.op_type == "Where":
        return list(node.input[1:])
    return [*node.input[:1], *(node.output if node.op_type == "Cast" else ())]


def _types(graph: onnx.GraphProto) -> dict[str, str]:
    """The type of every tensor that has one."""
    values = [*graph.input, *graph.output, *graph.value_info]
    types = {value.name: TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in values}
    return types | {tensor.name: TensorProto.DataType.Name(tensor.data_type) for tensor in graph.initializer}
