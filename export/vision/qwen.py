"""Qwen's vision towers: patches of two frames, rotary positions, merged in squares.

What depends on the size of a frame (rotary tables, windows, the order of patches) is worked out once, for the size that the
bundle is made for, and is a constant of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edgevlm.export.vision.attention import attend
from edgevlm.export.vision.traced import VisionFeatures

Windows = list[tuple[int, int]]  # (how many, patches in each), one after another


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """A frame's patches: ``rows`` x ``columns`` squares of ``merge`` x ``merge`` patches.

    A patch has ``patch`` x ``patch`` pixels and is ``group`` frames deep.
    """

    rows: int
    columns: int
    merge: int
    patch: int
    group: int

    @property
    def squares(self) -> int:
        return self.rows * self.columns

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return self.rows * self.merge * self.patch, self.columns * self.merge * self.patch

    def places(self) -> torch.Tensor:
        """Row and column of each patch, square by square: int64 ``[patches, 2]``."""
        m = self.merge
        row, col = torch.meshgrid(torch.arange(self.rows * m), torch.arange(self.columns * m), indexing="ij")
        both = torch.stack([row, col], -1).reshape(self.rows, m, self.columns, m, 2)
        return both.transpose(1, 2).reshape(-1, 2)

    def cut(self, pixels: torch.Tensor) -> torch.Tensor:
        """``[G, group * 3, H, W]`` to ``[G, patches, 3 * group * patch * patch]``, square by square."""
        m, p = self.merge, self.patch
        cut = pixels.reshape(-1, self.group, 3, self.rows, m, p, self.columns, m, p)
        return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, self.squares * m * m, 3 * self.group * p * p)

    def windows(self, side: int) -> tuple[torch.Tensor, Windows]:
        """Windows of ``side`` x ``side`` squares, those at the edges smaller: the squares' order, and runs of equal windows."""
        squares = torch.arange(self.squares).reshape(self.rows, self.columns)
        by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for top in range(0, self.rows, side):
            for left in range(0, self.columns, side):
                window = squares[top : top + side, left : left + side]
                by_shape.setdefault(tuple(window.shape), []).append(window.flatten())
        order = torch.cat([window for alike in by_shape.values() for window in alike])
        return order, [(len(alike), alike[0].numel() * self.merge**2) for alike in by_shape.values()]


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Full attention inside each window, queries and keys rotated."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, windows: Windows) -> torch.Tensor:
        """x: ``[G, patches, width]``; cos, sin: ``[patches, 1, head_dim]``."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [G, patches, heads, head_dim]
        q, k = (part * cos + _turned(part) * sin for part in (q, k))
        seen, start = [], 0
        for count, length in windows:
            here = slice(start, start + count * length)
            rows = [part[:, here].reshape(-1, length, *part.shape[2:]) for part in (q, k, v)]
            attended = attend(rows[0], rows[1], rows[2], q.shape[-1] ** -0.5)
            seen.append(attended.reshape(x.shape[0], -1, x.shape[-1]))
            start += count * length
        joined: torch.Tensor = self.proj(torch.cat(seen, 1))
        return joined


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Block(nn.Module):
    """Pre-norm attention and MLP; parts carry the checkpoint's names."""

    def __init__(self, width: int, heads: int, norm: type[nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = layer_norm(norm, width), layer_norm(norm, width)
        self.attn, self.mlp = Attention(width, heads), mlp

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, windows: Windows) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, windows)
        joined: torch.Tensor = x + self.mlp(self.norm2(x))
        return joined


def layer_norm(norm: type[nn.Module], width: int) -> nn.Module:
    """``norm`` of ``width``, with the epsilon that all of these towers have."""
    return nn.LayerNorm(width, eps=1e-6) if norm is nn.LayerNorm else norm(width)


