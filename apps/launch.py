"""From options to a run: check them, open model, source and session, choose the output."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edgevlm.apps.bundles.choice import ExportChoice, fields, stretched
from edgevlm.apps.bundles.resolve import resolve_model
from edgevlm.apps.credentials import state_key
from edgevlm.apps.planning.plan import PlanRequest
from edgevlm.apps.run.comparison import SideBySide
from edgevlm.apps.run.events import JsonOutput, Output, TextOutput
from edgevlm.apps.run.frame_preparation import FramePreparation, Gate, parse_gate
from edgevlm.apps.run.loop import RunLoop, RunPlan
from edgevlm.apps.run.memory_view import MemoryWatch
from edgevlm.apps.run.shutdown import silence_what_is_gone
from edgevlm.apps.sources import Source, SourceOptions, check_source, comes_to_an_end, open_source
from edgevlm.errors import UserError
from edgevlm.progress import Report, progress, to_stderr, typing_hidden
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.model import Model, bundle_folder
from edgevlm.runtime.plugins import load_class
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL, SessionSettings, parse_budget
from edgevlm.runtime.snapshots import SnapshotWriter

if TYPE_CHECKING:
    from edgevlm.apps.terminal.screen import Screen

FULL = "full"  # the policy without a budget
DEMO_FRAMES = 384  # of the demo without a terminal: more than its memory holds
DEMO_BUDGET = "512"  # tokens of the demo on a terminal: 32 whole frames, so that forgetting is soon to be seen
DEMO_SPEED = 4.0  # times the demo world's own, on a terminal


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The options of ``edgevlm run``, as typed."""

    camera: str | None
    video: str | None
    source: SourceOptions
    model: str
    policy: str
    budget: str | None
    chunk: int
    reindexing: Reindexing
    append: str
    encode: str
    gate: str
    realtime: bool | None
    frames: int | None
    seconds: float | None
    ask: list[str]
    ask_at: list[str]
    threads: int | None
    as_json: bool
    state: str | None = None
    state_every: float = 30.0
    state_key: str | None = None  # as secret() reads it
    store_bytes: str | None = None
    host_bytes: str | None = None
    engine: str = DEFAULT_ENGINE
    positions: str | None = None
    quiet: bool = False
    stats_every: float | None = None
    precision: str | None = None
    vision_precision: str | None = None
    kv: str | None = None
    frame_size: tuple[int, int] | None = None  # (height, width); None: the source's own


def launch(request: RunRequest) -> None:
    """Run to the end. Raises UserError before anything is opened where that is possible."""
    drawn = not request.as_json and is_terminal() and not is_dumb()
    with typing_hidden() if drawn else nullcontext():  # until the prompt shows it
        _launch(request, drawn)


