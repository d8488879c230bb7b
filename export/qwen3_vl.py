"""Qwen3-VL: each pair of frames is announced by its time; the tower's middle layers feed the decoder's first (DeepStack)."""

from __future__ import annotations

import torch
from torch import nn

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.defaults import with_defaults
from edgevlm.export.family import FamilyParts
from edgevlm.export.qwen_sizes import frame_size
from edgevlm.export.qwen_tower import Block, PatchGrid, QwenTower, patch_grid, square_edge

PROCESSORS = ("video_processor", "image_processor")
BUDGET = (128 * 32 * 32, 768 * 32 * 32)  # pixels of a clip
START, END = "<|vision_start|>", "<|vision_end|>"


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        self.linear_fc1, self.act_fn, self.linear_fc2 = nn.Linear(width, inner), ACT2FN[activation], nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear_fc2(self.act_fn(self.linear_fc1(x)))
        return out


class Merger(nn.Module):
    """A square's patches to one token, normed before they are joined, or, ``joined``, after."""

    def __init__(self, width: int, squares: int, hidden: int, *, joined: bool) -> None:
        super().__init__()
        inner = width * squares
        self.squares, self.norms_joined, self.act_fn = squares, joined, nn.GELU()
        self.norm = nn.LayerNorm(inner if joined else width, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(inner, inner), nn.Linear(inner, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        normed = rows if self.norms_joined else self.norm(rows)
        whole = normed.unflatten(1, (-1, self.squares)).flatten(2)
        tokens: torch.Tensor = self.linear_fc2(self.act_fn(self.linear_fc1(self.norm(whole) if self.norms_joined else whole)))
        return tokens


class Tower(QwenTower):
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


def parts(checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
    """The family's parts; raises UserError for a checkpoint it cannot express."""
    config = with_defaults(checkpoint.section("vision_config"), "qwen3_vl_vision")
    size = frame_size(checkpoint, PROCESSORS, camera, square_edge(config), BUDGET, config["temporal_patch_size"])
    grid = patch_grid(config, size)
    width, heads, hidden = int(config["hidden_size"]), int(config["num_heads"]), int(config["out_hidden_size"])
    tower = Tower(grid, width, heads, list(config["deepstack_visual_indexes"]))
    with torch.device("meta"):
        for _ in range(int(config["depth"])):
            mlp = Mlp(width, int(config["intermediate_size"]), config["hidden_act"])
            tower.blocks.append(Block(width, heads, nn.LayerNorm, mlp))
        tower.merger = Merger(width, grid.merge**2, hidden, joined=False)
        for _ in tower.tapped:
            tower.deepstack_merger_list.append(Merger(width, grid.merge**2, hidden, joined=True))
    tower.take(checkpoint, {"": "vision."})
    count = int(config["num_position_embeddings"])
    table = torch.from_numpy(checkpoint.tensor("vision.pos_embed.weight", (count, width)))
    tower.places = resampled(table, grid)
    return FamilyParts(
        vision=tower.eval(),
        grid=(grid.rows, grid.columns),
        closing=None,
        content_type="video",
        token_keys=("video_token_id",),
        processors=PROCESSORS,
        positions="frame",
        before=f"<{{seconds:.1f}} seconds>{START}",
        after=END,
        around=(START, END),
        deepstack=len(tower.tapped),
        is_sized=True,
    )


def resampled(table: torch.Tensor, grid: PatchGrid) -> torch.Tensor:
    """A square table of position embeddings ``[n * n, width]`` at each patch, bilinear: ``[patches, width]``."""
    side = int(len(table) ** 0.5)
    square = table.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    size = (grid.rows * grid.merge, grid.columns * grid.merge)
    drawn = nn.functional.interpolate(square, size=size, mode="bilinear", align_corners=True)[0]
    row, col = grid.places().unbind(-1)
    return drawn[:, row, col].T.contiguous()
