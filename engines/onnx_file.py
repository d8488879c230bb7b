"""Read an ONNX file's graph without the ``onnx`` package, whose import takes 10 MB and 0.1 s.

An ONNX file is a protobuf message: a sequence of fields. A field is a key (number << 3 | kind) and a value: a varint, 4 or 8
bytes, or a length and that many bytes.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
FLOAT, FLOAT16 = 1, 10
# field numbers in onnx.proto: of the model and the graph, of a node, of a tensor, and of a value's shape
GRAPH, NODE, INITIALIZER, INPUT, OUTPUT = 7, 1, 5, 11, 12
NODE_INPUT, NODE_OUTPUT, OP_TYPE, ATTRIBUTE = 1, 2, 4, 5
DIMS, DATA_TYPE, NAME, EXTERNAL = 1, 2, 8, 13
TYPE, TENSOR_TYPE, SHAPE, DIM, DIM_VALUE = 2, 1, 2, 1, 1


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """An initializer whose bytes are in a separate file. ``kind`` is a TensorProto.DataType."""

    name: str
    kind: int
    file: str
    offset: int
    length: int


def initializer_shapes(model: bytes) -> dict[str, tuple[int, ...]]:
    """Return the shape of each initializer by name. Raises ValueError for anything but an ONNX file."""
    return {_name(tensor): tuple(_numbers(tensor, DIMS)) for tensor in _inside(model, GRAPH, INITIALIZER)}


def value_shapes(model: bytes) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of inputs and outputs, with None for a named dimension. Raises ValueError for anything but an ONNX
    file.
    """
    return {
        _text(value, 1): tuple(next(_numbers(dim, DIM_VALUE), None) for dim in _inside(value, TYPE, TENSOR_TYPE, SHAPE, DIM))
        for part in (INPUT, OUTPUT)
        for value in _inside(model, GRAPH, part)
    }


def external_tensors(model: bytes) -> list[ExternalTensor]:
    """Return a graph's initializers that are in separate files. Raises ValueError for anything but an ONNX file."""
    found = []
    for tensor in _inside(model, GRAPH, INITIALIZER):
        about = {_text(entry, 1): _text(entry, 2) for entry in _inside(tensor, EXTERNAL)}
        if "location" in about:
            offset, length = (int(about.get(key, 0)) for key in ("offset", "length"))
            found.append(ExternalTensor(_name(tensor), sum(_numbers(tensor, DATA_TYPE)), about["location"], offset, length))
    return found


def external_bytes(model: bytes) -> dict[str, int]:
    """Return how many bytes of each weights file a graph uses. Raises ValueError for anything but an ONNX file."""
    found: Counter[str] = Counter()
    for tensor in external_tensors(model):
        found[tensor.file] += tensor.length
    return dict(found)


def external_types(model: bytes) -> set[int]:
    """Return the types of the initializers that are in separate files, as numbers such as :data:`FLOAT16`."""
    return {tensor.kind for tensor in external_tensors(model)}


def operators(model: bytes) -> Counter[str]:
    """Return how many nodes of each operator a graph has. Raises ValueError for anything but an ONNX file."""
    return Counter(_text(node, OP_TYPE) for node in _inside(model, GRAPH, NODE))


def largest_attribute(model: bytes, name: str) -> float:
    """Return the largest value that any node has for a float attribute, or 0 if no node has the attribute."""
    numbers = [
        struct.unpack("<f", raw)[0]
        for attribute in _inside(model, GRAPH, NODE, ATTRIBUTE)
        if _text(attribute, 1) == name
        for number, raw in _fields(attribute)
        if number == 2 and isinstance(raw, bytes) and len(raw) == 4
    ]
    return max(numbers, default=0.0)


def with_input(model: bytes, name: str, like: str) -> bytes:
    """Turn a value that the graph computes into an input of the graph.

    ``name``: the value. ``like``: an existing input with the same type and shape. Outputs named ``.._out`` are dropped, and so
    are nodes and inputs that are no longer needed. A graph that already has the input is returned unchanged. Raises ValueError
    for anything but an ONNX file, and if there is no input called ``like``.
    """
    inputs = {_text(value, 1): value for value in _inside(model, GRAPH, INPUT)}
    if name in inputs:
        return model
    if like not in inputs:
        raise ValueError(f"is not part of a decoder (input {like} is missing)")
    outputs = {_text(value, 1): value for value in _inside(model, GRAPH, OUTPUT)}
    needed, nodes = {output for output in outputs if not output.endswith("_out")}, list[bytes]()
    for node in reversed(list(_inside(model, GRAPH, NODE))):
        made = {part.decode() for part in _inside(node, NODE_OUTPUT)}
        if name not in made and needed & made:
            nodes.insert(0, node)
            needed |= {part.decode() for part in _inside(node, NODE_INPUT)}
    added = b"".join(_field(number, name.encode() if number == 1 else value) for number, value in _fields(inputs[like]))
    parts = [_field(NODE, node) for node in nodes]
    parts += [_field(INPUT, value) for value in (*(inputs[at] for at in inputs if at in needed), added)]
    parts += [_field(OUTPUT, value) for at, value in outputs.items() if at in needed]
    (graph,) = _inside(model, GRAPH)
    parts += [_field(number, value) for number, value in _fields(graph) if number not in (NODE, INPUT, OUTPUT)]
    return b"".join(_field(number, b"".join(parts) if number == GRAPH else value) for number, value in _fields(model))


def with_dimensions(model: bytes, sizes: Mapping[str, int]) -> bytes:
    """Replace named dimensions of a graph with fixed numbers. Needs the ``onnx`` package."""
    import onnx

    try:
        proto = onnx.load_model_from_string(model)
    except Exception as error:  # protobuf raises exceptions of its own
        raise ValueError(f"is not an ONNX file ({error})") from None
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return bytes(proto.SerializeToString()) if sizes else model


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _as_varint(number << 3 | VARINT) + _as_varint(value)
    return _as_varint(number << 3 | BYTES) + _as_varint(len(value)) + value


def _as_varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _inside(raw: bytes, *path: int) -> Iterator[bytes]:
    for number, value in _fields(raw):
        if number == path[0]:
            if isinstance(value, int):
                raise ValueError(f"is not an ONNX file (field {number} is a number)")
            yield from _inside(value, *path[1:]) if path[1:] else [value]


def _name(tensor: bytes) -> str:
    return _text(tensor, NAME)


def _text(raw: bytes, number: int) -> str:
    try:
        return b"".join(_inside(raw, number)).decode()
    except UnicodeDecodeError:
        raise ValueError("is not an ONNX file (a name is not text)") from None


def _numbers(raw: bytes, number: int) -> Iterator[int]:
    for found, value in _fields(raw):
        if found == number and isinstance(value, int):
            yield value
        elif found == number and isinstance(value, bytes):
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                yield one


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(raw, at)
            yield key >> 3, value
        elif kind in (EIGHT, FOUR, BYTES):
            length, at = _varint(raw, at) if kind == BYTES else ((8 if kind == EIGHT else 4), at)
            if at + length > len(raw):
                raise ValueError("is not an ONNX file (truncated field)")
            yield key >> 3, raw[at : at + length]
            at += length
        else:
            raise ValueError(f"is not an ONNX file (unknown wire type {kind})")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(raw) and shift <= 63:
        value |= (raw[at] & 0x7F) << shift
        if raw[at] < 0x80:
            return value, at + 1
        at, shift = at + 1, shift + 7
    raise ValueError("is not an ONNX file (truncated number)")