def _launch(request: RunRequest, drawn: bool) -> None:
    is_demo_source = request.video is None and request.camera in (None, "demo")
    interactive = not request.as_json and is_terminal()
    plan = make_plan(request)
    endless = not comes_to_an_end(request.camera, request.video) and plan.frames is None and plan.seconds is None
    if is_demo_source and endless and (not interactive or plan.end):
        plan.frames = DEMO_FRAMES
    elif endless and plan.end:
        raise UserError("--ask is answered at the end of the stream, and a camera has none: add --seconds or --frames")
    compares = is_demo_source and drawn and request.model == "demo" and request.state is None and not plan.questions
    options = replace(request.source, realtime=is_demo_source and interactive if request.realtime is None else request.realtime)
    if compares and request.realtime is None:
        options = replace(options, speed=DEMO_SPEED, rule=options.rule or "block")
    budget = request.budget or (DEMO_BUDGET if compares else None)
    SessionSettings.checked(
        policy=request.policy, budget=budget, chunk=request.chunk, append=request.append, encode=request.encode,
        reindexing=request.reindexing, store_bytes=request.store_bytes, host_bytes=request.host_bytes,
    )  # fmt: skip
    gate = Gate(rule) if (rule := parse_gate(request.gate)) else None
    check_source(request.camera, request.video)
    key = state_key(request.state_key)
    writer = SnapshotWriter(request.state, request.state_every, to_stderr, key=key) if request.state is not None else None
    source: Source | None = None
    try:
        load_class("engines", request.engine)
        with progress("reading the model") as step:  # the first time, a checkpoint is exported
            choice, notify = make_choice(request, options), to_stderr if not request.quiet else lambda line: None
            bundle = resolve_model(request.model, step, notify, request.engine, choice)
            size = size_of(bundle, choice, step, asked=request.frame_size is not None)
        if choice.asks and choice.plan is None and request.engine == DEFAULT_ENGINE:
            asked = "--precision, --vision-precision and --kv"
            raise UserError(f"{asked} are for a checkpoint that is exported; {request.model} is as it was made")
        source = open_source(request.camera, request.video, options)
        with progress("verifying and loading the model"):  # a large bundle takes seconds
            model = Model.load(bundle, engine=request.engine, threads=request.threads, positions=request.positions)
            model = model if size is None else model.for_frames(size)

        def open_session(
            policy: str | None, tokens: str | None, state: SnapshotWriter | None = None, append: str = request.append
        ) -> Session:
            """Anew, with what was asked for at first where nothing else is."""
            given = tokens or budget or (None if request.policy == FULL else choice.budget)
            session = Session.open(
                model, policy=policy or request.policy, budget=given,
                chunk=request.chunk, reindexing=request.reindexing, append=append, encode=request.encode,
                state=state, store_bytes=request.store_bytes, host_bytes=request.host_bytes,
            )  # fmt: skip
            session.notify = output.notice
            return session

        own_questions = model.is_demo and is_demo_source and not plan.questions
        output = make_output(request, drawn)
        if choice.plan is not None and isinstance(output, JsonOutput):
            output.chosen(fields(choice.plan))
        session, baseline = open_session(None, None, writer), partial(open_session, append=ALL)
        if writer is not None:
            writer.source, writer.notify = source.name, output.notice
            skip_to_snapshot(source, writer, plan, gate)
        if own_questions and not compares:
            plan.sample = np.random.default_rng(request.source.seed)
        source.prepare = FramePreparation(session.prepare, gate, partial(warn_of_stretching, model, output))
        run = RunLoop(
            session, source, output, plan,
            observer=SideBySide(session, baseline) if compares else MemoryWatch(session) if drawn else None,
            stats_every=1.0 if interactive or request.stats_every is None else request.stats_every,
            open_session=open_session if writer is None else None,
        )  # fmt: skip
        run.check()
        asks = not drawn and stdin_questions(request) is not None
        for line in opening_lines(session, source, model, plan, request.as_json, drawn, compares, asks):
            output.notice(line)
    except BaseException:
        if source is not None:
            source.close()
        if writer is not None:
            writer.close()
        raise
    try:
        with listening(output, run, request):
            run()
    except KeyboardInterrupt:
        if run.shutdown.forced:
            raise
    except OSError:
        if not silence_what_is_gone():  # else nobody is there to be told
            raise


def make_choice(request: RunRequest, options: SourceOptions) -> ExportChoice:
    """What to export, were a checkpoint given: by what was asked for, this machine, and the source's frames."""

    def frame_shape() -> tuple[int, int] | None:
        """(height, width) of the first frame. The source is opened for it, and closed; stdin can be opened but once."""
        if "-" in (request.camera, request.video):
            return None
        with closing(open_source(request.camera, request.video, replace(options, realtime=False, rule=None))) as source:
            frame = source.read()
        return None if frame is None else (frame.image.shape[0], frame.image.shape[1])

    asked = PlanRequest(
        request.model, None, None if request.budget is None else parse_budget(request.budget), request.precision, request.kv,
        options.fps, request.chunk, vision_precision=request.vision_precision,
    )  # fmt: skip
    return ExportChoice(asked, request.frame_size, frame_shape, (lambda line: None) if request.quiet else to_stderr)


def size_of(path: str, choice: ExportChoice, step: Report, *, asked: bool) -> tuple[int, int] | None:
    """The frame size to open a bundle for, as asked for or as the source's frames are; None for the bundle's own.

    Raises UserError where another is asked of a bundle that takes one alone.
    """
    bundle = Bundle.load(bundle_folder(path), verify="size")
    if bundle.vision.pixels is not None:
        step("looking at the source's frames")
        return choice.size()
    if asked and choice.plan is None:
        height, width = bundle.vision.size
        raise UserError(f"{path}: takes frames of {width}x{height} alone; leave out --frame-size")
    return None


def warn_of_stretching(model: Model, output: Output, shape: tuple[int, int]) -> None:
    """Say where the first frame's aspect is not the one that the session was opened for."""
    if not model.is_demo and (warning := stretched(model.bundle, shape)):
        output.notice(warning)


