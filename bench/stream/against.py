"""A stream beside transformers: the same checkpoint, frames and policy in both, a chunk and an answer in turn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from edgevlm.apps.bundles.cache import cached_bundle
from edgevlm.bench.models import SEEDED, open_checkpoint
from edgevlm.bench.stream.growth import QUESTION, GrowthWork
from edgevlm.bench.stream.official import OfficialInfiniPotV
from edgevlm.bench.stream.torch_baseline import TorchBaseline, load
from edgevlm.bench.timing import Job, Took, figures, ratio, spread, time_job
from edgevlm.calib.demo.world import World
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.checkpoint import ConfigOnly
from edgevlm.progress import Notify
from edgevlm.runtime.model import Model
from edgevlm.runtime.preprocess import Pixels
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL

OURS, OTHER = "edgevlm", "transformers"
POLICY = OfficialInfiniPotV.name
BUDGET = 8  # frames, unless one is given
VISION = {"fp32": "fp32", "fp16": "fp32"}  # the tower's precision beside the decoder's; int8 beside integers
PARTS = ("vision_ms", "prefill_ms", "compress_ms")


@dataclass(slots=True)
class Side:
    """What one runtime took: a frame of each chunk, and of each answer ms to the first token and ms for each further one.

    ``parts``: milliseconds of PARTS so far, after each chunk.
    """

    frames: list[Took] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)
    parts: list[tuple[float, ...]] = field(default_factory=list)
    compressions: int = 0

    def answered(self, token_ids: list[int], ttft_ms: float, tpot_ms: float) -> None:
        self.said.append(token_ids)
        self.ttft_ms.append(ttft_ms)
        self.tpot_ms.append(tpot_ms)

    def line(self, count: int) -> dict[str, Any]:
        """Medians of what is warm; the first chunk and the first answer have fields of their own.

        ``count``: frames of the warm chunks. Answers that end with their first token have no rate; None without others.
        """
        frame = figures("frame", self.frames[1:])
        tokens = spread([ms for ms in self.tpot_ms[1:] if ms], "tpot_ms", "tpot_low", "tpot_high")
        of_parts = zip(PARTS, self.parts[0], self.parts[-1], strict=True)
        numbers = {
            "fps": 1e3 / frame["ms_per_frame"], **frame, "cold_ms_per_frame": self.frames[0].wall,
            **{name: (last - first) / count for name, first, last in of_parts},
            "ttft_ms": statistics.median(self.ttft_ms[1:]), "cold_ttft_ms": self.ttft_ms[0],
        }  # fmt: skip
        rate = round(1e3 / tokens["tpot_ms"], 3) if tokens["tpot_ms"] else None
        rounded = {name: round(value, 3) for name, value in numbers.items()}
        return {**rounded, "tokens_per_s": rate, **tokens, "compressions": self.compressions}


def against(
    model: Sequence[str] = (SEEDED,),
    budget: int | None = None,
    frames: Sequence[int] = (24,),
    chunk: Sequence[int] = (4,),
    answer_tokens: int = 16,
    precisions: Sequence[str] = ("fp32", "int8", "int4"),
    attention: str = "sdpa",
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Lines of each precision and of transformers in float32, then how many times theirs our frames and tokens a second are.

    ``model``: a LLaVA-OneVision checkpoint, by default one of its 0.5B shape with random weights. All runtimes are loaded at
    once and take turns, chunk by chunk; frames are prepared once for all, outside of what is timed. Raises UserError for a
    checkpoint of another family, and for less than three chunks: one is cold, and a median wants two.
    """
    work = GrowthWork(model[0], POLICY, budget, chunk[0], tuple(frames), 2.0, 0, answer_tokens, threads)
    count, threads = work.marks[-1] // work.chunk * work.chunk, threads or default_threads()
    if attention not in ("sdpa", "eager"):
        raise UserError(f"--attention {attention}: there is sdpa, eager")
    if count < 3 * work.chunk:
        raise UserError(f"--frames {work.marks[-1]}: give three chunks of {work.chunk} or more; the first is not counted")
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        folder, temporary = stack.enter_context(open_checkpoint(work.model, None, progress))
        sessions = {}
        for precision in precisions:
            vision = VISION.get(precision, "int8")
            progress(f"{OURS}: {precision} weights, {vision} tower")
            if work.model == SEEDED:
                bundle = export_checkpoint(folder, temporary / precision, precision=precision, vision_precision=vision)
            else:
                bundle = cached_bundle(folder, progress, progress, precision=precision, vision_precision=vision)
            loaded = Model.load(bundle, threads=threads)
            stack.callback(loaded.close)
            tokens = budget or BUDGET * loaded.bundle.vision.tokens_per_frame
            session = Session.open(loaded, policy=OfficialInfiniPotV(), budget=tokens, chunk=work.chunk, append=ALL)
            sessions[precision] = stack.enter_context(session)
        progress(f"{OTHER}: loading {folder.name}, {attention} attention")
        first = next(iter(sessions.values()))
        baseline = baseline_of(load(folder, attention), first)
        sides = _turns(sessions, baseline, count, work, progress)
        place = {
            "bench": "stream-against", "model": ConfigOnly(folder).name, "policy": POLICY, "budget": first.budget,
            "chunk": work.chunk,
            "frames": count, "threads": threads, "attention": attention,
        }  # fmt: skip
    for (runtime, precision), side in sides.items():
        yield {**place, **_named(runtime, precision), **side.line(count - work.chunk)}
    for precision in precisions:
        compared = ratios(sides[OURS, precision], sides[OTHER, "fp32"])
        yield {**place, **_named(OURS, precision), "against": OTHER, **compared}


