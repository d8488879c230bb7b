"""What engines read of an ONNX file, and the dimensions they set in it."""

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevlm.engines.onnx_file import external_bytes, external_tensors, initializer_shapes, value_shapes, with_dimensions
from edgevlm.runtime.model import demo_bundle

GRAPHS = sorted(demo_bundle().glob("*.onnx"))


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda path: path.stem)
def test_weights_in_files_lie_one_after_the_other(graph):
    tensors = external_tensors(graph.read_bytes())
    assert {tensor.name for tensor in tensors} <= initializer_shapes(graph.read_bytes()).keys()
    for file, size in external_bytes(graph.read_bytes()).items():
        assert sum(tensor.length for tensor in tensors if tensor.file == file) == size <= graph.with_name(file).stat().st_size


def test_dimensions_are_given_numbers_and_nothing_else_changes():
    for graph in GRAPHS:
        expected = onnx.load(graph, load_external_data=False)
        values = (*expected.graph.input, *expected.graph.output, *expected.graph.value_info)
        dims = [dim for value in values for dim in value.type.tensor_type.shape.dim if dim.dim_param]
        name = dims[-1].dim_param
        for dim in dims:
            if dim.dim_param == name:
                dim.dim_value = 6000
        changed = with_dimensions(graph.read_bytes(), {name: 6000, "no such dimension": 3})
        assert onnx.load_model_from_string(changed) == expected


@given(st.data())
def test_damaged_files_are_refused(data):
    raw = bytearray(GRAPHS[0].read_bytes()[:2000])
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for read in (initializer_shapes, external_bytes, value_shapes, lambda model: with_dimensions(model, {"S": 1})):
        try:
            read(cut)
        except ValueError:
            continue
