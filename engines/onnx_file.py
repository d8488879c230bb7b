"""What engines and planning read of an ONNX file: shapes, operators and external weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from edgevlm.packages import needs

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

FLOAT16 = 10  # TensorProto.DataType


class ExternalTensor(NamedTuple):
    """Weights of a graph in a file beside it. kind: ONNX's number of their type."""

    name: str
    kind: int
    file: str
    offset: int
    length: int


def initializer_shapes(model: bytes) -> dict[str, tuple[int, ...]]:
    """Return the shape of each initializer by name. Raises ValueError for what is not an ONNX file."""
    return {tensor.name: tuple(tensor.dims) for tensor in _read(model).graph.initializer}


def value_shapes(model: bytes) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of a graph's inputs and outputs, None for a named dimension. Raises ValueError likewise."""
    graph = _read(model).graph
    return {
        value.name: tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim)
        for value in (*graph.input, *graph.output)
    }


def external_tensors(model: bytes) -> list[ExternalTensor]:
    """Return the weights of a graph that are in files. Raises ValueError likewise."""
    found = []
    for tensor in _read(model).graph.initializer:
        about = {entry.key: entry.value for entry in tensor.external_data}
        if "location" in about:
            offset, length = (int(about.get(key, 0)) for key in ("offset", "length"))
            found.append(ExternalTensor(tensor.name, tensor.data_type, about["location"], offset, length))
    return found


def external_bytes(model: bytes) -> dict[str, int]:
    """Return the bytes that a graph uses of each file of weights. Raises ValueError likewise."""
    found: Counter[str] = Counter()
    for tensor in external_tensors(model):
        found[tensor.file] += tensor.length
    return dict(found)


def external_types(model: bytes) -> set[int]:
    """Return ONNX's numbers of the types of weights in files, :data:`FLOAT16` among them."""
    return {tensor.kind for tensor in external_tensors(model)}


def operators(model: bytes) -> Counter[str]:
    """Return how many nodes a graph has of each operator. Raises ValueError likewise."""
    return Counter(node.op_type for node in _read(model).graph.node)


def with_input(model: bytes, name: str, like: str) -> bytes:
    """Make the value ``name`` of a graph an input, of the type and shape of the input ``like``, and drop what computed it.

    Outputs named ``.._out`` and unused inputs are dropped too. A model that has the input is returned as it is. Raises
    ValueError likewise.
    """
    proto = _read(model)
    graph, inputs = proto.graph, {value.name: value for value in proto.graph.input}
    if name in inputs:
        return model
    if like not in inputs:
        raise ValueError(f"is not part of a decoder (it has no {like})")
    outputs = [value for value in graph.output if not value.name.endswith("_out")]
    needed = {value.name for value in outputs}
    nodes: list[NodeProto] = []
    for node in reversed(graph.node):
        if name not in node.output and needed & set(node.output):
            nodes.insert(0, node)
            needed |= set(node.input)
    kept = type(graph)(name=graph.name, node=nodes, output=outputs, initializer=graph.initializer)
    kept.input.extend(value for value in graph.input if value.name in needed)
    kept.input.add().CopyFrom(inputs[like])
    kept.input[-1].name = name
    graph.CopyFrom(kept)
    return bytes(proto.SerializeToString())


def with_dimensions(model: bytes, sizes: Mapping[str, int]) -> bytes:
    """Replace the named dimensions of inputs, outputs and other values by numbers."""
    proto = _read(model)
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return bytes(proto.SerializeToString()) if sizes else model


def _read(model: bytes) -> ModelProto:
    with needs("reading ONNX files", "cpu"):
        import onnx
    try:
        return onnx.load_model_from_string(model)
    except Exception as error:  # protobuf's own
        raise ValueError(f"is not an ONNX file ({error})") from None