class Mlp(nn.Module):
    """``last(act(first(x)))``, or with ``gate`` ``last(act(gate(x)) * first(x))``; linears carry the checkpoint's names."""

    def __init__(self, width: int, inner: int, activation: str, first: str, last: str, gate: str = "") -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        self.names, self.act = (first, last, gate), ACT2FN[activation]
        for name in filter(None, (gate, first)):
            self.add_module(name, nn.Linear(width, inner))
        self.add_module(last, nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last, gate = self.names
        inner = self.act(getattr(self, gate or first)(x))
        out: torch.Tensor = getattr(self, last)(inner * getattr(self, first)(x) if gate else inner)
        return out


class Merger(nn.Module):
    """A square's patches, normed, to one token."""

    def __init__(self, width: int, squares: int, hidden: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.ln_q, self.joined = layer_norm(norm, width), width * squares
        self.mlp = nn.Sequential(nn.Linear(self.joined, self.joined), nn.GELU(), nn.Linear(self.joined, hidden))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.mlp(self.ln_q(rows).unflatten(1, (-1, self.joined // rows.shape[-1])).flatten(2))
        return tokens


class Qwen3Merger(nn.Module):
    """A square's patches to one token, normed before they are joined, or, ``joined``, after."""

    def __init__(self, width: int, squares: int, hidden: int, *, joined: bool) -> None:
        super().__init__()
        inner = width * squares
        self.squares, self.norms_joined, self.act_fn = squares, joined, nn.GELU()
        self.norm = nn.LayerNorm(inner if joined else width, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(inner, inner), nn.Linear(inner, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        normed = rows if self.norms_joined else self.norm(rows)
        joined = normed.unflatten(1, (-1, self.squares)).flatten(2)
        tokens: torch.Tensor = self.linear_fc2(self.act_fn(self.linear_fc1(self.norm(joined) if self.norms_joined else joined)))
        return tokens


class QwenTower(VisionFeatures):
    """Blocks between ``patch_embed`` and ``merger``: Qwen2-VL's and Qwen2.5-VL's. Families fill the parts in.

    ``window``: squares along the edge of a window; all blocks but those in ``full`` attend inside windows. 0 for no windows.
    """

    def __init__(self, grid: PatchGrid, width: int, heads: int, *, bias: bool = False, window: int = 0) -> None:
        super().__init__()
        self.grid, self.size, self.group, self.width = grid, grid.size, grid.group, width
        self.patch_embed = nn.Module()
        patch = (grid.group, grid.patch, grid.patch)
        self.patch_embed.proj = nn.Conv3d(3, width, patch, patch, bias=bias)
        self.blocks: Any = nn.ModuleList()
        self.full: set[int] = set()
        patches = grid.squares * grid.merge**2
        self.everything: Windows = [(1, patches)]
        order, self.parts = grid.windows(window) if window else (torch.arange(grid.squares), self.everything)
        self.order, self.back = order, torch.argsort(order)
        cos, sin = _tables(grid.places(), width // heads)
        self.cos, self.sin = (self.ordered(table[None])[0][:, None] for table in (cos, sin))

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[G, patches, n]`` in the order of windows."""
        return rows.unflatten(1, (self.grid.squares, -1))[:, self.order].flatten(1, 2)

    def embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels to patch embeddings ``[G, patches, width]``, square by square."""
        proj = self.patch_embed.proj
        rows: torch.Tensor = nn.functional.linear(self.grid.cut(pixels), proj.weight.flatten(1), proj.bias)
        return rows

    def run(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        windows = self.everything if layer in self.full else self.parts
        out: torch.Tensor = self.blocks[layer](rows, self.cos, self.sin, windows)
        return out

    def merged(self, merger: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """Patches through a merger, one token a square, in row-major order again: ``[G, squares, hidden]``."""
        tokens: torch.Tensor = merger(rows)
        return tokens[:, self.back]

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        rows = self.ordered(self.embed(pixel_values))
        for layer in range(len(self.blocks)):
            rows = self.run(layer, rows)
        return self.merged(self.merger, rows)


class Qwen3Tower(QwenTower):
    """Tokens ``[G, squares, (1 + K) hidden]``: the embedding, then what K blocks give to the decoder's first K layers."""

    def __init__(self, grid: PatchGrid, width: int, heads: int, tapped: list[int]) -> None:
        super().__init__(grid, width, heads, bias=True)
        self.tapped = tapped
        self.deepstack_merger_list: nn.ModuleList = nn.ModuleList()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        rows = self.embed(pixel_values) + self.places
        further = {}
        for layer in range(len(self.blocks)):
            rows = self.run(layer, rows)
            if layer in self.tapped:
                at = self.tapped.index(layer)
                further[at] = self.merged(self.deepstack_merger_list[at], rows)
        return torch.cat([self.merged(self.merger, rows), *(further[at] for at in sorted(further))], -1)

    def place(self, table: torch.Tensor) -> None:
        """Resample a square table of position embeddings ``[n * n, width]`` at each patch, bilinear: ``[patches, width]``."""
        grid, side = self.grid, int(len(table) ** 0.5)
        square = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
        size = (grid.rows * grid.merge, grid.columns * grid.merge)
        drawn = nn.functional.interpolate(square, size=size, mode="bilinear", align_corners=True)[0]
        row, col = grid.places().unbind(-1)
        self.places = drawn[:, row, col].T.contiguous()


def _tables(places: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[patches, head_dim]``: a quarter of the pairs' frequencies for rows, the same for columns."""
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float) / (head_dim // 2)))
    angles = (places[..., None].float() * inv_freq).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()
