"""An ONNX file without the ``onnx`` package, which a device need not have: shapes, external weights, numbers for dimensions.

Only what leads to them is decoded: a message is a sequence of fields, each a key (number << 3 | kind) and, in the kinds that
ONNX has, a varint, 4 or 8 bytes, or a length and as many bytes (protobuf's encoding). Everything else is kept as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
GRAPH, INITIALIZER = 7, 5  # ModelProto.graph, GraphProto.initializer
NODE, OP_TYPE = 1, 4  # GraphProto.node, NodeProto.op_type
DIMS, DATA_TYPE, NAME, EXTERNAL = 1, 2, 8, 13  # TensorProto.dims, data_type, name, external_data
FLOAT, FLOAT16 = 1, 10  # TensorProto.DataType
VALUES = (11, 12, 13)  # GraphProto.input, output, value_info
TYPE, TENSOR_TYPE, SHAPE, DIM = 2, 1, 2, 1  # of a ValueInfoProto, inwards
DIM_VALUE, DIM_PARAM = 1, 2


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its number and kind, its value (a number, or its bytes), and all its bytes, key included."""

    number: int
    kind: int
    value: int | bytes
    raw: bytes


def initializer_shapes(model: bytes) -> dict[str, tuple[int, ...]]:
    """Name to shape of a graph's initializers; raises ValueError for what is no ONNX file."""
    found = {}
    for graph in _inside(model, GRAPH):
        for tensor in _inside(graph, INITIALIZER):
            name = b"".join(_inside(tensor, NAME))
            found[_text(name)] = tuple(size for field in _fields(tensor) if field.number == DIMS for size in _numbers(field))
    return found


def value_shapes(model: bytes) -> dict[str, tuple[int | None, ...]]:
    """Name to shape of a graph's inputs and outputs, None for a dimension with a name; raises ValueError for no ONNX file."""
    found = {}
    for graph in _inside(model, GRAPH):
        for part in VALUES[:2]:
            for value in _inside(graph, part):
                shapes = [
                    shape
                    for kind in _inside(value, TYPE)
                    for tensor in _inside(kind, TENSOR_TYPE)
                    for shape in _inside(tensor, SHAPE)
                ]
                sizes = [_dimension(raw) for shape in shapes for raw in _inside(shape, DIM)]
                found[_text(b"".join(_inside(value, 1)))] = tuple(sizes)
    return found


def _dimension(raw: bytes) -> int | None:
    return next((field.value for field in _fields(raw) if field.number == DIM_VALUE and isinstance(field.value, int)), None)


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """Weights of a graph that lie in a file beside it. kind: ONNX's number of their type."""

    name: str
    kind: int
    file: str
    offset: int
    length: int


def external_tensors(model: bytes) -> list[ExternalTensor]:
    """The weights of a graph that lie in files; raises ValueError for what is no ONNX file."""
    found = []
    for graph in _inside(model, GRAPH):
        for tensor in _inside(graph, INITIALIZER):
            about = {}
            for entry in _inside(tensor, EXTERNAL):
                key, value = (_text(b"".join(_inside(entry, number))) for number in (1, 2))
                about[key] = value
            if "location" in about:
                name, numbers = _text(b"".join(_inside(tensor, NAME))), (int(about.get(key, 0)) for key in ("offset", "length"))
                kind = sum(int(field.value) for field in _fields(tensor) if field.number == DATA_TYPE and field.kind == VARINT)
                found.append(ExternalTensor(name, kind, about["location"], *numbers))
    return found


def external_bytes(model: bytes) -> dict[str, int]:
    """Files that hold weights of a graph, and how many bytes of each it uses; raises ValueError for what is no ONNX file."""
    found: Counter[str] = Counter()
    for tensor in external_tensors(model):
        found[tensor.file] += tensor.length
    return dict(found)


def external_types(model: bytes) -> set[int]:
    """ONNX's numbers of the types of weights that lie in files, :data:`FLOAT16` among them."""
    return {tensor.kind for tensor in external_tensors(model)}


def operators(model: bytes) -> set[str]:
    """Names of the operators of a graph's nodes; raises ValueError for what is no ONNX file."""
    nodes = (node for graph in _inside(model, GRAPH) for node in _inside(graph, NODE))
    return {_text(name) for node in nodes for name in _inside(node, OP_TYPE)}


def with_dimensions(model: bytes, sizes: Mapping[str, int]) -> bytes:
    """The file with symbolic dimensions of inputs, outputs and other values replaced by numbers, by their names."""

    def dimension(raw: bytes) -> bytes:
        for field in _fields(raw):
            if field.number == DIM_PARAM and (name := _text(_bytes(field))) in sizes:
                return _key(DIM_VALUE, VARINT) + _varint(sizes[name])
        return raw

    def value(raw: bytes) -> bytes:
        return _changed(raw, (TYPE, TENSOR_TYPE, SHAPE, DIM), dimension)

    for part in VALUES:
        model = _changed(model, (GRAPH, part), value)
    return model


def _changed(raw: bytes, path: tuple[int, ...], change: Callable[[bytes], bytes]) -> bytes:
    """A message with ``change`` applied to the bytes of every field at ``path``."""
    out = []
    for field in _fields(raw):
        if field.number != path[0] or field.kind != BYTES:
            out.append(field.raw)
            continue
        inner = _bytes(field)
        new = _changed(inner, path[1:], change) if len(path) > 1 else change(inner)
        out.append(field.raw if new == inner else _key(field.number, BYTES) + _varint(len(new)) + new)
    return b"".join(out)


def _inside(raw: bytes, number: int) -> Iterator[bytes]:
    return (_bytes(field) for field in _fields(raw) if field.number == number)


def _bytes(field: Field) -> bytes:
    if not isinstance(field.value, bytes):
        raise ValueError(f"field {field.number} holds a number where ONNX has a message")
    return field.value


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError("is no ONNX file (a name that is no text)") from None


def _numbers(field: Field) -> Iterator[int]:
    """Of a repeated integer one, or all those that are packed into bytes."""
    if isinstance(field.value, int):
        yield field.value
        return
    at = 0
    while at < len(field.value):
        number, at = _read_varint(field.value, at)
        yield number


def _fields(raw: bytes) -> Iterator[Field]:
    at = 0
    while at < len(raw):
        start = at
        key, at = _read_varint(raw, at)
        kind = key & 7
        value: int | bytes
        if kind == VARINT:
            value, at = _read_varint(raw, at)
        elif kind in (EIGHT, FOUR, BYTES):
            length, at = _read_varint(raw, at) if kind == BYTES else ((8 if kind == EIGHT else 4), at)
            value, at = raw[at : at + length], at + length
        else:
            raise ValueError(f"is no ONNX file (a field of kind {kind})")
        if at > len(raw):
            raise ValueError("is no ONNX file (it ends within a field)")
        yield Field(key >> 3, kind, value, raw[start:at])


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(raw) or shift > 63:
            raise ValueError("is no ONNX file (it ends within a number)")
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)
