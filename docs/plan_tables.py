"""Write the tables that `edgevlm plan` predicts into the documents, between ``<!-- plan: NAME -->`` and ``<!-- /plan -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from edgevlm.apps.planning.catalogue import CAMERA, checkpoints, table
from edgevlm.apps.planning.plan import DevicePlan, PlanRequest, choose, figure
from edgevlm.apps.planning.published import rows
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
    return table({heading: load_device(name) for heading, name in {**ORINS, **PCS}.items()})


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


def published() -> list[str]:
    lines = ["| device | model | figure | published | planned | error |", "|---|---|---|---|---|---|"]
    for row in rows():
        numbers = f"{row.published:g} | {row.planned:.1f} | {100 * row.error:+.0f} %"
        lines.append(f"| {row.device} | {row.model} | {row.figure} | {numbers} |")
    return lines


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "machines": machines, "readme": readme, "devices": devices, "published": published,
}  # fmt: skip


def filled(text: str) -> str:
    """A document with its tables made anew."""
    return MARKED.sub(lambda found: found[1] + "\n".join(TABLES[found[2]]()) + "\n" + found[4], text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
