"""Add the nodes of a vision tower to a graph: linears in each precision, norms, activations, attention, pooling.

int8 linears (ONNX Runtime) multiply bytes and sum the products in integers. Weights have one scale per output channel;
activations have one scale per row. The residual stream is rotated, and norms' gains and biases are folded into linears. The
rows after a norm therefore have standard deviation 1 and no outlier channels, and all use the same constant scale. A projector
that reads the residual stream stays float32. With fp16 (TensorRT), linears and attention cast their inputs to float16 before
the product and cast the result back. The first convolution, norms, activations and sums stay float32.

For ONNX Runtime, attention is one node that computes scores in parts. In graphs of standard operators, attention is a matrix
product, a softmax and a second product, which TensorRT may merge into one kernel. Each product has at most QUERIES queries, so
without such a merge the scores are at most ``[B, heads, QUERIES, N]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import pi, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from edgevlm.errors import UserError, nearest
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.precisions.layouts import Channels
from edgevlm.export.rotation import MeanKeeping

if TYPE_CHECKING:
    from edgevlm.export.vision import Tower

CHANNELS = Channels()
NORMED = 4.5  # a rotated, normed row is clipped at this many standard deviations
QUERIES = 1024
GELU_ZERO = 32  # the byte that stands for 0 in an activation's output, which is never far below 0
SMALL = 64

# transformers' name of an activation -> the function in it, and the factor of the function's argument
ACTIVATIONS = {
    "gelu": ("Erf", sqrt(0.5)), "gelu_pytorch_tanh": ("Tanh", sqrt(2 / pi)), "gelu_new": ("Tanh", sqrt(2 / pi)),
    "quick_gelu": ("Sigmoid", 1.702), "silu": ("Sigmoid", 1.0), "swish": ("Sigmoid", 1.0), "relu": ("Relu", 1.0),
}  # fmt: skip
Operand = str | int | tuple[int, ...] | NDArray[Any] | np.generic  # a tensor of the graph, or numbers known at export
Float32 = NDArray[np.float32]
Windows = list[tuple[Operand, Operand]]  # for each run of equal windows, how many windows and how many patches per window


@dataclass(slots=True)
class VisionGraph:
    """Builds a tower's graph. The methods add nodes and return the output tensor's name.

    Layers are named after their tensors in the checkpoint, such as ``vision.encoder.layers.0.mlp.fc1``. Rows are float32
    ``[B, N, width]``. ``standard``: whether to use only standard ONNX operators. ``fixed``: whether all frames are the same
    size, so that whatever depends only on the frame size is computed at export. ``rotation``: the rotation of the residual
    stream. With a rotation, the stored weights are rotated, and norms' gains and biases are folded into the linears that follow
    them.
    """

    graph: GraphBuilder
    checkpoint: Checkpoint
    precision: str = "fp32"
    standard: bool = False
    fixed: bool = True
    rotation: MeanKeeping | None = None
    affine: dict[str, list[Float32]] = field(default_factory=dict)  # norm -> its gain and bias, to be folded into linears
    activated: set[str] = field(default_factory=set)
    computed: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """Add a constant and return its name. Small or int64 constants are stored in the graph, others in the weights file."""
        is_kept = array.size <= SMALL or array.dtype == np.int64
        return self.graph.constant(name, array) if is_kept else self.graph.weight(name, array)

    def per_position(self, table: str) -> str:
        """Return the rows of ``table`` for the positions to compute. This class computes all positions."""
        return table

    def per_patch(self, table: str) -> str:
        """Return the rows of ``table`` for the patches to compute. This class computes all patches."""
        return table

    def position_ids(self) -> str:
        return self.integers(0)

    def reorder(self, name: str, rows: str, order: Operand) -> str:
        return self.node("Gather", [rows, self.named(f"{name}.order", order)], name, axis=1)

    def kept(self, name: str, rows: str, width: int) -> str:
        """Return the rows of all patches, changed or not, because a token may be made of both kinds."""
        return rows

    def chosen(self, name: str, rows: str, order: Operand | None = None) -> str:
        """Return the rows of the tokens to compute.

        This class computes all tokens. ``order``: the index of each token's row.
        """
        return rows

    def integers(self, *numbers: int) -> str:
        return self.graph.integers(*numbers)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Float32:
        """Read a tensor from the checkpoint. Raises UserError if the tensor is missing or has a different shape."""
        return self.checkpoint.tensor(name, shape)

    def weight(self, name: str, shape: tuple[int, ...]) -> str:
        """Add a checkpoint's tensor to the graph as float32. Raises UserError if the tensor is missing or has another shape."""
        if self.graph.shared(name):
            return name
        self.checkpoint.check(name, shape)
        rows = self.checkpoint.rows(name, shape)
        self.graph.initializers.append(self.graph.weights.add_slices(name, shape, np.float32, rows))
        return name

    def node(self, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        return self.graph.node(op, inputs, [name], **attributes)

    def compute(self, op: str, *operands: Operand, **attributes: Any) -> Operand:
        """Compute a standard ONNX operator at export if all operands are known, otherwise add a node for it."""
        if not any(isinstance(operand, str) for operand in operands):
            return _evaluated(op, operands, attributes)
        inputs = [self.named("", operand) for operand in operands]
        key = op, *inputs, *attributes.items()
        if key not in self.computed:
            self.computed[key] = self.node(op, inputs, f"{op}.{len(self.computed)}", **attributes)
        return self.computed[key]

    def argsort(self, keys: Operand) -> Operand:
        """Return the indices that sort ``keys``, which must be distinct integers."""
        if not isinstance(keys, str):
            return np.argsort(np.asarray(keys))
        order, count = f"{keys}.order", self.compute("Shape", keys)
        self.graph.node("TopK", [keys, str(count)], [f"{keys}.sorted", order], largest=0)
        return order

    def vector(self, *numbers: Operand) -> Operand:
        return self.compute("Concat", *(self.compute("Reshape", number, (1,)) for number in numbers), axis=0)

    def named(self, name: str, operand: Operand) -> str:
        """Return the name of a tensor.

        If ``operand`` holds numbers, add them as a constant called ``name``. If ``name`` is empty, the name is made from the
        numbers.
        """
        if isinstance(operand, str):
            return operand
        array = np.asarray(operand)
        if not name:
            name = ".".join([array.dtype.name, *map(str, array.shape), *map(str, array.flatten())])
        return self.constant(name, array)

    def add(self, name: str, left: str, right: str) -> str:
        return self.node("Add", [left, right], name)

    def mul(self, name: str, left: str, right: str | float) -> str:
        """Multiply two tensors element by element, or a tensor by a number."""
        if isinstance(right, float):
            right = self.graph.number(right)
        return self.node("Mul", [left, right], name)

    def reshape(self, name: str, rows: str, *shape: Operand) -> str:
        """Reshape rows. As in ONNX, a size of 0 keeps a dimension, and a size of -1 is inferred."""
        return self.node("Reshape", [rows, self.named("", self.vector(*shape))], name)

    def transpose(self, name: str, rows: str, *axes: int) -> str:
        return self.node("Transpose", [rows], name, perm=axes)

    def split(self, name: str, rows: str, sizes: Sequence[Operand], axis: int = -1) -> list[str]:
        names = [f"{name}.{index}" for index in range(len(sizes))]
        self.graph.node("Split", [rows, self.named("", self.vector(*sizes))], names, axis=axis)
        return names

    def residual(self, rows: Float32) -> Float32:
        """Rotate the weights of a layer that adds to the residual stream. The shape is ``[.., width]``."""
        return rows if self.rotation is None else self.rotation.rows(rows)

    def rotated(self, name: str, rows: str, width: int) -> str:
        """Add a node that rotates rows as the residual stream is rotated."""
        if self.rotation is None:
            return rows
        if not self.graph.shared("rotation"):
            self.graph.weight("rotation", self.residual(np.eye(width, dtype=np.float32)))
        return self.node("MatMul", [rows, "rotation"], name)

    def patches(
        self, name: str, pixels: str, width: int, patch: int, *, bias: bool = True, group: int = 1, writes: bool = True
    ) -> str:
        """Turn each square of ``patch`` x ``patch`` pixels into a row, by convolution. Frames are ``[F, group * 3, H, W]``."""
        deep = (width, 3, group, patch, patch) if group > 1 else (width, 3, patch, patch)
        turned = self.residual if writes else np.asarray
        if not self.graph.shared(f"{name}.weight"):
            kernel = self.tensor(f"{name}.weight", deep).reshape(width, 3, group, patch, patch).swapaxes(1, 2)
            kernel = turned(kernel.reshape(width, -1).T).T
            self.graph.weight(f"{name}.weight", kernel.reshape(width, 3 * group, patch, patch))
        inputs = [pixels, f"{name}.weight"]
        inputs += [self.constant(f"{name}.bias", turned(self.tensor(f"{name}.bias", (width,))))] if bias else []
        grid = self.node("Conv", inputs, name, kernel_shape=[patch, patch], strides=[patch, patch])
        return self.transpose(f"{name}.rows", self.reshape(f"{name}.joined", grid, 0, width, -1), 0, 2, 1)

    def linear(
        self, name: str, rows: str, columns: int, width: int, *,
        bias: bool = True, activation: str = "", reads: str = "", writes: bool = False,
    ) -> str:  # fmt: skip
        """Return ``activation(rows @ weight.T + bias)``. Raises UserError if a weight is too large for fp16.

        ``columns``: the input's width. ``width``: the output's width. ``reads``: the name of the norm before this linear, or
        "residual" if the rows are the residual stream. ``writes``: whether the result is added to the residual stream.
        """
        shape, vector = (width, columns), ""
        if bias or len(self.affine.get(reads, [])) > 1:
            vector = f"{name}.bias"
            if not self.graph.shared(vector):
                self.graph.weight(vector, self._bias(name, shape, bias, reads, writes))
        weight, is_rounded = f"{name}.weight", self.precision == "int8" and reads != "residual"
        parts = [f"{weight}.{part}" for part in ("codes", "scales")]
        if is_rounded and not all(self.graph.shared(part) for part in parts):
            for part, array in CHANNELS.parts(self._matrix(name, shape, reads, writes)).items():
                self.graph.weight(f"{weight}.{part}", array)
        if is_rounded and reads in self.affine:
            bias_of_product, vector = ("", vector) if activation else (vector, "")
            product = CHANNELS.product(self.graph, name, rows, parts, NORMED / 127, bias=bias_of_product)
        elif is_rounded:
            product = CHANNELS.multiply(self.graph, name, rows, parts, shape, GELU_ZERO if rows in self.activated else 128)
        elif self.precision == "fp16":
            product = self._fp16(name, rows, weight, shape)
        else:
            if not self.graph.shared(weight):
                self.graph.weight(weight, self._matrix(name, shape, reads, writes).T)
            product = self.node("MatMul", [rows, weight], name)
        if activation:
            found = self.activation(f"{name}.{activation}", activation, product, vector)
            self.activated.add(found)
            return found
        return self.add(f"{name}.biased", product, vector) if vector else product

    def _matrix(self, name: str, shape: tuple[int, int], reads: str, writes: bool) -> Float32:
        weight = self.tensor(f"{name}.weight", shape)
        for gain in self.affine.get(reads, [])[:1]:
            weight *= np.tile(gain, shape[1] // len(gain))
        if self.rotation is not None and reads:
            weight = self.rotation.rows(weight.reshape(-1, len(self.rotation.mirror))).reshape(shape)
        return self.residual(weight.T).T if writes else weight

    def _bias(self, name: str, shape: tuple[int, int], bias: bool, reads: str, writes: bool) -> Float32:
        vector = self.tensor(f"{name}.bias", shape[:1]) if bias else np.zeros(shape[0], np.float32)
        for shift in self.affine.get(reads, [])[1:]:
            vector += self.tensor(f"{name}.weight", shape) @ np.tile(shift, shape[1] // len(shift))
        return self.residual(vector) if writes else vector

    def layer_norm(
        self, name: str, rows: str, width: int, epsilon: float, skip: str = "", *, writes: bool = False
    ) -> tuple[str, str]:
        """Return ``rows + skip`` normed over the last axis, and the sum itself.

        Sum and norm are two nodes, because ONNX Runtime's SkipLayerNormalization takes four times as long on a CPU. ``writes``:
        whether the norm's output is the new residual stream.
        """
        vectors = self._affine(name, ("weight", "bias"), width, writes)
        total = self.add(f"{name}.sum", rows, skip) if skip else rows
        normed = self.node("LayerNormalization", [total, *vectors], name, axis=-1, epsilon=epsilon)
        return self.rotated(f"{name}.rotated", normed, width) if writes else normed, total

    def rms_norm(self, name: str, rows: str, width: int, epsilon: float, skip: str = "") -> tuple[str, str]:
        """Return ``x / sqrt(mean(x^2) + epsilon) * weight`` and ``x``, where ``x = rows + skip``."""
        [weight], total = self._affine(name, ("weight",), width), self.add(f"{name}.sum", rows, skip) if skip else rows
        if not self.standard:
            attributes: dict[str, Any] = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
            return self.node("SimplifiedLayerNormalization", [total, weight], name, **attributes), total
        squares = self.mul(f"{name}.squares", total, total)
        mean = self.node("ReduceMean", [squares, self.integers(-1)], f"{name}.mean", keepdims=1)
        raised = self.add(f"{name}.raised", mean, self.graph.number(epsilon))
        normed = self.node("Div", [total, self.node("Sqrt", [raised], f"{name}.root")], f"{name}.normed")
        return self.mul(f"{name}.scaled", normed, weight), total

    def activation(self, name: str, kind: str, rows: str, bias: str = "") -> str:
        """Return ``rows + bias`` after the activation ``kind``. Raises UserError if ``kind`` is not in ACTIVATIONS."""
        if kind not in ACTIVATIONS:
            raise UserError(f"config.json: activation {kind!r} is not supported; {nearest(kind, ACTIVATIONS)}")
        function, factor = ACTIVATIONS[kind]
        if function in ("Erf", "Tanh") and not self.standard:
            op = "FastGelu" if function == "Tanh" else "BiasGelu" if bias else "Gelu"
            return self.graph.fused(op, [rows, bias] if bias else [rows], [name])
        x = self.add(f"{name}.biased", rows, bias) if bias else rows
        if function == "Relu":
            return self.node("Relu", [x], name)
        if function == "Sigmoid" and not self.standard:
            return self.graph.fused("QuickGelu", [x], [name], alpha=factor)
        inner = x
        if function == "Tanh":  # the argument of tanh is sqrt(2 / pi) (x + .044715 x^3)
            cube = self.mul(f"{name}.cube", self.mul(f"{name}.square", x, x), x)
            inner = self.add(f"{name}.inner", x, self.mul(f"{name}.small", cube, 0.044715))
        found = self.node(function, [self.mul(f"{name}.argument", inner, factor)], f"{name}.{function}")
        if function == "Sigmoid":
            return self.mul(name, x, found)
        return self.mul(name, self.mul(f"{name}.half", x, 0.5), self.add(f"{name}.raised", found, self.graph.number(1.0)))

    def attention(self, name: str, query: str, key: str, value: str, *, rows: int, heads: int, scale: float) -> str:
        """Return ``softmax(scale * q k') v`` for each head. The inputs are ``[B, rows, heads * head_dim]``."""
        if not self.standard:
            attributes = {"num_heads": heads, "scale": scale}
            return self.graph.fused("MultiHeadAttention", [query, key, value], [name], **attributes)
        given = {"query": (self.mul(f"{name}.scaled", query, scale), 0, 2, 1, 3), "key": (key, 0, 2, 3, 1)}
        parts = []
        for part, (tensor, *axes) in (given | {"value": (value, 0, 2, 1, 3)}).items():
            turned = self.transpose(f"{name}.{part}", self.reshape(f"{name}.{part}.heads", tensor, 0, 0, heads, -1), *axes)
            parts.append(self._half(turned, turned))
        (q, k, v), sizes = parts, [min(QUERIES, rows - start) for start in range(0, rows, QUERIES)]
        attended = []
        for index, some in enumerate(self.split(f"{name}.queries", q, sizes, axis=2) if len(sizes) > 1 else [q]):
            weights = self.node("Softmax", [self.node("MatMul", [some, k], f"{name}.scores{index}")], f"{name}.weights{index}")
            attended.append(self.node("MatMul", [weights, v], f"{name}.attended{index}"))
        joined = self.node("Concat", attended, f"{name}.attended", axis=2) if len(sizes) > 1 else attended[0]
        by_row = self.reshape(f"{name}.joined", self.transpose(f"{name}.rows", joined, 0, 2, 1, 3), 0, 0, -1)
        return self.graph.cast(by_row, f"{name}.float", np.float32) if self.precision == "fp16" else by_row

    def windowed(
        self, name: str, parts: Sequence[str], windows: Windows, *,
        rows: int, width: int, heads: int, scale: float, frames: Operand,
    ) -> str:  # fmt: skip
        """Return the attention inside each window, by default one window of all rows. ``parts``: q, k and v, each
        ``[B, rows, width]``.
        """
        if len(windows) < 2 and (not windows or windows[0][0] == 1):
            query, key, value = parts
            return self.attention(f"{name}.0", query, key, value, rows=rows, heads=heads, scale=scale)
        runs: list[Sequence[str]] = [parts]
        if len(windows) > 1:
            sizes = [self.compute("Mul", count, length) for count, length in windows]
            runs = list(zip(*(self.split(f"{part}.run", part, sizes, axis=1) for part in parts), strict=True))
        seen = []
        for index, ((count, length), run) in enumerate(zip(windows, runs, strict=True)):
            at, many = f"{name}.{index}", self.compute("Mul", count, length) if self.fixed else -1
            query, key, value = (self.reshape(f"{part}.windows", part, -1, length, width) for part in run)
            inside = self.attention(at, query, key, value, rows=length, heads=heads, scale=scale)  # type: ignore[arg-type]
            seen.append(self.reshape(f"{at}.run", inside, frames, many, width))
        return seen[0] if len(seen) == 1 else self.node("Concat", seen, f"{name}.seen", axis=1)

    def resample(self, name: str, rows: str, width: int, matrix: Float32) -> str:
        """Resize a square grid of rows along both edges. Shapes: ``rows [F, side * side, width]``, ``matrix [few, side]``."""
        few, side = matrix.shape
        along = self.constant(f"{name}.matrix", matrix)
        lines = self.node("MatMul", [along, self.reshape(f"{name}.lines", rows, 0, side, side * width)], f"{name}.fewer")
        cells = self.node("MatMul", [along, self.reshape(f"{name}.columns", lines, -1, side, width)], f"{name}.cells")
        return self.reshape(name, cells, -1, few * few, width)

    def shuffle(self, name: str, rows: str, width: int, side: int, scale: int) -> str:
        """Join each square of ``scale`` x ``scale`` rows into one. The result is ``[F, (side / scale)^2, width * scale^2]``."""
        few = side // scale
        tiles = self.reshape(f"{name}.cut", rows, -1, few, scale, few, scale * width)
        turned = self.transpose(f"{name}.squares", tiles, 0, 1, 3, 2, 4)
        return self.reshape(name, turned, -1, few * few, scale * scale * width)

    def _affine(self, name: str, parts: Sequence[str], width: int, apply: bool = False) -> list[str]:
        """Return a norm's gain and bias.

        In a rotated graph, the linears after the norm include gain and bias; unless ``apply``, this returns a gain of ones.
        """
        if self.rotation is None or apply:
            return [self.weight(f"{name}.{part}", (width,)) for part in parts]
        self.affine[name] = [self.tensor(f"{name}.{part}", (width,)) for part in parts]
        return [self.graph.constant(f"ones.{width}", np.ones(width, np.float32))]

    def _fp16(self, name: str, rows: str, weight: str, shape: tuple[int, int]) -> str:
        inputs = [self._half(rows, name), weight]
        if not self.graph.shared(weight):
            with np.errstate(over="ignore"):
                half = np.concatenate([some.astype(np.float16) for some in self.checkpoint.rows(weight, shape)])
            if not np.isfinite(half).all():
                raise UserError("a weight in the tower does not fit in fp16; use --vision-precision fp32")
            self.graph.weight(weight, half.T)
        return self.graph.cast(self.node("MatMul", inputs, f"{name}.half"), name, np.float32)

    def _half(self, rows: str, name: str) -> str:
        return self.graph.cast(rows, f"{name}.rows", np.float16) if self.precision == "fp16" else rows


def _evaluated(op: str, operands: Sequence[Operand], attributes: Mapping[str, Any]) -> NDArray[Any]:
    names = [f"operand{index}" for index in range(len(operands))]
    node = helper.make_node(op, names, ["result"], **attributes)
    return np.asarray(ReferenceEvaluator(node).run(None, dict(zip(names, map(np.asarray, operands), strict=True)))[0])


def averaging(side: int, stride: int) -> Float32:
    """Return the matrix ``[side // stride, side]`` that averages groups of ``stride`` numbers and drops the remainder."""
    means = np.repeat(np.eye(side // stride, dtype=np.float32) / np.float32(stride), stride, 1)
    return np.pad(means, ((0, 0), (0, side - means.shape[1])))


def bilinear(side: int, few: int) -> Float32:
    """Return the matrix ``[few, side]`` that resizes ``side`` numbers to ``few`` by linear interpolation, as torch does."""
    at = np.maximum((np.arange(few) + 0.5) * side / few - 0.5, 0)
    low = np.minimum(at.astype(np.int64), side - 1)
    matrix, rows = np.zeros((few, side), np.float32), np.arange(few)
    matrix[rows, low] += 1 - (at - low)
    matrix[rows, np.minimum(low + 1, side - 1)] += at - low
    return matrix


@dataclass(slots=True)
class ChangedGraph(VisionGraph):
    """Builds a tower's graph that computes only changed patches. Changed patches attend to all patches.

    In each layer, the changed patches' new keys and values replace their old ones. ScatterND replaces keys in place if
    ``key{l}_out`` is bound to the address of ``key{l}``. If a token is made of several patches, the rows of unchanged patches
    are kept as well. Window attention is computed only for windows with a changed patch, and for the first window of each
    shape. Rows are ``[1, n, width]`` for n changed patches. Everything else is as in :class:`VisionGraph`.

    Patches in the input ``patches`` are numbered row by row in the frame. The tensor ``positions`` lists which keys and values
    to compute. In the keys and values, class tokens come first, followed by the patches in the order in which the tower reads
    them.
    """

    grid: tuple[int, int] = (0, 0)
    class_tokens: int = 0
    heads: int = 0
    head_dim: int = 0
    layers: int = 0
    outputs: list[int] = field(default_factory=list)
    runs: list[tuple[str, str]] = field(
        default_factory=list
    )  # for each run of equal windows, the windows to compute ``[w]`` and their rows ``[w, length]``
    slots: str = ""

    @property
    def count(self) -> int:
        return self.grid[0] * self.grid[1]

    def start(self, tower: Tower) -> str:
        """Add the graph's inputs, and nodes that find what has changed. Return the input ``pixel_values``."""
        pixels = self.graph.input("pixel_values", TensorProto.FLOAT, [1, 3 * tower.group, *tower.size])
        patches = self.graph.input("patches", TensorProto.INT64, ["n"])
        self.class_tokens, self.head_dim = tower.class_tokens, tower.head_dim
        order = tower.patch_order(self)
        if not np.array_equal(order, np.arange(self.count)):
            self.node("Gather", [self.graph.constant("position_of", np.argsort(order)), patches], "positions")
        elif tower.class_tokens:
            first = self.graph.constant("class_tokens", np.arange(tower.class_tokens, dtype=np.int64))
            behind = self.add("positions.patches", patches, self.integers(tower.class_tokens))
            self.node("Concat", [first, behind], "positions", axis=0)
        else:
            self.node("Identity", [patches], "positions")
        self.node("Unsqueeze", ["positions", self.integers(0)], "positions.batch")
        marks = self._scattered("patches.changed", patches, np.float32, self._expanded("patches.ones", patches, np.float32(1)))
        if tower.reach is None:
            self.node("Identity", [patches], "tokens")
        else:
            down, across = ((matrix != 0).astype(np.float32) for matrix in tower.reach)
            parts = [self.graph.constant("reach.down", down), self.reshape("patches.grid", marks, *self.grid)]
            right = self.graph.constant("reach.across", np.ascontiguousarray(across.T))
            found = self.node("MatMul", [self.node("MatMul", parts, "reach.lines"), right], "reach.tokens")
            hit = self.node("NonZero", [self.reshape("reach.all", found, -1)], "reach.nonzero")
            self.reshape("tokens", hit, -1)
        self.graph.output("tokens", TensorProto.INT64, ["t"])
        return pixels

    def patches(
        self, name: str, pixels: str, width: int, patch: int, *, bias: bool = True, group: int = 1, writes: bool = True
    ) -> str:
        """Put the changed patches side by side in one image, and convolve it."""
        rows, columns = self.grid
        ends = [self.integers(*numbers) for numbers in ((0, 0), (rows * patch, columns * patch), (2, 3))]
        used = self.node("Slice", [pixels, *ends], f"{name}.used")
        tiles = self.reshape(f"{name}.cut", used, 3 * group, rows, patch, columns, patch)
        squares = self.transpose(f"{name}.squares", tiles, 1, 3, 0, 2, 4)
        flat = self.reshape(f"{name}.flat", squares, self.count, 3 * group * patch * patch)
        some = self.reshape(
            f"{name}.some", self.node("Gather", [flat, "patches"], f"{name}.changed"), -1, 3 * group, patch, patch
        )
        strip = self.reshape(f"{name}.strip", self.transpose(f"{name}.beside", some, 1, 2, 0, 3), 1, 3 * group, patch, -1)
        return VisionGraph.patches(self, name, strip, width, patch, bias=bias, group=group, writes=writes)

    def per_position(self, table: str) -> str:
        return self.node("Gather", [table, "positions"], f"{table}.positions")

    def per_patch(self, table: str) -> str:
        return self.node("Gather", [table, "patches"], f"{table}.patches")

    def position_ids(self) -> str:
        return "positions.batch"

    def reorder(self, name: str, rows: str, order: Operand) -> str:
        """Return ``rows`` unchanged, because patches are already in the order of the input ``patches``, and tokens in
        row-major order.
        """
        return rows

    def kept(self, name: str, rows: str, width: int) -> str:
        index, where = len(self.outputs), "patches" if self.class_tokens else "positions"
        self.outputs.append(width)
        past = self.graph.input(f"kept{index}", TensorProto.FLOAT, [self.count, width])
        at = self.node("Unsqueeze", [where, self.integers(1)], f"{name}.at")
        self.node("ScatterND", [past, at, self.reshape(f"{name}.new", rows, -1, width)], f"kept{index}_out")
        self.graph.output(f"kept{index}_out", TensorProto.FLOAT, [self.count, width])
        return self.reshape(name, f"kept{index}_out", 1, self.count, width)

    def chosen(self, name: str, rows: str, order: Operand | None = None) -> str:
        tokens = "tokens"
        if order is not None:
            tokens = self.node("Gather", [self.named("row_of_token", order), tokens], f"{name}.tokens")
        return self.node("Gather", [rows, tokens], name, axis=1)

    def attention(self, name: str, query: str, key: str, value: str, *, rows: int, heads: int, scale: float) -> str:
        keys, values = self._written(key, value, rows, heads, name)
        return self._attended(name, query, keys, values, heads, scale)

    def windowed(
        self, name: str, parts: Sequence[str], windows: Windows, *,
        rows: int, width: int, heads: int, scale: float, frames: Operand,
    ) -> str:  # fmt: skip
        query, key, value = parts
        runs = [(int(count), int(length)) for count, length in windows]  # type: ignore[arg-type]
        if len(runs) < 2 and (not runs or runs[0][0] == 1):
            return self.attention(f"{name}.0", query, key, value, rows=rows, heads=heads, scale=scale)
        if not self.slots:
            self._index(runs)
        keys, values = self._written(key, value, self.count, heads, name)
        seen, start, dim = [], 0, width // heads
        for index, ((count, length), (changed, sources)) in enumerate(zip(runs, self.runs, strict=True)):
            at, given = f"{name}.{index}", list[str]()
            for part, every in (("keys", keys), ("values", values)):
                ends = [self.integers(number) for number in (start, start + count * length, 2)]
                run = self.reshape(
                    f"{at}.{part}.run", self.node("Slice", [every, *ends], f"{at}.{part}"), heads, count, length, dim
                )
                some = self.node("Gather", [run, changed], f"{at}.{part}.changed", axis=1)
                given.append(self.transpose(f"{at}.{part}.windows", some, 1, 0, 2, 3))
            queries = self.node("Gather", [self.reshape(f"{at}.rows", query, -1, width), sources], f"{at}.queries")
            attended = self._attended(at, queries, given[0], given[1], heads, scale)
            seen.append(self.reshape(f"{at}.run", attended, -1, width))
            start += count * length
        joined = seen[0] if len(seen) == 1 else self.node("Concat", seen, f"{name}.seen", axis=0)
        found = self.node("Gather", [joined, self.slots], f"{name}.found")
        return self.node("Unsqueeze", [found, self.integers(0)], f"{name}.windowed")

    def _written(self, key: str, value: str, positions: int, heads: int, name: str) -> list[str]:
        """Write new keys and values into the cache, and return all of the cache's keys and values, float32
        ``[1, heads, positions, head_dim]``.
        """
        layer, found = self.layers, []
        self.layers += 1
        for part, rows in (("key", key), ("value", value)):
            past = f"{part}{layer}"
            split = self.reshape(f"{name}.{part}.split", rows, 0, 0, heads, self.head_dim)
            new = self.transpose(f"{name}.{part}.new", split, 0, 2, 1, 3)
            shape = [1, heads, positions, self.head_dim]
            self.graph.input(past, TensorProto.FLOAT, shape)
            self.node("ScatterND", [past, self._write_index(heads), new], f"{past}_out")
            found.append(self.graph.output(f"{past}_out", TensorProto.FLOAT, shape))
        return found

    def _write_index(self, heads: int) -> str:
        if not self.heads:
            self.heads = heads
            by_row = self.reshape("write.rows", "positions", 1, 1, -1, 1)
            sizes = [self.integers(1, heads), self.node("Shape", ["positions"], "write.n"), self.integers(1)]
            shape = self.node("Concat", sizes, "write.shape", axis=0)
            each = self.graph.constant("write.heads", np.arange(heads, dtype=np.int64).reshape(1, -1, 1, 1))
            first = self.graph.constant("write.first", np.zeros((1, 1, 1, 1), np.int64))
            parts = [self.node("Expand", [part, shape], f"{part}.all") for part in (first, each, by_row)]
            self.node("Concat", parts, "write", axis=-1)
        return "write"

    def _attended(self, name: str, query: str, keys: str, values: str, heads: int, scale: float) -> str:
        return self.graph.fused("MultiHeadAttention", [query, keys, values], [name], num_heads=heads, scale=scale)

    def _index(self, windows: list[tuple[int, int]]) -> None:
        """Add nodes that find the windows with a changed patch, and the rows of these windows' queries."""
        ones = self._expanded("positions.ones", "positions", np.float32(1))
        marks = self._scattered("positions.changed", "positions", np.float32, ones)
        ends = [self.graph.constant("int64.zero", np.array(0, np.int64)), self.node("Size", ["positions"], "n"),
                self.graph.constant("int64.one", np.array(1, np.int64))]  # fmt: skip
        ranks = self._scattered("positions.rank", "positions", np.int64, self.node("Range", ends, "rows"))
        offset, start, slots = self.integers(0), 0, []
        for index, (count, length) in enumerate(windows):
            name = f"windows{index}"
            bounds = [self.integers(number) for number in (start, start + count * length, 0)]
            run = self.reshape(f"{name}.patches", self.node("Slice", [marks, *bounds], f"{name}.marks"), count, length)
            any_of = self.node("ReduceMax", [run, self.integers(1)], f"{name}.any", keepdims=0)
            first = self.graph.constant(f"{name}.first", np.eye(1, count, dtype=np.float32)[0])
            is_changed = self.node("Max", [any_of, first], f"{name}.is_changed")
            changed = self.reshape(name, self.node("NonZero", [is_changed], f"{name}.nonzero"), -1)
            by_window = self.reshape(f"{name}.ranks", self.node("Slice", [ranks, *bounds], f"{name}.rank"), count, length)
            self.runs.append((changed, self.node("Gather", [by_window, changed], f"{name}.sources")))
            counted = self.node("CumSum", [is_changed, self.graph.constant("axis0", np.array(0, np.int64))], f"{name}.counted")
            place = self.node("Sub", [self.graph.cast(counted, f"{name}.order", np.int64), self.integers(1)], f"{name}.place")
            begin = self.reshape(f"{name}.begin", self.node("Mul", [place, self.integers(length)], f"{name}.times"), -1, 1)
            inside = self.graph.constant(f"{name}.inside", np.arange(length, dtype=np.int64)[None])
            here = self.add(f"{name}.slots", self.add(f"{name}.of_run", begin, inside), offset)
            slots.append(self.reshape(f"{name}.flat", here, -1))
            taken = self.node("Mul", [self.node("Shape", [changed], f"{name}.w"), self.integers(length)], f"{name}.taken")
            offset, start = self.add(f"{name}.end", offset, taken), start + count * length
        every = slots[0] if len(slots) == 1 else self.node("Concat", slots, "slots.all", axis=0)
        self.slots = self.node("Gather", [every, "positions"], "slots")

    def _scattered(self, name: str, at: str, dtype: DTypeLike, updates: str) -> str:
        zeros = self.graph.constant(f"zeros.{np.dtype(dtype).name}", np.zeros(self.count, dtype))
        return self.node("ScatterElements", [zeros, at, updates], name, axis=0)

    def _expanded(self, name: str, like: str, number: Any) -> str:
        one = self.graph.constant(f"{name}.one", np.array([number]))
        return self.node("Expand", [one, self.node("Shape", [like], f"{name}.shape")], name)
