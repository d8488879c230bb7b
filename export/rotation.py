"""Orthogonal rotations of rows: they spread outlying channels over all, so that 8 bits with one scale a row lose little.

``R = diag(signs) (A kron B)``: ``A`` is a Hadamard matrix, ``B`` one times a cosine transform of the odd part of the width. A
width has the same rotation always. Of a matrix ``W [out, in]`` that reads rotated rows ``W R`` is stored, ``rotation.rows(W)``;
of one that writes them ``R.T W``, ``rotation.rows(W.T).T``, and ``rotation.rows`` of its bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgevlm.export.checkpoint import SLICE
from edgevlm.export.graph import GraphBuilder

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """outer: ``[a, a]``. inner: ``[b, b]``. signs: ``[width]``; all float32. Columns ``a b`` of a row mix, in order."""

    outer: Float32
    inner: Float32
    signs: Float32

    @classmethod
    def of(cls, width: int) -> Rotation:
        """The rotation that mixes all columns; ``a`` and ``b`` are near each other, for ``a + b`` products a number."""
        outer = min((1 << power for power in range(17) if width % (1 << power) == 0), key=lambda a: a + width // a)
        inner = width // outer
        odd = inner // (inner & -inner)
        signs = np.random.RandomState(0).randint(0, 2, width) * 2 - 1  # numpy does not change this generator
        return cls(_hadamard(outer), np.kron(_hadamard(inner // odd), _cosines(odd)), signs.astype(np.float32))

    @classmethod
    def blocks(cls, width: int, largest: int = 64) -> Rotation:
        """Hadamard blocks of ``largest`` columns, or of the largest power of two below it that divides ``width``."""
        return cls(_hadamard(1), _hadamard(min(largest, width & -width)), np.ones(width, np.float32))

    def rows(self, rows: Float32) -> Float32:
        """``rows @ R``, of rows ``[.., width]``."""
        width, (a, b) = len(self.signs), (len(self.outer), len(self.inner))
        flat = rows.reshape(-1, width)
        turned, step = np.empty(flat.shape, np.float32), max(1, SLICE // width)
        outer, inner = self.outer.T.astype(np.float64), self.inner.astype(np.float64)  # processors then agree
        for start in range(0, len(flat), step):
            split = (flat[start : start + step] * self.signs).reshape(-1, a, b)
            turned[start : start + step] = (outer @ (split @ inner)).reshape(-1, width)
        return turned.reshape(rows.shape)

    def nodes(self, graph: GraphBuilder, name: str, rows: str, inverse: bool = False) -> str:
        """Nodes for ``rows @ R``, or ``rows @ R.T``, of float32 rows ``[.., width]`` of any rank; returns ``name``."""
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
        joined = graph.node("Reshape", [turned, sizes], [f"{name}.joined" if signs and inverse else name])
        return graph.node("Mul", [joined, signs], [name]) if signs and inverse else joined


@dataclass(frozen=True, slots=True, eq=False)
class MeanKeeping:
    """A rotation that leaves the mean of a row as it is, so that LayerNorm without gain and bias commutes with it.

    ``rotation``, then the reflection at ``mirror [width]`` that brings the row of equal numbers back.
    """

    rotation: Rotation
    mirror: NDArray[np.float64]

    @classmethod
    def of(cls, width: int) -> MeanKeeping:
        rotation, equal = Rotation.of(width), np.full(width, width**-0.5, np.float32)
        mirror = rotation.rows(equal).astype(np.float64) - equal
        return cls(rotation, mirror / np.linalg.norm(mirror))

    def rows(self, rows: Float32) -> Float32:
        """``rows @ R``, of rows ``[.., width]``."""
        turned = self.rotation.rows(rows)
        along = (turned * self.mirror).sum(-1, keepdims=True)
        return (turned - 2 * along * self.mirror).astype(np.float32)


def _hadamard(size: int) -> Float32:
    """``[size, size]`` of a power of two, orthonormal and symmetric."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def _cosines(size: int) -> Float32:
    """``[size, size]``, the orthonormal cosine transform (DCT-II)."""
    index = np.arange(size)
    matrix = np.cos(np.pi * (index[:, None] + 0.5) * index / size) * np.sqrt(2 / size)
    matrix[:, 0] = np.sqrt(1 / size)
    return matrix.astype(np.float32)