def _named(runtime: str, precision: str) -> dict[str, str]:
    return {"runtime": runtime, "precision": precision, "vision_precision": VISION.get(precision, "int8")}


def baseline_of(model: Any, session: Session) -> TorchBaseline:
    """The baseline with a session's prefix and budget."""
    bundle = session.model.bundle
    prefix = session.model.encode(session._chat.prefix)
    return TorchBaseline(model, prefix, session.budget, bundle.vision.tokens_per_frame, bundle.chat.stop_ids)


def _turns(
    sessions: dict[str, Session], baseline: TorchBaseline, frames: int, work: GrowthWork, progress: Notify
) -> dict[tuple[str, str], Side]:
    """All watch a chunk, then all are asked, chunk by chunk; by runtime and precision."""
    ours = {(OURS, precision): (session, Side()) for precision, session in sessions.items()}
    theirs, world = Side(), World(0)
    first = next(iter(sessions.values()))
    ids, most = first._memory.conversations.prompt(None, QUESTION), min(work.answer_tokens, first.text_budget.answer)
    for number in range(frames // work.chunk):
        progress(f"chunk {number + 1} of {frames // work.chunk}")
        pixels = [first.prepare(world.step()) for _ in range(work.chunk)]
        tensor = torch.from_numpy(np.stack([frame.values for frame in pixels]))
        for session, side in ours.values():
            side.frames.append(time_job(Job(partial(_watch, session, pixels), work.chunk)))
            memory = session.stats.memory
            side.parts.append((session.stats.encode_ms, memory.prefill_ms, memory.compress_ms))
            side.compressions = memory.compressions
        theirs.frames.append(time_job(Job(partial(baseline.watch, tensor), work.chunk)))
        theirs.parts.append(tuple(baseline.parts_ms.values()))
        for session, side in ours.values():
            answer = session.ask(QUESTION, max_tokens=most)
            answer.wait()
            side.answered(answer.token_ids, answer.ttft_ms, answer.tpot_ms)
        theirs.answered(*baseline.ask(ids, most))
    theirs.compressions = baseline.compressions
    return {**{key: side for key, (_, side) in ours.items()}, (OTHER, "fp32"): theirs}


def _watch(session: Session, pixels: Sequence[Pixels]) -> None:
    for frame in pixels:
        session.watch(frame)


def ratios(ours: Side, theirs: Side) -> dict[str, Any]:
    """How many times theirs ours are: medians of the warm rounds' ratios with quartiles; ``cpu_ratio`` of processor time."""
    slower = ratio(theirs.frames[1:], ours.frames[1:])
    tokens = [their / our for our, their in zip(ours.tpot_ms[1:], theirs.tpot_ms[1:], strict=True) if our and their]
    same = sum(one == other for one, other in zip(ours.said, theirs.said, strict=True))
    return {
        "fps_ratio": slower["ratio"], "low": slower["low"], "high": slower["high"], "cpu_ratio": slower["cpu_ratio"],
        **spread(tokens, "tokens_ratio", "tokens_low", "tokens_high"), "answers": len(ours.said), "same_answers": same,
    }  # fmt: skip
