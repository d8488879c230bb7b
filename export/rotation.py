"""Rotate rows by orthogonal matrices, which spread outliers over all channels, so that rounding to 8 bits loses little.

A rotation is ``R = diag(signs) (A kron B)``. ``A`` is a Hadamard matrix; ``B`` is the Kronecker product of a Hadamard matrix
and a cosine transform for the odd part of the width. Rows of the same width use the same rotation. If a matrix ``W [out, in]``
takes rotated rows, the export stores ``W R``, which is ``rotation.rows(W)``. If the output of ``W`` must be rotated, the export
stores ``R.T W``, which is ``rotation.rows(W.T).T``, and the bias ``rotation.rows(bias)``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape, LayerWeights
from edgevlm.export.checkpoint import SLICE
from edgevlm.export.graph import GraphBuilder

MOST = 4096  # the most rows of a rotation's inner matrix
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Rotates each block of ``a * b`` columns by the Kronecker product of ``outer`` ``[a, a]`` and ``inner`` ``[b, b]``."""

    outer: Float32
    inner: Float32
    signs: Float32

    @classmethod
    def of(cls, width: int) -> Rotation:
        """Return the rotation that mixes all columns with the fewest products per row, ``width * (a + b)``.

        Raises UserError if ``width`` has such a large odd factor that ``b`` exceeds MOST.
        """
        outer = min((1 << power for power in range(17) if width % (1 << power) == 0), key=lambda a: a + width // a)
        if (inner := width // outer) > MOST:
            raise UserError(f"config.json: rows of {width} numbers cannot be rotated; choose another --precision")
        odd = inner // (inner & -inner)
        signs = np.random.RandomState(0).randint(0, 2, width) * 2 - 1  # RandomState is the same in all numpy versions
        return cls(_hadamard(outer), np.kron(_hadamard(inner // odd), _cosines(odd)), signs.astype(np.float32))

    @classmethod
    def blocks(cls, width: int, largest: int = 64) -> Rotation:
        """Return a rotation in blocks of at most ``largest`` columns; the block size is a power of two dividing ``width``."""
        return cls(_hadamard(1), _hadamard(min(largest, width & -width)), np.ones(width, np.float32))

    def rows(self, rows: Float32) -> Float32:
        width, (a, b) = len(self.signs), (len(self.outer), len(self.inner))
        flat = rows.reshape(-1, width)
        turned, step = np.empty(flat.shape, np.float32), max(1, SLICE // width)
        # float64 gives the same result on all processors
        outer, inner = self.outer.T.astype(np.float64), self.inner.astype(np.float64)
        for start in range(0, len(flat), step):
            split = (flat[start : start + step] * self.signs).reshape(-1, b) @ inner
            turned[start : start + step] = (outer @ split.reshape(-1, a, b)).reshape(-1, width)
        return turned.reshape(rows.shape)

    def nodes(self, graph: GraphBuilder, name: str, rows: str, inverse: bool = False) -> str:
        """Add nodes that rotate float32 rows ``[.., width]``, or rotate them back if ``inverse``, and return ``name``."""
        width, (a, b) = len(self.signs), (len(self.outer), len(self.inner))
        kind, plain = f"rotation.{a}.{b}{'.inverse' * inverse}", bool((self.signs == 1).all())
        signs = None if plain else graph.constant(f"rotation.signs{width}", self.signs)
        sizes = graph.node("Shape", [rows], [f"{name}.sizes"])
        if signs and not inverse:
            rows = graph.node("Mul", [rows, signs], [f"{name}.signed"])
        matrix = graph.constant(f"{kind}.inner", np.ascontiguousarray(self.inner.T if inverse else self.inner))
        split = graph.node("Reshape", [rows, graph.integers(-1, a, b)], [f"{name}.split"])
        turned = graph.node("MatMul", [split, matrix], [f"{name}.inner"])
        if a > 1:  # a Hadamard matrix is its own inverse
            turned = graph.node("MatMul", [graph.constant(f"{kind}.outer", self.outer), turned], [f"{name}.outer"])
        joined = graph.node("Reshape", [turned, sizes], [f"{name}.joined" if signs and inverse else name], allowzero=1)
        return graph.node("Mul", [joined, signs], [name]) if signs and inverse else joined


@dataclass(frozen=True, slots=True, eq=False)
class MeanKeeping:
    """A rotation that keeps each row's mean. A LayerNorm without gain and bias gives the same result whether rows are rotated
    before or after it.

    Rows are rotated by ``rotation``, then reflected in the plane normal to ``mirror``. A row whose numbers are all equal is
    unchanged.
    """

    rotation: Rotation
    mirror: NDArray[np.float64]

    @classmethod
    def of(cls, width: int) -> MeanKeeping:
        rotation, equal = Rotation.of(width), np.full(width, width**-0.5, np.float32)
        mirror = rotation.rows(equal).astype(np.float64) - equal
        return cls(rotation, mirror / np.linalg.norm(mirror))

    def rows(self, rows: Float32) -> Float32:
        turned = self.rotation.rows(rows)
        along = (turned * self.mirror).sum(-1, keepdims=True)
        return (turned - 2 * along * self.mirror).astype(np.float32)


@dataclass(frozen=True, slots=True)
class DecoderRotations:
    """The rotations of a decoder.

    ``residual``: rotates the hidden state between layers. ``head``: rotates each head's values, which the cache stores rotated.
    ``gated``: rotates the input of ``down``. A layer does only this rotation at run time; the others are part of the layer's
    weights.
    """

    residual: Rotation
    head: Rotation
    gated: Rotation

    @classmethod
    def of(cls, shape: DecoderShape) -> DecoderRotations:
        return cls(Rotation.of(shape.hidden), Rotation.of(shape.head_dim), Rotation.blocks(shape.intermediate))

    def layer(self, w: LayerWeights) -> LayerWeights:
        """Return the layer's weights for rotated rows, with each norm's gain folded into the next matrix."""
        matrices, biases = dict[str, Any](w.matrices), dict(w.biases)
        for name, norm in (("qkv", "input"), ("gate_up", "mlp")):
            gained = replace(self.residual, signs=self.residual.signs * w.norms[norm])
            matrices[name] = gained.rows(matrices[name])
        values = slice(-self._kv_size(w), None)
        matrices["qkv"][values] = self._by_head(matrices["qkv"][values].T).T
        if "qkv" in biases:
            biases["qkv"] = np.concatenate([biases["qkv"][: values.start], self._by_head(biases["qkv"][None, values])[0]])
        matrices["output"] = self.residual.rows(self._by_head(matrices["output"]).T).T
        matrices["down"] = self.residual.rows(self.gated.rows(matrices["down"]).T).T
        biases |= {name: self.residual.rows(biases[name]) for name in ("output", "down") if name in biases}
        ones = {name: np.ones_like(w.norms[name]) for name in ("input", "mlp")}
        return LayerWeights(matrices, biases, {**w.norms, **ones})

    def inputs(self, matrix: str, rows: Float32, w: LayerWeights) -> Float32:
        """Rotate the inputs ``[n, in]`` of ``matrix`` as the rotated layer does. ``w``: the unrotated weights."""
        if matrix == "output":
            return self._by_head(rows)
        if matrix == "down":
            return self.gated.rows(rows)
        gain = w.norms["input" if matrix == "qkv" else "mlp"]
        return self.residual.rows(np.divide(rows, gain, out=np.zeros_like(rows), where=gain != 0))

    def _kv_size(self, w: LayerWeights) -> int:
        qkv, output = w.matrices["qkv"], w.matrices["output"]
        return (qkv.shape[0] - output.shape[1]) // 2

    def _by_head(self, rows: Float32) -> Float32:
        return self.head.rows(rows.reshape(len(rows), -1, len(self.head.signs))).reshape(rows.shape)


def _hadamard(size: int) -> Float32:
    """Return the orthonormal, symmetric Hadamard matrix ``[size, size]``; ``size`` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def _cosines(size: int) -> Float32:
    """Return the matrix ``[size, size]`` of the orthonormal cosine transform (DCT-II)."""
    index = np.arange(size)
    matrix = np.cos(np.pi * (index[:, None] + 0.5) * index / size) * np.sqrt(2 / size)
    matrix[:, 0] = np.sqrt(1 / size)
    return matrix.astype(np.float32)
