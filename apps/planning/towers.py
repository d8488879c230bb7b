"""Parameters and shapes of the towers that :mod:`edgevlm.export` writes, counted from ``config.json`` without its weights.

Every function gives a :class:`Tower`; the tests hold each against the weights that an export of the family writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from edgevlm.apps.planning.shape import Tower

Config = Mapping[str, Any]
FrameSize = Callable[[int, tuple[int, int], int], tuple[int, int]]
"""(factor, pixel budget, frames that share one) to (height, width), as the processor of a Qwen model sizes a frame."""
QWEN_EDGES = {
    "qwen2_vl": (28, 1),
    "qwen2_5_vl": (28, 1),
    "qwen3_vl": (32, 2),
}  # pixels a token in budgets; frames that share one
TEXT = {"smolvlm": 15, "qwen3_vl": 11}  # tokens of the text around a grid, a time of four digits among them


def tower(family: str, config: Config, sized: FrameSize) -> Tower:
    """The tower of a whole ``config.json``, its sections filled up with transformers' defaults."""
    makers = {"qwen2_vl": _qwen2, "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3}
    if family in makers:
        return makers[family](config, sized)
    return _smolvlm(config) if family == "smolvlm" else _llava(family, config)


def _block(width: int, inner: int, gated: bool = False) -> int:
    """Parameters of the matrices and biases of a block: q, k, v, o and an MLP of two matrices, or three."""
    mlp = (3 if gated else 2) * width * inner + (2 * inner if gated else inner) + width
    return 4 * (width * width + width) + mlp


def _llava(family: str, config: Config) -> Tower:
    vision, text = config["vision_config"], config["text_config"]
    width, inner, patch = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "patch_size"))
    side, depth, hidden = int(vision["image_size"]) // patch, int(vision["num_hidden_layers"]), int(text["hidden_size"])
    chosen = config["vision_feature_layer"]
    chosen = [index % (depth + 1) for index in (chosen if isinstance(chosen, list) else [chosen])]
    is_clip = vision["model_type"] == "clip_vision_model"
    blocks, patches = max(chosen), side * side + is_clip
    embedding = 3 * patch * patch * width + patches * width + (3 * width if is_clip else width)
    per_block = _block(width, inner)
    bias = 2 * hidden if config.get("multimodal_projector_bias", True) else 0
    projector = width * len(chosen) * hidden + hidden * hidden + bias
    projected, tokens = side * side, side * side
    if family == "llava_next_video":
        projected = tokens = (side // int(config.get("spatial_pool_stride", 2))) ** 2
    elif family == "llava_onevision":
        tokens = math.ceil(side / 2) ** 2
    parameters = embedding + blocks * (per_block + 4 * width) + projector
    return _square(vision, parameters, blocks, patches, projector_parameters=projector, projected=projected, tokens=tokens)


def _square(vision: Config, parameters: int, blocks: int, patches: int, **more: Any) -> Tower:
    """A SigLIP or CLIP tower: square frames, every patch seen by all."""
    width, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    return Tower(
        parameters=parameters,
        block_parameters=blocks * _block(width, inner),
        patches=patches,
        attended=patches,
        blocks=blocks,
        width=width,
        inner=inner,
        heads=int(vision["num_attention_heads"]),
        size=(int(vision["image_size"]),) * 2,
        **more,
    )


def _smolvlm(config: Config) -> Tower:
    vision, hidden, scale = config["vision_config"], int(config["text_config"]["hidden_size"]), int(config["scale_factor"])
    width, inner, patch = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "patch_size"))
    side, blocks = int(vision["image_size"]) // patch, int(vision["num_hidden_layers"])
    patches, tokens = side * side, (side // scale) ** 2
    projector = width * scale**2 * hidden
    blocks_only = blocks * (_block(width, inner) + 4 * width)
    parameters = 3 * patch * patch * width + width + patches * width + blocks_only + 2 * width + projector
    more = {"projector_parameters": projector, "projected": tokens, "tokens": tokens, "text": TEXT["smolvlm"]}
    return _square(vision, parameters, blocks, patches, **more)


def _qwen2(config: Config, sized: FrameSize) -> Tower:
    vision = config["vision_config"]
    width = int(vision["embed_dim"])
    inner, hidden = int(width * vision["mlp_ratio"]), int(vision["hidden_size"])
    joined = width * int(vision["spatial_merge_size"]) ** 2
    merger = joined * joined + joined + joined * hidden + hidden
    return _qwen("qwen2_vl", vision, sized, width, inner, _block(width, inner), 4 * width, merger, 2 * width, 0)


def _qwen2_5(config: Config, sized: FrameSize) -> Tower:
    vision = config["vision_config"]
    width, inner, hidden = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
    joined = width * int(vision["spatial_merge_size"]) ** 2
    merger = joined * joined + joined + joined * hidden + hidden
    return _qwen("qwen2_5_vl", vision, sized, width, inner, _block(width, inner, gated=True), 2 * width, merger, width, 0)


def _qwen3(config: Config, sized: FrameSize) -> Tower:
    vision = config["vision_config"]
    width, inner, hidden = (int(vision[key]) for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
    joined, taps = width * int(vision["spatial_merge_size"]) ** 2, len(vision["deepstack_visual_indexes"])
    merger = joined * joined + joined + joined * hidden + hidden
    norms = 2 * width + taps * 2 * joined
    return _qwen("qwen3_vl", vision, sized, width, inner, _block(width, inner), 4 * width, (1 + taps) * merger, norms, width)


def _qwen(
    family: str, vision: Config, sized: FrameSize,
    width: int, inner: int, per_block: int, block_norms: int, merger: int, merger_norms: int, placed: int,
) -> Tower:  # fmt: skip
    """A tower of patches of ``temporal_patch_size`` frames. placed: width of the position embeddings and of a patch's bias."""
    patch, merge, group = (int(vision[key]) for key in ("patch_size", "spatial_merge_size", "temporal_patch_size"))
    per_token, clip = QWEN_EDGES[family]
    size = sized(patch * merge, (128 * per_token**2, 768 * per_token**2), clip)
    rows, columns = size[0] // (patch * merge), size[1] // (patch * merge)
    tokens, blocks, heads = rows * columns, int(vision["depth"]), int(vision["num_heads"])
    patches = tokens * merge**2
    constants = 2 * patches * (width // heads) + placed * patches  # rotary tables, and places resampled for this size
    embedding = 3 * group * patch * patch * width + placed
    return Tower(
        parameters=embedding + blocks * (per_block + block_norms) + merger + merger_norms + constants,
        block_parameters=blocks * per_block,
        projector_parameters=merger,
        projected=tokens,
        tokens=tokens,
        patches=patches,
        attended=_attended(vision, rows, columns, merge, patch, blocks),
        blocks=blocks,
        width=width,
        inner=inner,
        heads=heads,
        size=size,
        group=group,
        text=TEXT.get(family, 0),
    )


def _attended(vision: Config, rows: int, columns: int, merge: int, patch: int, blocks: int) -> float:
    """Keys that a patch sees, the mean over blocks: all patches, but inside windows in all blocks that are not full."""
    patches = rows * columns * merge**2
    if "window_size" not in vision or "fullatt_block_indexes" not in vision:
        return float(patches)
    side = max(1, int(vision["window_size"]) // (patch * merge))
    tall, wide = ([min(side, edge - start) for start in range(0, edge, side)] for edge in (rows, columns))
    windowed = merge**2 * sum(height**2 for height in tall) * sum(width**2 for width in wide) / (rows * columns)
    full = len([index for index in vision["fullatt_block_indexes"] if index < blocks])
    return (full * patches + (blocks - full) * windowed) / blocks
