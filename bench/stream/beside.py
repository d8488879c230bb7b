"""``bench stream --against transformers``: the same checkpoint, frames and policy in both, a chunk and an answer in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgevlm.apps.bundles.cache import kept_bundle
from edgevlm.bench.rounds import Took, figures, quartiles, ratio
from edgevlm.bench.stream.rendition import Rendition, load
from edgevlm.bench.stream.sitting import QUESTION, Work, frames_of
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.export.checkpoint import ConfigOnly, checkpoint_folder
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.model import Model
from edgevlm.runtime.preprocess import Pixels
from edgevlm.runtime.session import Session

OURS, OTHER = "edgevlm", "transformers"
POLICY = "infinipot-v:mode=official"
BUDGET = 8  # frames, unless one is given
VISION = {"fp32": "fp32", "fp16": "fp32"}  # the tower's precision beside the decoder's; int8 beside whole numbers
PARTS = ("vision_ms", "prefill_ms", "compress_ms")


@dataclass(slots=True)
class Side:
    """What one runtime took: a frame in each chunk, and of each answer ms to the first token and ms for each further one.

    parts: milliseconds in all of PARTS, after the first chunk and after the last.
    """

    frames: list[Took] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)
    parts: list[tuple[float, ...]] = field(default_factory=list)
    compressions: int = 0

    def line(self, count: int) -> dict[str, Any]:
        """Medians of what is warm: all but the first chunk and the first answer, which have fields of their own.

        count: frames of the warm chunks. Answers that end with their first token have no rate; None without others.
        """
        spread = figures("frame", self.frames[1:])
        further = [ms for ms in self.tpot_ms[1:] if ms]
        of_parts = zip(PARTS, self.parts[0], self.parts[-1], strict=True)
        numbers = {
            "fps": 1e3 / spread["ms_per_frame"], **spread, "cold_ms_per_frame": self.frames[0].wall,
            **{name: (last - first) / count for name, first, last in of_parts},
            "ttft_ms": statistics.median(self.ttft_ms[1:]), "cold_ttft_ms": self.ttft_ms[0],
        }  # fmt: skip
        tokens = _spread(further, "tpot_ms", "tpot_low", "tpot_high")
        rate = round(1e3 / tokens["tpot_ms"], 3) if tokens["tpot_ms"] else None
        rounded = {name: round(value, 3) for name, value in numbers.items()}
        return {**rounded, "tokens_per_s": rate, **tokens, "compressions": self.compressions}


def beside(model: str, precisions: Sequence[str], attention: str, work: Work, progress: Progress) -> Iterator[dict[str, Any]]:
    """Lines of each precision and of transformers, then how many times theirs our frames and tokens a second are.

    model: a LLaVA-OneVision checkpoint's folder; its bundles are exported once and kept. work: frames (the last of ``marks``),
    chunk, budget, threads and source; its model and policy are not looked at. All runtimes are loaded at once and take turns,
    chunk by chunk. Frames are prepared once for all, outside of what is timed. Raises UserError for a checkpoint of another
    family, and for less than three chunks: one is cold, and a median wants two.
    """
    folder, frames = checkpoint_folder(model), work.marks[-1] // work.chunk * work.chunk
    if (family := ConfigOnly(folder).config.get("model_type")) != "llava_onevision":
        raise UserError(f"{model}: --against {OTHER} takes llava_onevision checkpoints, and this is {family}")
    if frames < 3 * work.chunk:
        raise UserError(f"--frames {work.marks[-1]}: give three chunks of {work.chunk} or more; the first is not counted")
    threads = work.threads or default_threads()
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        sessions = {}
        for precision in precisions:
            sessions[precision] = stack.enter_context(_session(folder, precision, work, threads, stack, progress))
        progress(f"{OTHER}: loading {folder.name}, {attention} attention")
        rendition = _rendition(load(folder, attention), next(iter(sessions.values())))
        budget = next(iter(sessions.values())).budget
        sides = _turns(sessions, rendition, frames, work, progress)
    place = {
        "bench": "stream-against", "model": folder.name, "policy": POLICY, "budget": budget, "chunk": work.chunk,
        "frames": frames, "threads": threads, "attention": attention,
    }  # fmt: skip
    for (runtime, precision), side in sides.items():
        yield {**place, **_named(runtime, precision), **side.line(frames - work.chunk)}
    theirs = sides[OTHER, "fp32"]
    for precision in precisions:
        yield {**place, **_named(OURS, precision), "against": OTHER, **_ratios(sides[OURS, precision], theirs)}


def _named(runtime: str, precision: str) -> dict[str, str]:
    return {"runtime": runtime, "precision": precision, "vision_precision": VISION.get(precision, "int8")}


def _session(folder: Path, precision: str, work: Work, threads: int, stack: ExitStack, progress: Progress) -> Session:
    vision = VISION.get(precision, "int8")
    progress(f"{OURS}: {precision} weights, {vision} tower")
    bundle = kept_bundle(folder, progress, progress, precision=precision, vision_precision=vision)
    model = Model.load(bundle, threads=threads)
    stack.callback(model.close)
    budget = work.budget or BUDGET * model.bundle.vision.tokens_per_frame
    return Session.open(model, policy=POLICY, budget=budget, chunk=work.chunk)


def _rendition(model: Any, session: Session) -> Rendition:
    """Of the session's prefix and budget."""
    bundle = session.model.bundle
    prefix = session.model.encode(session._chat.prefix)
    per_frame, grid = bundle.vision.tokens_per_frame, bundle.vision.grid
    return Rendition(model, prefix, session.budget, per_frame, grid[0], bundle.chat.stop_ids)


