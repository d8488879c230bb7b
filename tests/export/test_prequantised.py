"""AWQ and GPTQ checkpoints answer as transformers does with their dequantised numbers, and are rounded no further."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from packed_checkpoints import make_packed
from reference_blocks import matrices
from runner import Runner

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint, prequantised, profiles
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.precisions import Layouts, Precision
from edgevlm.export.precisions.layouts import Blocks

SHAPES: dict[str, dict[str, Any]] = {
    "biased": {"layers": 2, "heads": 4, "kv_heads": 1, "head_dim": 16, "hidden": 128, "intermediate": 128, "tied": True},
    "llama": {
        "backbone": "llama",
        "layers": 1,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 32,
        "hidden": 128,
        "intermediate": 256,
    },
}
CASES = [
    ("awq", 32, {}, "biased"),
    ("awq", 128, {}, "llama"),
    ("gptq", 64, {}, "biased"),
    ("gptq", 32, {"zero_points": False}, "llama"),
    ("gptq", 128, {"version": "gptq_v2"}, "llama"),
    ("awq", 32, {"left": ("layers.1.", "layers.0.self_attn.q_proj")}, "biased"),
    ("gptq", 32, {"left": ("gate_proj", "v_proj", "o_proj")}, "biased"),
]


def made(folder: Path, method: str, group: int, options: dict[str, Any], which: str = "llama") -> tuple[Path, Path]:
    source = make_checkpoint(folder / "source", "llava", side=2, vision_layers=1, **SHAPES[which])
    return make_packed(source, folder, method, group, **options)


@pytest.mark.parametrize(("method", "group", "options", "which"), CASES)
def test_logits_are_those_of_transformers(
    tmp_path: Path, monkeypatch: Any, method: str, group: int, options: dict[str, Any], which: str
) -> None:
    import transformers

    packed, floats = made(tmp_path, method, group, options, which)
    layout = Blocks(4, with_zeros=True, level=0)
    monkeypatch.setattr(prequantised, "Blocks", lambda bits, size, with_zeros: Blocks(bits, size, with_zeros, level=0))
    exact, load = Precision(Layouts(layout, Blocks(8, level=0)), None), profiles.load_precision
    monkeypatch.setattr(profiles, "load_precision", lambda name: exact if name == "int4-zp" else load(name))
    runner = Runner(export_checkpoint(packed, tmp_path / "bundle", kv="fp32"))
    assert runner.bundle.decoder.precision == "int4-zp"
    stored = matrices(runner.bundle.path, "decoder.onnx")
    wanted = Checkpoint(floats).tensor(
        "text.layers.0.mlp.down_proj.weight", (SHAPES[which]["hidden"], SHAPES[which]["intermediate"])
    )
    np.testing.assert_array_equal(stored["layer0.down"].astype(np.float32), wanted)  # to the bit

    model = transformers.LlavaForConditionalGeneration.from_pretrained(floats, dtype=torch.float32).eval()
    ids = list(range(20, 60, 3))
    table = stored["head"]  # of 8 bits: what is compared is the layers
    with torch.no_grad():
        embeds = runner.engine.embed(np.asarray(ids))
        hidden = model.model.language_model(inputs_embeds=torch.from_numpy(embeds)[None]).last_hidden_state[0].numpy()
    found = runner.step(embeds, range(len(ids))).logits
    expected = hidden @ table.T
    print(f"{method} {group} {options}: {np.abs(found - expected).max():.1e}, deviation {expected.std():.2f}")
    assert np.abs(found - expected).max() < 1e-3 * expected.std()


def change(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    awq, _ = made(tmp_path, "awq", 32, {})
    for settings, message in (
        ({"bits": 8}, r"awq with 8 bits, groups of 32 and format 'gemm' is not supported"),
        ({"group_size": -1}, r"groups of -1 and format 'gemm' is not supported, only 4 bits, groups of \(16, 32"),
        ({"quant_method": "bitsandbytes"}, r"quantization_config\.quant_method 'bitsandbytes' is not supported"),
        ({"version": "gemv"}, r"'gemv' is not supported"),
        ({"group_size": 64}, r"has shape .*, but config\.json specifies"),
    ):
        whole = (awq / "config.json").read_text()
        with pytest.raises(UserError, match=message) as error:
            export_checkpoint(change(awq, **settings), tmp_path / "out")
        assert "\n" not in str(error.value)
        (awq / "config.json").write_text(whole)
    for precision in ("fp32", "int8"):
        with pytest.raises(UserError, match="awq weights are already in 4 bits; remove --precision"):
            export_checkpoint(awq, tmp_path / "out", precision=precision)
    assert not (tmp_path / "out").exists()
