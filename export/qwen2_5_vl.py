"""Qwen2.5-VL: most blocks attend inside windows, and the frame's position follows the clock (arXiv 2502.13923, sec. 2.1)."""

from __future__ import annotations

import torch
from torch import nn

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.defaults import with_defaults
from edgevlm.export.family import FamilyParts
from edgevlm.export.qwen2_vl import BUDGET, PROCESSORS, Merger, Tower, video_parts
from edgevlm.export.qwen_sizes import frame_size
from edgevlm.export.qwen_tower import Block, RMSNorm, patch_grid, square_edge


class GatedMlp(nn.Module):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        self.gate_proj, self.up_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down_proj, self.act_fn = nn.Linear(inner, width), ACT2FN[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


def parts(checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
    """The family's parts; raises UserError for a checkpoint it cannot express."""
    config = with_defaults(checkpoint.section("vision_config"), "qwen2_5_vl_vision")
    edge = square_edge(config)
    grid = patch_grid(config, frame_size(checkpoint, PROCESSORS, camera, edge, BUDGET, 1))
    width, heads = int(config["hidden_size"]), int(config["num_heads"])
    tower = Tower(grid, width, heads, window=int(config["window_size"]) // edge)
    tower.full = set(config["fullatt_block_indexes"])
    with torch.device("meta"):
        for _ in range(int(config["depth"])):
            mlp = GatedMlp(width, int(config["intermediate_size"]), config["hidden_act"])
            tower.blocks.append(Block(width, heads, RMSNorm, mlp))
        tower.merger = Merger(width, grid.merge**2, int(config["out_hidden_size"]), RMSNorm(width))
    tower.take(checkpoint, {"": "vision."})
    return video_parts(tower.eval(), grid, float(config["tokens_per_second"]))
