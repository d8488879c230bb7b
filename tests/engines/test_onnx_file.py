"""An ONNX file read and changed without the onnx package, beside what that package makes of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevlm.engines.onnx_file import external_bytes, external_types, initializer_shapes, operators, with_dimensions
from edgevlm.runtime.model import demo_bundle

GRAPHS = sorted(demo_bundle().glob("*.onnx"))


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda path: path.stem)
def test_a_graph_is_what_onnx_finds(graph: Path) -> None:
    model, raw = onnx.load(graph, load_external_data=False).graph, graph.read_bytes()
    found: Counter[str] = Counter()
    for tensor in model.initializer:
        about = {entry.key: entry.value for entry in tensor.external_data}
        if about:
            found[about["location"]] += int(about["length"])
    assert found
    assert external_bytes(raw) == dict(found)
    assert operators(raw) == Counter(node.op_type for node in model.node)
    assert external_types(raw) == {tensor.data_type for tensor in model.initializer if tensor.external_data}
    assert initializer_shapes(raw) == {tensor.name: tuple(tensor.dims) for tensor in model.initializer}


def test_dimensions_are_read_one_by_one_and_packed() -> None:
    """As protobuf 2 and 3 write a repeated number: 300 is AC 02, and fields 7, 5 of the model and the graph hold the tensor."""
    one_by_one, packed = b"\x08\xac\x02\x08\x05", b"\x0a\x03\xac\x02\x05"
    for dims in (one_by_one, packed):
        tensor = dims + b"\x42\x01w"
        graph = b"\x2a" + bytes([len(tensor)]) + tensor
        assert initializer_shapes(b"\x3a" + bytes([len(graph)]) + graph) == {"w": (300, 5)}


@pytest.mark.parametrize("size", [1, 127, 128, 6000, 2**31])
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda path: path.stem)
def test_dimensions_are_given_numbers_and_nothing_else_changes(graph: Path, size: int) -> None:
    expected = onnx.load(graph, load_external_data=False)
    values = (*expected.graph.input, *expected.graph.output, *expected.graph.value_info)
    dims = [dim for value in values for dim in value.type.tensor_type.shape.dim if dim.dim_param]
    name = dims[-1].dim_param
    for dim in dims:
        if dim.dim_param == name:
            dim.dim_value = size
    assert onnx.load_model_from_string(with_dimensions(graph.read_bytes(), {name: size, "no such dimension": 3})) == expected


@given(st.data())
def test_damaged_files_are_refused(data: st.DataObject) -> None:
    raw = bytearray(GRAPHS[0].read_bytes()[:2000])
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for read in (initializer_shapes, external_bytes, lambda model: with_dimensions(model, {"S": 1})):
        try:
            read(cut)
        except ValueError:
            continue
