"""An export's memory stays below its largest layer and 1 GB on a checkpoint of gigabytes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from checkpoints import TEMPLATE, make_tokenizer


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
    peak = 0
    with subprocess.Popen(command) as child:
        while child.poll() is None:
            peak = max(peak, anonymous(child.pid))
            time.sleep(0.05)
    assert child.returncode == 0
    assert 308e6 < peak < 308e6 + 1e9


def anonymous(pid: int) -> int:
    """Bytes of a process beyond the page cache, 0 once it has ended."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(memory.rss - memory.shared)
