"""The bench of a vision tower on a tiny one: what its lines compare."""

import json

from transformers import Qwen2Config, SiglipVisionConfig
from typer.testing import CliRunner

from edgevlm.bench import seeded
from edgevlm.bench.speed import vision
from edgevlm.cli import app


def test_both_precisions_beside_transformers(monkeypatch):
    def tiny(layers):
        config = seeded.llava_onevision_config(layers)
        config.text_config = Qwen2Config(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True)
        config.vision_config = SiglipVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2, image_size=56, patch_size=14,
            vision_use_head=False,
        )  # fmt: skip
        return config

    monkeypatch.setattr(vision, "llava_onevision_config", tiny)
    command = ["bench", "speed", "vision", "--layers", "2", "--frames", "1,3", "--rounds", "1", "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    each = [("edgevlm", "fp32"), ("edgevlm", "int8"), ("transformers", "fp32")]
    assert [(line["runtime"], line["precision"]) for line in lines] == [*(each + each[:2]) * 2, ("edgevlm", "int8")]
    assert [line["batch"] for line in lines if "ms_per_frame" in line] == [1] * 3 + [3] * 3
    assert {line["layers"] for line in lines} == {2}
    assert 0.99 < lines[-1]["cosine"] < 1
    assert 0 < lines[-1]["max_error"] < 0.5
