"""A checkpoint's text half with its hidden states rotated: the same function, of numbers that lie on no grid.

Weights that were rounded once lie on a grid, which a rounding of the same kind finds again. A random rotation of the hidden
states, folded into every matrix that reads or writes them, takes the grid away and changes nothing else (SliceGPT, arXiv
2401.15024, sec. 3.1): norms' gains go into the matrices behind them first, and a tied head is tied no longer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.writer import decoder_shape

READS = {"input_layernorm": ("q", "k", "v"), "post_attention_layernorm": ("gate", "up")}  # gain -> matrices behind it
WRITES = ("o", "down")


def rotated(source: Path, folder: Path, seed: int = 0) -> Path:
    """Write a rotated copy into ``folder``, all in float32; its tower's features no longer fit. Raises UserError, OSError."""
    from safetensors.numpy import save_file

    checkpoint = Checkpoint(source)
    _, shape = decoder_shape(checkpoint)
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((shape.hidden, shape.hidden)))[0]
    own = {name: tensor.rows(0, tensor.shape[0]) for name, tensor in checkpoint.tensors.items() if tensor.shape}

    def reading(name: str, gain: NDArray) -> None:
        own[name] = ((own[name].astype(np.float64) * gain) @ turn).astype(np.float32)

    for layer in (f"text.layers.{index}" for index in range(shape.layers)):
        for norm, parts in READS.items():
            gain = own[f"{layer}.{norm}.weight"].astype(np.float64)
            for part in parts:
                reading(f"{layer}.{module(part)}.weight", gain)
            own[f"{layer}.{norm}.weight"] = np.ones(shape.hidden, np.float32)
        for name in (f"{layer}.{module(part)}.{kind}" for part in WRITES for kind in ("weight", "bias")):
            if name in own:
                own[name] = (turn.T @ own[name].astype(np.float64)).astype(np.float32)
    table, head, norm = "text.embed_tokens.weight", "text.lm_head.weight", "text.norm.weight"
    own[head] = own[table if shape.tied else head]
    reading(head, own[norm].astype(np.float64))
    reading(table, np.ones(shape.hidden))
    own[norm] = np.ones(shape.hidden, np.float32)
    names = {name: tensor.name for name, tensor in checkpoint.tensors.items()} | {head: "lm_head.weight"}
    folder.mkdir()
    for path in source.glob("*.j*"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file({names[name]: np.ascontiguousarray(array) for name, array in own.items()}, folder / "model.safetensors")
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for section in (config, config.get("text_config", {})):
        section["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def module(part: str) -> str:
    return f"{'self_attn' if part in 'qkvo' else 'mlp'}.{part}_proj"