def _turns(
    sessions: dict[str, Session], rendition: Rendition, frames: int, work: Work, progress: Progress
) -> dict[tuple[str, str], Side]:
    """Everybody watches a chunk, then everybody is asked, chunk by chunk. By runtime and precision."""
    ours = {(OURS, precision): (session, Side()) for precision, session in sessions.items()}
    theirs, source = Side(), frames_of(work)
    first = next(iter(sessions.values()))
    ids, most = first._conversations.prompt(None, QUESTION), min(work.answer_tokens, first.text_budget.answer)
    for number in range(frames // work.chunk):
        progress(f"chunk {number + 1} of {frames // work.chunk}")
        pixels = [_prepared(first, source) for _ in range(work.chunk)]
        tensor = torch.from_numpy(np.stack([frame.values for frame in pixels]))
        for session, side in ours.values():
            side.frames.append(_took(partial(_watch, session, pixels), work.chunk))
            side.parts.append((session.stats.encode_ms, session.stats.memory.prefill_ms, _compress_ms(session)))
            side.compressions = session.stats.memory.compressions
        theirs.frames.append(_took(partial(rendition.watch, tensor), work.chunk))
        theirs.parts.append(tuple(getattr(rendition.parts, name) for name in PARTS))
        for session, side in ours.values():
            answer = session.ask(QUESTION, max_tokens=most)
            answer.wait()
            _answered(side, (answer.token_ids, answer.ttft_ms, answer.tpot_ms))
        _answered(theirs, rendition.ask(ids, most))
    theirs.compressions = rendition.compressions
    return {**{key: side for key, (_, side) in ours.items()}, (OTHER, "fp32"): theirs}


def _prepared(session: Session, source: Iterator[Any]) -> Pixels:
    frame, _ = next(source)
    return session.prepare(frame.image) if frame.pixels is None else frame.pixels


def _watch(session: Session, pixels: Sequence[Pixels]) -> None:
    for frame in pixels:
        session.watch(frame)


def _compress_ms(session: Session) -> float:
    """With keys turned to dense positions, as the rendition counts them."""
    return session.stats.memory.compress_ms + session.stats.memory.reindex_ms


def _answered(side: Side, answer: tuple[list[int], float, float]) -> None:
    side.said.append(answer[0])
    side.ttft_ms.append(answer[1])
    side.tpot_ms.append(answer[2])


def _took(run: Callable[[], object], count: int) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Took(1e3 * wall / count, 1e3 * cpu / count)


def _ratios(ours: Side, theirs: Side) -> dict[str, Any]:
    """How many times theirs ours are, medians of the warm rounds' ratios with quartiles. cpu_ratio: of the processor's time."""
    slower = ratio(theirs.frames[1:], ours.frames[1:])
    pairs = zip(ours.tpot_ms[1:], theirs.tpot_ms[1:], strict=True)
    tokens = _spread([their / our for our, their in pairs if our and their], "tokens_ratio", "tokens_low", "tokens_high")
    same = sum(one == other for one, other in zip(ours.said, theirs.said, strict=True))
    return {
        "fps_ratio": slower["ratio"], "low": slower["low"], "high": slower["high"], "cpu_ratio": slower["cpu_ratio"],
        **tokens, "answers": len(ours.said), "same_answers": same,
    }  # fmt: skip


def _spread(values: Sequence[float], median: str, low: str, high: str) -> dict[str, float | None]:
    """Median and quartiles under these names; None without values."""
    found = quartiles(values) if values else (None, None, None)
    return {name: None if x is None else round(x, 3) for name, x in zip((low, median, high), found, strict=True)}
