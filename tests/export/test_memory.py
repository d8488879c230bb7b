"""What an export takes of memory: measured by itself, and below its largest layer and 1 GB on a checkpoint of gigabytes."""

from __future__ import annotations

import json
import mmap
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import TEMPLATE, make_tokenizer

from edgevlm.export import export_checkpoint
from edgevlm.export.backbones import text_backbone
from edgevlm.export.memory import PeakMemory, layer_bytes

MB = 1 << 20


def test_own_memory_is_seen_and_the_page_cache_is_not(tmp_path: Path) -> None:
    with PeakMemory() as idle:
        time.sleep(0.05)
    (tmp_path / "file").write_bytes(bytes(100 * MB))
    with (tmp_path / "file").open("rb") as stream, PeakMemory() as mapped:
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        assert int(np.frombuffer(pages, np.uint8).max()) == 0
        time.sleep(0.05)
    with PeakMemory() as own:
        held = np.ones(100 * MB, np.uint8)
        time.sleep(0.05)
    assert held.size == 100 * MB
    assert mapped.bytes < idle.bytes + 50 * MB
    assert own.bytes > idle.bytes + 90 * MB


def test_a_layer_is_counted_as_it_is_written(exported: Any, tmp_path: Path) -> None:
    made, said = exported("llava", layers=3, heads=6, kv_heads=2), []
    export_checkpoint(made.checkpoint, tmp_path / "out", notify=said.append)
    config = json.loads((made.checkpoint / "config.json").read_text())["text_config"]
    matrices = (96 * 96 * 2 + 2 * 96 * 32 + 3 * 96 * 128) * 4
    assert layer_bytes(text_backbone("qwen2").shape(config, False)) == matrices
    assert re.fullmatch(r"peak memory \d+ MB beyond the page cache, largest layer 0 MB", said[-1])


def save_large(folder: Path, layers: int) -> None:
    """A LLaVA-OneVision of a 3B model's width with SigLIP-so400m's tower, random bfloat16, in shards, a tensor at a time."""
    import transformers as t
    from safetensors.torch import save_file

    folder.mkdir()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("PLACE", "video")
    tokenizer.save_pretrained(folder)
    vision = t.SiglipVisionConfig(
        hidden_size=1152, intermediate_size=4304, num_hidden_layers=26, num_attention_heads=16, image_size=384, patch_size=14,
        vision_use_head=False,
    )  # fmt: skip
    text = t.Qwen2Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    config = t.LlavaOnevisionConfig(
        vision_config=vision, text_config=text, tie_word_embeddings=False, vision_feature_select_strategy="full",
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = t.LlavaOnevisionForConditionalGeneration(config)
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    state = model.state_dict()
    for number, (name, tensor) in enumerate(state.items()):
        shard[name] = noise.repeat(-(-tensor.numel() // len(noise)))[: tensor.numel()].reshape(tensor.shape)
        if sum(held.numel() for held in shard.values()) > 2e8 or number == len(state) - 1:
            file = f"model-{len(set(places.values())):05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(shard, file)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    frames = {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "resample": 3, "rescale_factor": 1 / 255, "size": {"height": 384, "width": 384},
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps({"video_processor": frames}))


@pytest.mark.slow
def test_a_checkpoint_of_gigabytes(tmp_path: Path) -> None:
    """Embedding and head are 1.2 GB each in a bundle, the tower 1.6 GB: none of them is held."""
    save_large(tmp_path / "checkpoint", layers=6)
    command = [sys.executable, "-m", "edgevlm", "export", tmp_path / "checkpoint", "--out", tmp_path / "bundle"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    match = re.fullmatch(r"peak memory (\d+) MB beyond the page cache, largest layer (\d+) MB\n", done.stderr)
    assert match is not None
    assert int(match[2]) == 308
    assert int(match[1]) < 308 + 1000
