"""Linears of a traced vision tower in float16: the product and its weights; a Cast on either side.

Attention is traced in float16 (:mod:`edgevlm.export.attention`); the first convolution, norms, activations, sums stay float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgevlm.errors import UserError

PRODUCTS = ("MatMul", "Gemm")


def halve_linears(model: ir.Model) -> None:
    """Give each product with a constant matrix float16 inputs and a Cast behind it.

    Raises UserError, when the model is saved, for a weight that float16 cannot hold.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type in PRODUCTS and node.inputs[1] is not None and node.inputs[1].is_initializer():
            _halve(graph, node)
    for name, value in list(graph.initializers.items()):
        if not value.uses():
            del graph.initializers[name]


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
