"""Linears of a traced vision tower in 8 bits (ONNX Runtime) or in float16 (TensorRT).

8 bits: weights have one scale per output channel, activations one per call. Per call, the ``F`` frames of it together, an
activation ``x`` is rounded to ``round(x / s) + z`` with ``s`` and ``z`` that span its smallest and largest number and 0 (ONNX's
DynamicQuantizeLinear); a weight column ``w`` to ``round(w / t)``, ``t = max|w| / 127``. The product adds up whole numbers. What
is no linear (the first convolution, norms, attention) stays float32.

float16: the product and its weights, with a Cast on either side. Attention is traced in float16
(:mod:`edgevlm.export.vision.attention`); the first convolution, norms, activations, sums stay float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.graph import CONTRIB

PRODUCTS = ("MatMul", "Gemm")


def round_columns(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """``weight [in, out]`` as codes of its shape and scales ``[out]``; a column of zeros has scale 1."""
    largest = np.abs(weight).max(0)
    scales = np.where(largest == 0, 1, largest / 127).astype(np.float32)
    return np.rint(weight / scales).astype(np.int8), scales


def round_linears(model: ir.Model) -> None:
    """Replace each product with a constant matrix, and the bias added to it, by one DynamicQuantizeMatMul node."""
    graph = model.graph
    model.opset_imports[CONTRIB] = 1
    for node in list(graph):
        if node.op_type == "MatMul" and _matrix(node.inputs[1]) is not None:
            _replace(graph, node)
    _drop_unused(graph)


def _matrix(value: Any) -> NDArray[np.float32] | None:
    """The numbers of a constant matrix, None for anything else."""
    if value is None or not value.is_initializer() or value.const_value is None or len(value.const_value.shape) != 2:
        return None
    array: NDArray[np.float32] = value.const_value.numpy()
    return array if array.dtype == np.float32 else None


def _replace(graph: ir.Graph, product: ir.Node) -> None:
    rows, weight = product.inputs
    assert weight is not None
    codes, scales = round_columns(weight.const_value.numpy())  # type: ignore[union-attr]
    parts: dict[str, NDArray] = {"codes": codes, "scales": scales, "zero": np.zeros(len(scales), np.int8)}
    inputs = [rows, *(_constant(graph, f"{product.outputs[0].name}.{part}", array) for part, array in parts.items())]
    last, bias = _biased(product, len(scales))
    if bias is not None:
        inputs.append(bias)
    linear = ir.node("DynamicQuantizeMatMul", inputs, domain=CONTRIB, num_outputs=1)
    new, old = linear.outputs[0], last.outputs[0]
    new.name, new.shape, new.type = old.name, old.shape, old.type
    ir.convenience.replace_nodes_and_values(
        graph, last, [product] if last is product else [product, last], [linear], [old], [new]
    )


def _biased(product: ir.Node, width: int) -> tuple[ir.Node, ir.Value | None]:
    """The Add of a constant ``[width]`` behind the product and that constant, or the product itself and None."""
    users = product.outputs[0].consumers()
    if len(users) != 1 or users[0].op_type != "Add":
        return product, None
    constants = [value for value in users[0].inputs if value is not None and value.const_value is not None]
    bias = next((value for value in constants if tuple(value.const_value.shape) == (width,)), None)  # type: ignore[union-attr]
    return (product, None) if bias is None else (users[0], bias)


def _constant(graph: ir.Graph, name: str, array: NDArray) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))
    value.const_value = ir.tensor(array, name=name)
    graph.initializers[name] = value
    return value


def halve_linears(model: ir.Model) -> None:
    """Give each product with a constant matrix float16 inputs and a Cast behind it.

    Raises UserError, when the model is saved, for a weight that float16 cannot hold.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type in PRODUCTS and node.inputs[1] is not None and node.inputs[1].is_initializer():
            _halve(graph, node)
    _drop_unused(graph)


def _halve(graph: ir.Graph, node: ir.Node) -> None:
    inputs = [_half(graph, node, value) for value in node.inputs if value is not None]
    output, half = node.outputs[0], ir.DataType.FLOAT16
    product = ir.node(node.op_type, inputs, attributes=dict(node.attributes), num_outputs=1)
    back = ir.node("Cast", product.outputs, attributes={"to": ir.DataType.FLOAT}, num_outputs=1)
    product.outputs[0].name, product.outputs[0].type = f"{output.name}.half", ir.TensorType(half)
    back.outputs[0].name, back.outputs[0].shape, back.outputs[0].type = output.name, output.shape, output.type
    ir.convenience.replace_nodes_and_values(graph, node, [node], [product, back], [output], [back.outputs[0]])


def _half(graph: ir.Graph, node: ir.Node, value: ir.Value) -> ir.Value:
    """The value in float16: a weight once and for all, rows by a Cast ahead of the node."""
    name = f"{value.name}.half"
    if not value.is_initializer():
        cast = ir.node("Cast", [value], attributes={"to": ir.DataType.FLOAT16}, num_outputs=1)
        cast.outputs[0].name, cast.outputs[0].type = f"{node.outputs[0].name}.rows", ir.TensorType(ir.DataType.FLOAT16)
        graph.insert_before(node, cast)
        return cast.outputs[0]
    if name not in graph.initializers:
        tensor = value.const_value
        assert tensor is not None
        shape = ir.Shape(tensor.numpy().shape)
        halved = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT16))
        halved.const_value = ir.LazyTensor(lambda: _numbers(tensor, name), ir.DataType.FLOAT16, shape, name=name)
        graph.initializers[name] = halved
    return graph.initializers[name]


def _numbers(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    array = tensor.numpy()
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.isfinite(half).all():
        largest = np.abs(array).max()
        raise UserError(f"a weight of {largest:.0f} in the tower does not fit in fp16; give --vision-precision fp32")
    return ir.tensor(half, name=name)


def _drop_unused(graph: ir.Graph) -> None:
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]
