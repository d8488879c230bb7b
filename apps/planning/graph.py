"""The tensors that an ONNX file names, read from its bytes: a plan needs their shapes alone, and no package of onnx.

Protocol buffers: a message is fields, each a key (number * 8 + kind) and a whole number (kind 0), 8 or 4 bytes (1, 5), or a
length and so many bytes (2). A whole number has 7 bits a byte, the lowest first, and the top bit where there are more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edgevlm.errors import BundleError

GRAPH, INITIALIZER = 7, 5  # fields of ModelProto and of GraphProto
DIMS, NAME = 1, 8  # of TensorProto
Field = tuple[int, int | memoryview]


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Name to shape of the initializers of the graph in ``path``. Raises BundleError for what is no ONNX file."""
    try:
        return dict(_shapes(memoryview(path.read_bytes())))
    except (IndexError, TypeError, ValueError) as error:
        raise BundleError(f"{path}: is no ONNX graph ({error}); export the checkpoint again") from None


def _shapes(model: memoryview) -> Iterator[tuple[str, tuple[int, ...]]]:
    for graph in _messages(model, GRAPH):
        for tensor in _messages(graph, INITIALIZER):
            fields = list(_fields(tensor))
            name = next(bytes(value) for number, value in fields if number == NAME and isinstance(value, memoryview))
            yield name.decode(), tuple(size for number, value in fields if number == DIMS for size in _numbers(value))


def _messages(message: memoryview, wanted: int) -> Iterator[memoryview]:
    return (value for number, value in _fields(message) if number == wanted and isinstance(value, memoryview))


def _numbers(value: int | memoryview) -> Iterator[int]:
    """One whole number, or all of those that are packed into bytes."""
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = _whole(value, at)
        yield number


def _fields(message: memoryview) -> Iterator[Field]:
    at = 0
    while at < len(message):
        key, at = _whole(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _whole(message, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of kind {kind}")
        length, at = _whole(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + length > len(message):
            raise ValueError("it is cut short")
        yield key >> 3, message[at : at + length]
        at += length


def _whole(message: memoryview, at: int) -> tuple[int, int]:
    """The whole number that begins at ``at``, and where it ends."""
    number, shift = 0, 0
    while True:
        byte, at = message[at], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