def opening_lines(
    session: Session, source: Source, model: Model, plan: RunPlan, as_json: bool, drawn: bool, compares: bool, asks: bool
) -> Iterator[str]:
    """The first thing somebody reads: what this is and what to do; then what the policy rests on, where nobody watches it.

    asks: whether questions may come on stdin.
    """
    if compares:
        yield "This camera shows a made-up world of coloured shapes. A small model watches it: ask it what it saw."
        yield "Three memories watch the same frames: watch what each forgets. /help lists commands, ctrl-D ends."
    elif drawn:
        yield f"Watching {source.name}. Ask about what it has seen so far; /help lists commands, ctrl-D ends."
    elif as_json:
        pass  # a program reads it
    elif plan.sample is not None:
        yield "A small model watches a made-up world of coloured shapes. Questions on stdin replace the demo's own."
    else:
        answered = "as they come" if source.live else "at its end"
        yield f"Watching {source.name}." + f" Questions on stdin are answered {answered}." * asks
    if model.is_demo and source.name != "demo":
        yield "note: the demo model only knows its own world; give --model BUNDLE for real pictures"
    if session.basis and not drawn:  # at a terminal /policy says it
        yield session.basis


def listening(output: JsonOutput | TextOutput | Screen, run: RunLoop, request: RunRequest) -> AbstractContextManager[None]:
    """Questions typed at the terminal or piped into stdin, where that is not the video."""
    from edgevlm.apps.terminal.commands import piped_questions

    if isinstance(output, (JsonOutput, TextOutput)):
        lines = stdin_questions(request)
        return nullcontext() if lines is None else piped_questions(run, to_stderr, lines)
    return output.attached(run)


def stdin_questions(request: RunRequest) -> int | None:
    """The descriptor that questions may come on, where stdin is not the video."""
    from edgevlm.apps.terminal.commands import stdin_lines

    return None if "-" in (request.camera, request.video) else stdin_lines(request.as_json)


def is_terminal() -> bool:
    """Whether somebody sits at a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def is_dumb() -> bool:
    """Whether the terminal can only write one line after the other."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown")


def make_plan(request: RunRequest) -> RunPlan:
    """Limits and questions as typed. Raises UserError if it is invalid."""
    if request.seconds is not None and not math.isfinite(request.seconds):
        raise UserError(f"--seconds {request.seconds}: give a number of seconds")
    if not all(text.strip() for text in request.ask):
        raise UserError("--ask '': give a question")
    return RunPlan(request.frames, request.seconds, list(request.ask), [parse_ask_at(text) for text in request.ask_at])


def make_output(request: RunRequest, drawn: bool) -> JsonOutput | TextOutput | Screen:
    if request.as_json:
        return JsonOutput(request.quiet)
    if not drawn:
        return TextOutput(request.quiet, with_stats=request.stats_every is not None)
    from edgevlm.apps.terminal.screen import Screen

    return Screen(quiet=request.quiet)


def parse_ask_at(text: str) -> tuple[float, str]:
    """``60:Who came in?`` is at 60 seconds."""
    time_s, colon, question = text.partition(":")
    try:
        seconds = float(time_s)
        if not colon or not question.strip() or not 0 <= seconds < math.inf:
            raise ValueError
        return seconds, question.strip()
    except ValueError:
        raise UserError(f"--ask-at {text}: give seconds, a colon and the question, like 60:'who came in?'") from None


def skip_to_snapshot(source: Source, writer: SnapshotWriter, plan: RunPlan, gate: Gate | None = None) -> None:
    """Take ``source``, ``plan`` and ``gate`` to where the resumed snapshot was taken, if there is one.

    What is recorded, the demo and files, goes on behind the frame that was the newest: those up to it are read and passed over.
    What is live goes on at once, and its clock has gone on meanwhile: its times begin at the snapshot's and the seconds since.
    The gate sees what is passed over, so that it holds back what it would have.
    Questions planned for times before the snapshot's have been asked.
    """
    if writer.resumed is None:
        return
    about = writer.resumed.about
    time_s = about["session"]["time_s"]
    plan.at = [(at, question) for at, question in plan.at if at >= time_s]
    seen = None if gate is None else lambda frame: gate(frame.image)
    with progress(f"going to {time_s:.1f} s of {source.name}"):
        if not source.skip(time_s, seen):
            plan.since = time_s + max(0.0, time.time() - about["written"])
    if gate is not None:
        gate.gated = 0
