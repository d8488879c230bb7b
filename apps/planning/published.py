"""What was published of Orins, beside what the plan says of the same models: no constant of the plan comes from a row here.

TensorRT Edge-LLM 0.9: INT4 weights (nvidia.github.io/TensorRT-Edge-LLM, performance benchmarks); milliseconds of the tower for
265 image tokens, of a prefill of 292, and tokens a second. InfiniPot-V (arXiv 2506.15745): Qwen2.5-VL-3B in eager PyTorch on an
AGX Orin. It says neither its power mode nor its frames' tokens here, so its frames a second are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from edgevlm.apps.planning.memory import memory_of
from edgevlm.apps.planning.model import PlannedModel, planned, published_config
from edgevlm.apps.planning.speed import Roofline
from edgevlm.engines.devices import load_device

IMAGE_TOKENS, PROMPT = 265, 292
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
    model, device = qwen("Qwen2.5-VL-3B"), load_device("orin-agx-64")
    roofline = Roofline(model, device, "fp16", "fp16")
    memory = memory_of(model, device, "fp16", "fp16", INFINIPOT_BUDGET, 8)
    yield Row(device.name, model.name, "tokens/s", INFINIPOT_TOKENS_PER_S, 1 / roofline.token(INFINIPOT_BUDGET).seconds)
    yield Row(device.name, model.name, "GB", INFINIPOT_GB[0], memory.total / 1e9)


def qwen3(name: str) -> PlannedModel:
    """A Qwen3-VL model as published, its grid of IMAGE_TOKENS tokens."""
    model = qwen(name)
    seen = replace(
        model.tower, tokens=IMAGE_TOKENS, projected=IMAGE_TOKENS, patches=4 * IMAGE_TOKENS, attended=4.0 * IMAGE_TOKENS
    )
    return replace(model, tower=seen)


def qwen(name: str) -> PlannedModel:
    """A Qwen model as published, for frames of 640 x 480 pixels."""
    config = published_config(f"Qwen/{name}-Instruct")
    return planned(name, config, lambda factor, budget, clip: (480 // factor * factor, 640 // factor * factor))
