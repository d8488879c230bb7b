"""Compare edgevlm with transformers on a stream, with the same checkpoint, frames, policy and budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from edgevlm.apps.bundles.cache import cached_bundle
from edgevlm.bench.models import SEEDED, open_checkpoint
from edgevlm.bench.stream.growth import ANSWER_TOKENS, QUESTION
from edgevlm.bench.stream.torch_baseline import TorchBaseline, load
from edgevlm.bench.timing import Job, Took, figures, parts_ms, ratio, spread, time_job, watching
from edgevlm.calib.demo.world import World
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.checkpoint import ConfigOnly
from edgevlm.progress import show
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL

OURS, OTHER = "edgevlm", "transformers"
POLICY = "infinipot-v"
BUDGET = 8  # default budget, in frames
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VISION = {"fp32": "fp32", "fp16": "fp32", "bf16": "bf16"}  # the decoder's precision -> the tower's; int8 for all others


@dataclass(slots=True)
class Side:
    """One runtime's times in ms, for each chunk and each answer. ``parts``: after each chunk, the total ms of each stage."""

    frames: list[Took] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    def line(self, count: int) -> dict[str, Any]:
        """Return medians without the first chunk and the first answer, which are reported in separate fields.

        ``count``: the number of frames after the first chunk. The token rate is None if every answer ended with its first
        token.
        """
        frame, (first, last) = figures("frame", self.frames[1:]), (self.parts[0], self.parts[-1])
        tokens = spread((ms for ms in self.tpot_ms[1:] if ms), "tpot_ms", "tpot_low", "tpot_high")
        return {
            "fps": round(1e3 / frame["ms_per_frame"], 3), **frame, "cold_ms_per_frame": round(self.frames[0].wall, 3),
            **{name: round((last[name] - first[name]) / count, 3) for name in last},
            "ttft_ms": round(float(np.median(self.ttft_ms[1:])), 3), "cold_ttft_ms": round(self.ttft_ms[0], 3),
            "tokens_per_s": round(1e3 / tokens["tpot_ms"], 3) if tokens["tpot_ms"] else None, **tokens,
        }  # fmt: skip


def against(
    model: str = SEEDED,
    budget: int | None = None,
    frames: int = 24,
    chunk: int = 4,
    precisions: Sequence[str] = ("fp32", "int8", "int4"),
    theirs: str = "fp32",
    threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a line for each precision, a line for transformers in precision ``theirs``, and the ratios of our rates to theirs.

    ``model``: a LLaVA-OneVision checkpoint, by default one of the 0.5B shape with random weights. All runtimes are loaded
    together and take turns, chunk by chunk. Frames are prepared once for all runtimes, untimed. Raises UserError for a
    checkpoint of a family other than LLaVA-OneVision, for ``theirs`` other than fp32 and bf16, and for fewer than three chunks.
    """
    count, threads = frames // chunk, threads or default_threads()
    if count < 3:
        raise UserError(f"--frames {frames}: set at least three chunks of {chunk}; the first is not counted")
    if theirs not in DTYPES:
        raise UserError(f"--theirs {theirs}: choose from {', '.join(DTYPES)}")
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        folder, temporary = stack.enter_context(open_checkpoint(model, None))
        sessions = {}
        for precision in precisions:
            vision = VISION.get(precision, "int8")
            show(f"{OURS}: {precision} weights, {vision} tower")
            if model == SEEDED:
                bundle = export_checkpoint(folder, temporary / precision, precision=precision, vision_precision=vision)
            else:
                bundle = cached_bundle(folder, show, show, precision=precision, vision_precision=vision)
            loaded = Model.load(bundle, threads=threads)
            stack.callback(loaded.close)
            tokens = budget or BUDGET * loaded.bundle.vision.tokens_per_frame
            session = Session.open(loaded, policy=POLICY, budget=tokens, chunk=chunk, append=ALL, encode=ALL)
            sessions[precision] = stack.enter_context(session)
        show(f"{OTHER}: loading {folder.name}")
        first = next(iter(sessions.values()))
        *ours, other = _turns(sessions, baseline_of(load(folder, "sdpa", DTYPES[theirs]), first), count, chunk)
        place = {
            "bench": "stream-against", "model": ConfigOnly(folder).name, "policy": POLICY, "budget": first.budget,
            "chunk": chunk, "frames": count * chunk, "threads": threads,
        }  # fmt: skip
    named = [
        {**place, "runtime": runtime, "precision": precision, "vision_precision": VISION.get(precision, "int8")}
        for runtime, precision in [*((OURS, precision) for precision in sessions), (OTHER, theirs)]
    ]
    for line, side in zip(named, [*ours, other], strict=True):
        yield {**line, **side.line((count - 1) * chunk)}
    for line, side in zip(named, ours, strict=False):
        pairs = zip(side.tpot_ms[1:], other.tpot_ms[1:], strict=True)
        rates = spread((their / our for our, their in pairs if our and their), "tokens_ratio", "tokens_low", "tokens_high")
        yield {**line, "against": OTHER, **ratio(other.frames[1:], side.frames[1:], "fps_ratio"), **rates}


def baseline_of(model: Any, session: Session) -> TorchBaseline:
    bundle = session.model.bundle
    prefix = session._chat.prefix
    return TorchBaseline(model, prefix, session.budget, bundle.vision.tokens_per_frame, bundle.chat.stop_ids)


def _turns(sessions: dict[str, Session], baseline: TorchBaseline, chunks: int, size: int) -> list[Side]:
    """Show each chunk to all runtimes and ask each a question. Return each runtime's times, with the baseline's last."""
    ours = [(session, Side()) for session in sessions.values()]
    theirs, world = Side(), World(0)
    first = next(iter(sessions.values()))
    ids, most = first._memory.conversations.prompt(None, QUESTION), min(ANSWER_TOKENS, first.text_budget.answer)
    for number in range(chunks):
        show(f"chunk {number + 1} of {chunks}")
        pixels = [first.prepare(world.step()) for _ in range(size)]
        tensor = torch.from_numpy(np.stack([frame.values for frame in pixels]))
        for session, side in ours:
            side.frames.append(time_job(watching(session, pixels)))
            side.parts.append(parts_ms(session))
        theirs.frames.append(time_job(Job(partial(baseline.watch, tensor), size)))
        theirs.parts.append(dict(baseline.parts_ms))
        for session, side in ours:
            answer = session.ask(QUESTION, max_tokens=most)
            answer.wait()
            side.ttft_ms.append(answer.ttft_ms)
            side.tpot_ms.append(answer.tpot_ms)
        _, ttft_ms, tpot_ms = baseline.ask(ids, most)
        theirs.ttft_ms.append(ttft_ms)
        theirs.tpot_ms.append(tpot_ms)
    return [*(side for _, side in ours), theirs]
