"""The families Qwen2-VL, Qwen2.5-VL and Qwen3-VL: two frames share one grid of tokens, and a pixel budget limits the frame
size.
"""

from __future__ import annotations

from typing import ClassVar

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint, with_defaults
from edgevlm.export.families import Config, Family, FamilyParts, FrameSize, TowerGeometry, block_parameters
from edgevlm.export.frames import pixel_budget

START, END = "<|vision_start|>", "<|vision_end|>"


class Qwen2VL(Family):
    """Qwen2-VL: a patch attends to all patches of its frame pair; frame positions advance by 1 per pair (arXiv 2409.12191)."""

    vision_type: ClassVar[str] = "qwen2_vl_vision"
    token_keys: ClassVar[tuple[str, ...]] = ("video_token_id",)
    positions: ClassVar[str] = "video"
    is_sized: ClassVar[bool] = True
    keeps_aspect: ClassVar[bool] = True
    merge: ClassVar[int] = 2
    fading: ClassVar[tuple[str, str]] = ("20/12", "0.75/0.6")
    tokenizer_class: ClassVar[str | None] = "Qwen2Tokenizer"
    tower: ClassVar[str] = "QwenTower"
    token_edge: ClassVar[int] = 28  # a token's edge in pixels; a frame's budget is 128 to 768 tokens
    shares_budget: ClassVar[bool] = False
    is_placed: ClassVar[bool] = False  # whether patches have position embeddings and a bias
    is_gated: ClassVar[bool] = False
    norm_vectors: ClassVar[int] = 2  # a norm's vectors: weight and bias, or only the weight

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        from edgevlm.export.vision import qwen

        vision = with_defaults(checkpoint.section("vision_config"), self.vision_type)
        merge, patch, group = sizes = [vision[key] for key in ("spatial_merge_size", "patch_size", "temporal_patch_size")]
        if not all(isinstance(number, int) for number in sizes) or vision.get("in_channels", 3) != 3:
            raise UserError("config.json: vision patches must be square and have three channels")
        edge = merge * patch
        pixels = pixel_budget(checkpoint, self.processors, edge, *self.budget(vision))
        size = pixels.fitted(*camera)
        grid = qwen.PatchGrid(size[0] // edge, size[1] // edge, merge, patch, group)
        clock = vision.get("tokens_per_second")
        return FamilyParts(
            getattr(qwen, self.tower)(grid, vision, *self.widths(vision)),
            (grid.rows, grid.columns),
            tokens_per_second=None if clock is None else float(clock),
            deepstack=len(vision.get("deepstack_visual_indexes", ())),
            pixels=pixels,
        )

    def budget(self, vision: Config) -> tuple[tuple[int, int], int]:
        """Return the default pixel budget (minimum, maximum), and the number of frames that share the budget."""
        return (128 * self.token_edge**2, 768 * self.token_edge**2), int(vision["temporal_patch_size"] ** self.shares_budget)

    def widths(self, vision: Config) -> tuple[int, int, int]:
        """Return the width of a block, the width of its MLP, and the width of the tower's output rows."""
        if self.vision_type == Qwen2VL.vision_type:
            return int(vision["embed_dim"]), int(vision["embed_dim"] * vision["mlp_ratio"]), int(vision["hidden_size"])
        return int(vision["hidden_size"]), int(vision["intermediate_size"]), int(vision["out_hidden_size"])

    def geometry(self, config: Config, sized: FrameSize) -> TowerGeometry:
        vision = config["vision_config"]
        (width, inner, hidden), taps = self.widths(vision), len(vision.get("deepstack_visual_indexes", ()))
        patch, merge, group = (int(vision[key]) for key in ("patch_size", "spatial_merge_size", "temporal_patch_size"))
        size = sized(patch * merge, *self.budget(vision))
        rows, columns = size[0] // (patch * merge), size[1] // (patch * merge)
        tokens, blocks = rows * columns, int(vision["depth"])
        patches, joined = tokens * merge**2, width * merge**2
        places = (1 + int(vision["num_position_embeddings"])) * width if self.is_placed else 0  # and a bias
        per_block = block_parameters(width, inner, self.is_gated)
        mergers = (1 + taps) * (joined * joined + joined + joined * hidden + hidden)
        norms = 2 * blocks * self.norm_vectors * width + self.norm_vectors * width + taps * 2 * joined
        attended = float(patches)
        if "window_size" in vision and "fullatt_block_indexes" in vision:  # blocks without full attention attend in windows
            side = max(1, int(vision["window_size"]) // (patch * merge))
            tall, wide = ([min(side, edge - start) for start in range(0, edge, side)] for edge in (rows, columns))
            windowed = merge**2 * sum(height**2 for height in tall) * sum(across**2 for across in wide) / tokens
            full = len([index for index in vision["fullatt_block_indexes"] if index < blocks])
            attended = (full * patches + (blocks - full) * windowed) / blocks
        return TowerGeometry(
            parameters=3 * group * patch * patch * width + places + blocks * per_block + mergers + norms,
            block_parameters=blocks * per_block, projector_parameters=mergers, projected=tokens, tokens=tokens, patches=patches,
            attended=attended, blocks=blocks, width=width, inner=inner, heads=int(vision["num_heads"]), size=size, group=group,
            text=self.text_tokens,
        )  # fmt: skip


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL: most blocks attend inside windows, and frame positions follow the clock (arXiv 2502.13923, sec. 2.1)."""

    vision_type: ClassVar[str] = "qwen2_5_vl_vision"
    tower: ClassVar[str] = "Qwen25Tower"
    is_gated: ClassVar[bool] = True
    norm_vectors: ClassVar[int] = 1


class Qwen3VL(Qwen2VL):
    """Qwen3-VL: timestamps precede pairs of frames; the tower's middle layers feed the first decoder layers (DeepStack)."""

    vision_type: ClassVar[str] = "qwen3_vl_vision"
    tower: ClassVar[str] = "Qwen3Tower"
    positions: ClassVar[str] = "frame"
    before: ClassVar[str] = f"<{{seconds:.1f}} seconds>{START}"
    after: ClassVar[str] = END
    around: ClassVar[tuple[str, str]] = (START, END)
    text_tokens: ClassVar[int] = 11
    token_edge: ClassVar[int] = 32
    shares_budget: ClassVar[bool] = True
    is_placed: ClassVar[bool] = True
