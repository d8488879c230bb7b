"""Write the tables that `edgevlm plan` predicts into the documents, between ``<!-- plan: NAME -->`` and ``<!-- /plan -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from edgevlm.apps.planning.formulas import Roofline
from edgevlm.apps.planning.model import PlannedModel, planned, published_facts
from edgevlm.apps.planning.plan import CAMERA, DevicePlan, PlanRequest, checkpoints, choose, figure, size
from edgevlm.engines.devices import load_device

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "docs/guide/models.md", "docs/internals/plan.md")]
ORINS = {"Orin Nano 8 GB": "orin-nano-8", "Orin NX 16 GB": "orin-nx-16", "AGX Orin 64 GB": "orin-agx-64"}
PCS = {"small PC": "small-pc", "laptop": "laptop"}
SHOWN = {"LLaVA-OneVision-0.5B": "llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "Qwen2.5-VL-3B": "Qwen/Qwen2.5-VL-3B-Instruct"}
MARKED = re.compile(r"(<!-- plan: ([\w-]+) -->\n)(.*?)(<!-- /plan -->)", re.DOTALL)


def int4(name: str, device: str) -> DevicePlan:
    """As ``--precision int4 --kv fp16 --budget 6k --fps 2``."""
    model = next(checkpoint.model for checkpoint in checkpoints() if checkpoint.name == name)
    return choose(model, load_device(device), PlanRequest("", device, 6000, "int4", "fp16", camera=CAMERA))


def machines() -> list[str]:
    """Checkpoints by devices: frames a second, memory and the weights chosen."""
    found = {heading: load_device(name) for heading, name in {**ORINS, **PCS}.items()}
    lines = ["| model | licence | size | " + " | ".join(found) + " |", "|---" * (3 + len(found)) + "|"]
    for checkpoint in checkpoints():
        cells = []
        for device in found.values():
            plan = choose(checkpoint.model, device, PlanRequest("", fps=2.0))
            rate = f"**{figure(plan.speed.prefill_fps)}**" if plan.keeps_up else figure(plan.speed.prefill_fps)
            fitting = f"{rate} ({plan.roofline.precision}, {plan.memory.total / 1e9:.1f} GB)"
            cells.append(fitting if plan.fits else "does not fit")
        facts = (f"`{checkpoint.name}`", checkpoint.licence, size(checkpoint.parameters))
        lines.append(f"| {' | '.join([*facts, *cells])} |")
    return lines


def readme() -> list[str]:
    lines = [f"| model | {' | '.join(ORINS)} |", "|---" * (1 + len(ORINS)) + "|"]
    for title, name in SHOWN.items():
        plans = [int4(name, device) for device in ORINS.values()]
        rates = " | ".join(figure(plan.speed.prefill_fps) for plan in plans)
        lines.append(f"| {title}, {plans[0].memory.total / 1e9:.1f} GB | {rates} |")
    return lines


def devices() -> list[str]:
    heads = (
        "",
        "device",
        "weights",
        "kv",
        "all",
        "fits",
        "frames/s",
        "tokens/s",
        "J a frame",
        "bound by",
        "largest budget",
        "build peak",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for title, name in SHOWN.items():
        for device in ORINS.values():
            found = int4(name, device).line()
            sizes = [f"{found[part]:,.0f}" for part in ("weights_mb", "kv_mb", "total_mb")]
            rates = [figure(found[part]) for part in ("prefill_fps", "tokens_per_s", "j_per_frame")]
            rest = [found["bound_by"], f"{found['largest_budget']:,}", f"{found['build_peak_mb']:,.0f}"]
            cells = [title, device, *sizes, "yes" if found["fits"] else "no", *rates, *rest]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


IMAGE_TOKENS, PROMPT = 265, 292
EDGE_LLM = (  # TensorRT Edge-LLM 0.9, INT4: device, model, ms of the tower, ms of the prefill, tokens a second
    ("orin-agx-64", "Qwen3-VL-2B", 39.0, 50.0, 98.4),
    ("orin-agx-64", "Qwen3-VL-4B", 39.3, 123.7, 52.4),
    ("orin-agx-64", "Qwen3-VL-8B", 57.2, 225.1, 32.3),
    ("orin-nx-16", "Qwen3-VL-2B", 82.1, 103.1, 60.1),
    ("orin-nx-16", "Qwen3-VL-4B", 83.7, 244.6, 31.2),
    ("orin-nano-8", "Qwen3-VL-2B", 151.1, 190.9, 36.9),
)
INFINIPOT_TOKENS_PER_S, INFINIPOT_GB, INFINIPOT_BUDGET = 9.2, 9.2, 6000  # arXiv 2506.15745, eager PyTorch on an AGX Orin


def qwen(name: str) -> PlannedModel:
    """A Qwen model as published, for frames of 640 x 480 pixels."""
    config = next(fact["config"] for fact in published_facts() if fact["id"] == f"Qwen/{name}-Instruct")
    return planned(name, config, lambda factor, budget, clip: (480 // factor * factor, 640 // factor * factor))


def published() -> list[str]:
    """Published figures beside the plan's; no constant of the plan comes from them."""
    rows: list[tuple[str, str, str, float, float]] = []
    for place, name, tower_ms, prefill_ms, tokens in EDGE_LLM:
        model = qwen(name)
        grid = {"tokens": IMAGE_TOKENS, "projected": IMAGE_TOKENS, "patches": 4 * IMAGE_TOKENS, "attended": 4.0 * IMAGE_TOKENS}
        roofline = Roofline(replace(model, tower=replace(model.tower, **grid)), load_device(place), "int4", "fp16")
        rows.append((place, name, "tower ms", tower_ms, 1e3 * roofline.vision().seconds))
        rows.append((place, name, "prefill ms", prefill_ms, 1e3 * roofline.prefill(PROMPT, 0, logits=True).seconds))
        rows.append((place, name, "tokens/s", tokens, 1 / roofline.token(PROMPT).seconds))
    model, device = qwen("Qwen2.5-VL-3B"), load_device("orin-agx-64")
    roofline = Roofline(model, device, "fp16", "fp16")
    rate, memory = 1 / roofline.token(INFINIPOT_BUDGET).seconds, roofline.memory(INFINIPOT_BUDGET, 8)
    rows.append((device.name, model.name, "tokens/s", INFINIPOT_TOKENS_PER_S, rate))
    rows.append((device.name, model.name, "GB", INFINIPOT_GB, memory.total / 1e9))
    lines = ["| device | model | figure | published | planned | error |", "|---|---|---|---|---|---|"]
    for *names, theirs, ours in rows:
        lines.append(f"| {' | '.join(names)} | {theirs:g} | {ours:.1f} | {100 * (ours / theirs - 1):+.0f} % |")
    return lines


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "machines": machines, "readme": readme, "devices": devices, "published": published,
}  # fmt: skip


def filled(text: str) -> str:
    """A document with its tables made again."""
    return MARKED.sub(lambda found: found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[4], text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
