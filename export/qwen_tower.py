"""The vision tower that Qwen2-VL, Qwen2.5-VL and Qwen3-VL vary: patches of two frames, rotary positions, merged in squares.

What depends on the size of a frame (rotary tables, windows, the order of patches) is worked out once, for the size that the
bundle is made for, and is a constant of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edgevlm.errors import UserError
from edgevlm.export.attention import attend
from edgevlm.export.vision import VisionFeatures

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


class QwenTower(VisionFeatures):
    """Blocks between ``patch_embed`` and a family's ``merger``; families fill the parts in and load them.

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


def _tables(places: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[patches, head_dim]``: a quarter of the pairs' frequencies for rows, the same for columns."""
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float) / (head_dim // 2)))
    angles = (places[..., None].float() * inv_freq).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()


def square_edge(section: dict[str, Any]) -> int:
    """Pixels along the edge of what becomes one token; raises UserError for patches that are not square."""
    sizes = [section[key] for key in ("spatial_merge_size", "patch_size", "temporal_patch_size")]
    if not all(isinstance(number, int) for number in sizes) or section.get("in_channels", 3) != 3:
        raise UserError("config.json: vision patches must be squares of pixels with three channels")
    return int(sizes[0] * sizes[1])


def patch_grid(section: dict[str, Any], size: tuple[int, int]) -> PatchGrid:
    """The grid of ``vision_config`` for frames of ``size``, (height, width), multiples of :func:`square_edge`."""
    edge, merge = square_edge(section), int(section["spatial_merge_size"])
    return PatchGrid(size[0] // edge, size[1] // edge, merge, edge // merge, int(section["temporal_patch_size"]))
