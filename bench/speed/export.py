"""An export beside one by tracing: transformers loads the same checkpoint, and torch traces its tower alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgevlm.apps.planning.model import plan_checkpoint
from edgevlm.bench.models import SEEDED, open_checkpoint
from edgevlm.bench.process import run_module, serve
from edgevlm.export.memory import FLOAT, PeakMemory
from edgevlm.packages import needs
from edgevlm.progress import Notify

OURS, OTHER = "edgevlm", "transformers"


def export(
    model: Sequence[str] = (SEEDED,),
    precisions: Sequence[str] = ("fp32",),
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Lines of each precision and of tracing, then how much of tracing's time an export takes.

    ``model``: a LLaVA-OneVision checkpoint, by default one of its 0.5B shape with random weights. Each is a process of its own,
    from its first import on. Tracing stops at the tower, so that its decoder and tokenizer cost nothing.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="edgevlm-bench-")))
        checkpoint = open_checkpoint(model[0], folder, progress)
        planned = plan_checkpoint(checkpoint, (384, 384))
        place = {"bench": "speed-export", "model": planned.name, "layer_mb": FLOAT * planned.matrices / planned.layers / 1e6}
        took = {}
        for runtime, precision in [*((OURS, precision) for precision in precisions), (OTHER, "fp32")]:
            progress(f"{runtime}: {precision} weights")
            work = {"runtime": runtime, "checkpoint": str(checkpoint), "out": str(folder / precision), "precision": precision}
            (line,) = run_module(__name__, work)
            took[runtime, precision] = line
            yield place | {"runtime": runtime, "precision": precision} | line
        for precision in precisions:
            ours, theirs = took[OURS, precision], took[OTHER, "fp32"]
            compared = {"ratio": ours["export_s"] / theirs["export_s"], "cpu_ratio": ours["cpu_s"] / theirs["cpu_s"]}
            yield place | {"runtime": OURS, "precision": precision, "against": OTHER} | compared


def measure(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Export or trace in this process; processor time counts from its start."""
    begin = time.perf_counter()
    with PeakMemory() as memory:
        if work["runtime"] == OURS:
            from edgevlm.export import export_checkpoint

            export_checkpoint(work["checkpoint"], work["out"], precision=work["precision"])
        else:
            trace_tower(work["checkpoint"], f"{work['out']}.onnx")
    yield {"export_s": time.perf_counter() - begin, "cpu_s": time.process_time(), "peak_mb": memory.bytes / 1e6}


def trace_tower(checkpoint: str, out: str) -> None:
    """Load a checkpoint in float32 and write its tower, traced."""
    with needs("tracing an export"):
        import torch
        from transformers import LlavaOnevisionForConditionalGeneration

    model = LlavaOnevisionForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    side = model.config.vision_config.image_size
    with torch.no_grad():
        torch.onnx.export(model.model.vision_tower, (torch.zeros(1, 3, side, side),), out, dynamo=False)


if __name__ == "__main__":
    serve(measure)
