"""What was published of Orins, beside what the plan says of the same models: no constant of the plan comes from a row here.

TensorRT Edge-LLM 0.9: INT4 weights (nvidia.github.io/TensorRT-Edge-LLM, performance benchmarks); milliseconds of the tower for
265 image tokens, of a prefill of 292, and tokens a second. InfiniPot-V (arXiv 2506.15745): Qwen2.5-VL-3B in eager PyTorch on an
AGX Orin. It says neither its power mode nor its frames' tokens here, so its frames a second are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgevlm.apps.planning.memory import memory_of
from edgevlm.apps.planning.model import PlannedModel, planned
from edgevlm.apps.planning.speed import Roofline
from edgevlm.engines.devices import load_device

IMAGE_TOKENS, PROMPT = 265, 292
SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
QWEN3 = {  # hidden, layers, query heads, MLP's width, tied, tower
    "Qwen3-VL-2B": (2048, 28, 16, 6144, True, SMALL_TOWER),
    "Qwen3-VL-4B": (2560, 36, 32, 9728, True, SMALL_TOWER),
    "Qwen3-VL-8B": (4096, 36, 32, 12288, False, LARGE_TOWER),
}
EDGE_LLM = (  # device, model, ms of the tower, ms of the prefill, tokens a second
    ("orin-agx-64", "Qwen3-VL-2B", 39.0, 50.0, 98.4),
    ("orin-agx-64", "Qwen3-VL-4B", 39.3, 123.7, 52.4),
    ("orin-agx-64", "Qwen3-VL-8B", 57.2, 225.1, 32.3),
    ("orin-nx-16", "Qwen3-VL-2B", 82.1, 103.1, 60.1),
    ("orin-nx-16", "Qwen3-VL-4B", 83.7, 244.6, 31.2),
    ("orin-nano-8", "Qwen3-VL-2B", 151.1, 190.9, 36.9),
)
INFINIPOT_TOKENS_PER_S, INFINIPOT_GB, INFINIPOT_BUDGET = 9.2, (9.2, 11.3), 6000


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure and the plan's."""

    device: str
    model: str
    figure: str
    published: float
    planned: float

    @property
    def error(self) -> float:
        """(planned - published) / published."""
        return self.planned / self.published - 1

    def line(self) -> dict[str, Any]:
        return {
            "device": self.device, "model": self.model, "figure": self.figure, "published": self.published,
            "planned": round(self.planned, 1), "error": round(self.error, 3),
        }  # fmt: skip

    def __str__(self) -> str:
        figures = f"{self.published:>10.1f}{self.planned:>10.1f}{100 * self.error:>+8.0f} %"
        return f"{self.device:<13}{self.model:<15}{self.figure:<14}{figures}"


def rows() -> Iterator[Row]:
    """Every figure, in the order published."""
    for place, name, tower_ms, prefill_ms, tokens in EDGE_LLM:
        roofline = Roofline(qwen3(name), load_device(place), "int4", "fp16")
        yield Row(place, name, "tower ms", tower_ms, 1e3 * roofline.vision().seconds)
        yield Row(place, name, "prefill ms", prefill_ms, 1e3 * roofline.prefill(PROMPT, 0, logits=True).seconds)
        yield Row(place, name, "tokens/s", tokens, 1 / roofline.token(PROMPT).seconds)
    model, device = qwen2_5_3b(), load_device("orin-agx-64")
    roofline = Roofline(model, device, "fp16", "fp16")
    memory = memory_of(model, device, "fp16", "fp16", INFINIPOT_BUDGET, 8)
    yield Row(device.name, model.name, "tokens/s", INFINIPOT_TOKENS_PER_S, 1 / roofline.token(INFINIPOT_BUDGET).seconds)
    yield Row(device.name, model.name, "GB", INFINIPOT_GB[0], memory.total / 1e9)


def qwen3(name: str) -> PlannedModel:
    """A Qwen3-VL model as published, its grid of IMAGE_TOKENS tokens."""
    hidden, layers, heads, inner, tied, tower = QWEN3[name]
    text = {
        "model_type": "qwen3_vl_text", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": inner, "vocab_size": 151936,
        "max_position_embeddings": 262144, "rope_parameters": {"rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    }  # fmt: skip
    vision = {
        **tower, "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 2304, "out_hidden_size": hidden,
    }  # fmt: skip
    model = _model(name, "qwen3_vl", text, vision, tied)
    seen = replace(
        model.tower, tokens=IMAGE_TOKENS, projected=IMAGE_TOKENS, patches=4 * IMAGE_TOKENS, attended=4.0 * IMAGE_TOKENS
    )
    return replace(model, tower=seen)


def qwen2_5_3b() -> PlannedModel:
    """Qwen2.5-VL-3B as published, for frames of 640 x 480 pixels."""
    text = {
        "model_type": "qwen2_5_vl_text", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936, "max_position_embeddings": 128000,
        "rope_parameters": {"rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 2048, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    }  # fmt: skip
    return _model("Qwen2.5-VL-3B", "qwen2_5_vl", text, vision, True)


def _model(name: str, family: str, text: Mapping[str, Any], vision: Mapping[str, Any], tied: bool) -> PlannedModel:
    config = {"model_type": family, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    return planned(name, config, lambda factor, budget, clip: (480 // factor * factor, 640 // factor * factor))
