"""Rows between two layers' attention against a float64 twin that rounds as the kernel does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels

pytestmark = pytest.mark.skipif(not kernels.multiplies_codes(), reason="the processor has no products of 8-bit codes")


def hadamard(size: int) -> np.ndarray:
    made = np.ones((1, 1))
    while len(made) < size:
        made = np.block([[made, made], [made, -made]])
    return made / np.sqrt(size)


class Part:
    """A layer of random numbers, 2 KV heads; ``whole``: with biases and with the norms of heads. rows: in 4 bits, of a call."""

    def __init__(
        self, heads: int, width: int, hidden: int, inner: int, block: int, whole: bool, rows: int | None = None
    ) -> None:
        rng, queries, keys = np.random.default_rng(hidden), heads * width, 2 * width
        sizes = [(queries, hidden), (hidden, 2 * inner), (inner, hidden), (hidden, queries + 2 * keys)]
        self.depth = 32 if rows else 1 << 20  # numbers of a row that share a scale
        if rows:
            self.codes: list[Any] = [rng.integers(0, 256, (n, d // 32, 16)).astype(np.uint8) for d, n in sizes]
            self.scales = [rng.uniform(-0.02, 0.02, codes.shape[:2]).astype(np.float32) for codes in self.codes]
        else:
            self.codes = [rng.integers(-128, 128, size).astype(np.int8) for size in sizes]
            self.scales = [rng.uniform(-0.01, 0.01, size[1]).astype(np.float32) for size in sizes]
        self.biases = [rng.standard_normal(size[1]).astype(np.float32) if whole else None for size in sizes]
        if whole:
            self.biases[1][:inner:5] -= 200  # gates that are as good as shut: e^200 is no float
        self.gains = [rng.uniform(0.5, 2, n).astype(np.float32) if whole else None for n in (hidden, hidden, width, width)]
        self.heads, self.width, self.block = heads, width, block
        made = (rng.standard_normal((rows or 1, n)).astype(np.float32) for n in (queries, hidden, width // 2, width // 2))
        self.given, self.out = list(made), [np.zeros((rows or 1, n), np.float32) for n in (queries, keys, keys, hidden)]
        self.part = kernels.RowPart(self.codes, self.scales, self.biases, self.gains, 1e-6, 2, width, block)

    def matrix(self, index: int) -> np.ndarray:
        """The numbers ``[in, out]`` that are stored."""
        codes, scales = self.codes[index], self.scales[index].astype(np.float64)
        if codes.dtype == np.int8:
            return codes * scales
        numbers = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], 32) - 8.0
        return (numbers * scales[..., None]).reshape(len(codes), -1).T

    def product(self, index: int, rows: np.ndarray) -> np.ndarray:
        blocks = rows.astype(np.float32).reshape(len(rows), -1, min(self.depth, rows.shape[1]))
        steps = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
        steps[steps == 0] = 1
        rounded = np.rint(blocks * (np.float32(1) / steps)) * steps.astype(np.float64)
        found: np.ndarray = rounded.reshape(rows.shape) @ self.matrix(index)
        bias = self.biases[index]
        return found if bias is None else found + bias

    def norm(self, index: int, row: np.ndarray) -> np.ndarray:
        found: np.ndarray = row / np.sqrt((row**2).mean(-1, keepdims=True) + 1e-6)
        return found if self.gains[index] is None else found * self.gains[index]

    def turned(self, index: int, rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(len(rows), -1, self.width)
        first, second = np.split(heads if self.gains[index] is None else self.norm(index, heads), 2, axis=-1)
        cos, sin = (table[:, None] for table in self.given[2:])
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1).reshape(rows.shape)

    def expected(self) -> list[np.ndarray]:
        attention, residual = self.given[:2]
        residual = residual + self.product(0, attention)
        gate, up = np.split(self.product(1, self.norm(0, residual)), 2, axis=1)
        gated = (gate / (1 + np.exp(-gate)) * up).reshape(-1, self.block) @ hadamard(self.block)
        residual = residual + self.product(2, gated.reshape(gate.shape))
        packed, keys = self.product(3, self.norm(1, residual)), 2 * self.width
        query, key, value = packed[:, : -2 * keys], packed[:, -2 * keys : -keys], packed[:, -keys:]
        return [self.turned(2, query), self.turned(3, key), value, residual]


SMALL, SMALLER, LARGE = (2, 64, 128, 160, 32, True), (4, 32, 128, 192, 16, False), (14, 64, 896, 4864, 64, True)
IN_BLOCKS = [(*SMALL, 3), (*SMALLER, 13), (*SMALL, 1), (2, 96, 192, 288, 1, False, 7), (*LARGE, 5), (*SMALLER, 261)]


@pytest.mark.parametrize("shape", [(2, 32, 64, 128, 64, True), SMALLER, LARGE, *IN_BLOCKS])
def test_rows_are_their_twins_whatever_the_threads(shape: Any) -> None:
    part, found = Part(*shape), []
    for threads in (1, 3):
        part.part.run(*part.given, *part.out, threads)
        found.append([array.copy() for array in part.out])
    for one, three, twin in zip(*found, part.expected(), strict=True):
        np.testing.assert_array_equal(one, three)
        # a number next to a tie may be rounded the other way
        assert np.abs(one - twin).max() < 2e-2 * np.abs(twin).max()
        assert np.median(np.abs(one - twin)) < 2e-3 * np.abs(twin).max()


def test_rows_of_zeros_stay_zeros_and_other_sizes_are_refused() -> None:
    part = Part(2, 32, 64, 128, 64, False)
    for array in part.given:
        array[:] = 0
    part.part.run(*part.given, *part.out)
    assert not any(array.any() for array in part.out)
    with pytest.raises(CacheError, match="residual must be"):
        part.part.run(part.given[0], part.given[0][:, :5], *part.given[2:], *part.out)
    with pytest.raises(CacheError, match="codes must be"):
        Part(2, 32, 96, 128, 64, False)
    with pytest.raises(CacheError, match="codes must be"):
        Part(2, 32, 96, 128, 64, False, 3)  # too narrow to multiply
