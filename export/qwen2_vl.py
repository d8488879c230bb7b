"""Qwen2-VL: two frames make one grid, every patch sees its whole frame pair; M-RoPE with one step a pair (arXiv 2409.12191)."""

from __future__ import annotations

import torch
from torch import nn

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.defaults import with_defaults
from edgevlm.export.family import FamilyParts
from edgevlm.export.qwen_sizes import frame_size
from edgevlm.export.qwen_tower import Block, PatchGrid, QwenTower, patch_grid, square_edge

PROCESSORS = ("video_processor", "image_processor")
BUDGET = (128 * 28 * 28, 768 * 28 * 28)  # pixels of a frame


class Merger(nn.Module):
    """A square's patches, normed, to one token."""

    def __init__(self, width: int, squares: int, hidden: int, norm: nn.Module) -> None:
        super().__init__()
        self.ln_q, self.joined = norm, width * squares
        self.mlp = nn.Sequential(nn.Linear(self.joined, self.joined), nn.GELU(), nn.Linear(self.joined, hidden))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.mlp(self.ln_q(rows).unflatten(1, (-1, self.joined // rows.shape[-1])).flatten(2))
        return tokens


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        self.fc1, self.act, self.fc2 = nn.Linear(width, inner), ACT2FN[activation], nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Tower(QwenTower):
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        rows = self.ordered(self.embed(pixel_values))
        for layer in range(len(self.blocks)):
            rows = self.run(layer, rows)
        return self.merged(self.merger, rows)


def parts(checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
    """The family's parts; raises UserError for a checkpoint it cannot express."""
    config = with_defaults(checkpoint.section("vision_config"), "qwen2_vl_vision")
    size = frame_size(checkpoint, PROCESSORS, camera, square_edge(config), BUDGET, 1)
    grid, width, heads = patch_grid(config, size), int(config["embed_dim"]), int(config["num_heads"])
    tower = Tower(grid, width, heads)
    with torch.device("meta"):
        for _ in range(int(config["depth"])):
            mlp = Mlp(width, int(width * config["mlp_ratio"]), config["hidden_act"])
            tower.blocks.append(Block(width, heads, nn.LayerNorm, mlp))
        tower.merger = Merger(width, grid.merge**2, int(config["hidden_size"]), nn.LayerNorm(width, eps=1e-6))
    tower.take(checkpoint, {"": "vision."})
    return video_parts(tower.eval(), grid)


def video_parts(tower: QwenTower, grid: PatchGrid, tokens_per_second: float | None = None) -> FamilyParts:
    """A family whose video is one block of positions."""
    return FamilyParts(
        vision=tower,
        grid=(grid.rows, grid.columns),
        closing=None,
        content_type="video",
        token_keys=("video_token_id",),
        processors=PROCESSORS,
        positions="video",
        tokens_per_second=tokens_per_second,
        is_sized=True,
    )
