"""Start a run from its settings: open model, source and session, then run to the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgevlm.apps.bundles.resolve import ExportChoice, resolve_model
from edgevlm.apps.credentials import state_key
from edgevlm.apps.planning.plan import PlanRequest
from edgevlm.apps.run.loop import RunLoop, RunPlan
from edgevlm.apps.run.memory_view import SideBySide
from edgevlm.apps.run.output import JsonOutput, Output, TextOutput
from edgevlm.apps.run.process import silence_if_gone
from edgevlm.apps.settings import RunSettings
from edgevlm.apps.sources import Source, SourceOptions, check_source, comes_to_an_end, open_source
from edgevlm.errors import UserError
from edgevlm.progress import Notify, progress, to_stderr, to_stderr_if_lost
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.instant import Instant
from edgevlm.runtime.model import Model, bundle_folder
from edgevlm.runtime.plugins import load_class
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL
from edgevlm.runtime.snapshots import SnapshotWriter
from edgevlm.runtime.snapshots.writer import written_at

FULL = "full"
DEMO_FRAMES = 384
DEMO_BUDGET = 512  # tokens for the demo on a terminal: only 32 frames, so that the demo soon forgets
DEMO_SPEED = 4.0


@dataclass(frozen=True, slots=True)
class Start:
    """A run's settings, filled in for this terminal. ``compares`` is true if the demo shows three memories side by side."""

    settings: RunSettings
    plan: RunPlan
    options: SourceOptions
    as_json: bool
    quiet: bool
    interactive: bool
    drawn: bool
    compares: bool
    verbose: bool = False

    @property
    def notify(self) -> Notify:
        return to_stderr_if_lost if self.quiet else to_stderr

    def open_source(self, **changes: Any) -> Source:
        return open_source(self.settings.camera, self.settings.video, replace(self.options, **changes))


def launch(settings: RunSettings, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
    """Open a run with these settings, and run it to the end. Raises UserError."""
    run = open_run(replace(resolve(settings, as_json, quiet), verbose=verbose))
    from edgevlm.apps.terminal.commands import piped_questions, stdin_lines

    listening: AbstractContextManager[None] = nullcontext()
    if not isinstance(run.output, TextOutput):
        screen: Any = run.output
        listening = screen.attached(run)
    elif not settings.is_stdin_source and (descriptor := stdin_lines(as_json)) is not None:
        listening = piped_questions(run, to_stderr, descriptor)
    try:
        with listening:
            run()
    except KeyboardInterrupt:
        if run.shutdown.forced:
            raise
    except OSError:
        if not silence_if_gone():
            raise


def resolve(settings: RunSettings, as_json: bool, quiet: bool) -> Start:
    """Fill in a run's settings that depend on the terminal. Raises UserError for contradictory settings and invalid sources."""
    interactive = not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    can_draw = os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and "utf" in str(sys.stdout.encoding).lower()
    plan = RunPlan(settings.frames, settings.seconds, list(settings.ask), list(settings.ask_at))
    endless = not comes_to_an_end(settings.camera, settings.video) and plan.frames is None and plan.seconds is None
    if settings.is_demo_source and endless and (not interactive or plan.end):
        plan.frames = DEMO_FRAMES
    elif endless and plan.end:
        raise UserError(
            "--ask is answered at the end of the stream, but a camera's stream has no end; add --seconds or --frames"
        )
    drawn, is_paced = interactive and can_draw, settings.realtime
    compares = drawn and settings.is_demo_source and (settings.model, settings.state, plan.questions) == ("demo", None, [])
    options = SourceOptions(
        fps=settings.fps, realtime=settings.is_demo_source and interactive if is_paced is None else is_paced,
        rule=settings.rule, size=settings.size, pixel_format=settings.pixel_format, camera_fps=settings.camera_fps,
        wait=settings.wait, seed=settings.seed, open_timeout_s=settings.open_timeout, read_timeout_s=settings.read_timeout,
        stall_timeout_s=settings.stall_timeout,
    )  # fmt: skip
    if compares and is_paced is None:
        options = replace(options, speed=DEMO_SPEED, rule=options.rule or "block")
    if compares and settings.budget is None:
        settings = settings.model_copy(update={"budget": DEMO_BUDGET})
    check_source(settings.camera, settings.video)
    load_class("engines", settings.engine)
    return Start(settings, plan, options, as_json, quiet, interactive, drawn, compares)


def open_run(start: Start) -> RunLoop:
    """Open a run's model, source, session and output. Closes everything again if any part cannot be opened."""
    settings, plan = start.settings, start.plan
    with ExitStack() as opened:
        writer = None
        if settings.state is not None:
            writer = SnapshotWriter(settings.state, settings.state_every, start.notify, key=state_key(settings.state_key))
            opened.callback(writer.close)
        choice = export_choice(start)
        with progress("reading the model") as step:  # exports a checkpoint if it has not been exported yet
            bundle = resolve_model(settings.model, step, start.notify, settings.engine, choice)
            size = frame_size(bundle, choice, asked=settings.frame_size is not None)
        if choice.asks and choice.plan is None and settings.engine == DEFAULT_ENGINE:
            asked = "--precision, --vision-precision and --kv"
            raise UserError(f"{asked} apply only to an export, but {settings.model} is already a bundle; remove them")
        source = opened.enter_context(closing(start.open_source()))
        with progress("verifying and loading the model"):  # large bundles take seconds to load
            model = Model.load(bundle, engine=settings.engine, threads=settings.threads)
            model = model if size is None else model.for_frames(size)
        output: Output = JsonOutput(start.quiet) if start.as_json else TextOutput(start.quiet, settings.stats_every is not None)
        if start.drawn:
            from edgevlm.apps.terminal.screen import Screen

            output = Screen(start.quiet)
        if writer is not None:
            writer.source, writer.continues = source.name, settings.state_from
        budget = settings.budget or (None if settings.policy == FULL else choice.budget)
        session = Session.open(model, settings, state=writer, budget=budget)
        session.notify, source.prepare = output.notice, session.prepare
        if writer is not None:
            writer.notify = output.notice
            skip_to_snapshot(source, writer, plan)
        if model.is_demo and settings.is_demo_source and not plan.questions and not start.compares:
            plan.sample = np.random.default_rng(settings.seed)

        def beside(policy: str, budget: str | None) -> Session:
            return Session.open(model, settings, policy=policy, budget=budget or settings.budget, append=ALL)

        observer = SideBySide(session, beside if start.compares else None) if start.drawn else None
        every = 1.0 if start.interactive or settings.stats_every is None else settings.stats_every
        run = RunLoop(session, source, output, plan, observer=observer, stats_every=every)
        run.listing = "/questions" if start.interactive else run.listing
        run.check()
        for line in opening_lines(start, run):
            output.notice(line)
        opened.pop_all()  # from here on, the returned run closes the opened objects
    return run


def export_choice(start: Start) -> ExportChoice:
    """Return the export options for a checkpoint that suit the settings, this machine and the source's frames."""
    settings = start.settings
    budget: Any = settings.budget

    def frame_shape() -> tuple[int, int] | None:
        """Open the source and return its first frame's (height, width), or None for stdin, which can be read only once."""
        if settings.is_stdin_source:
            return None
        with closing(start.open_source(realtime=False, rule=None)) as source:
            frame = source.read()
        return None if frame is None else (frame.image.shape[0], frame.image.shape[1])

    asked = PlanRequest(
        settings.model, None, budget, settings.precision, settings.kv, settings.fps, settings.chunk,
        vision_precision=settings.vision_precision,
    )  # fmt: skip
    size = None if settings.frame_size is None else (settings.frame_size[1], settings.frame_size[0])
    return ExportChoice(asked, size, frame_shape, start.notify)


def frame_size(path: str, choice: ExportChoice, *, asked: bool) -> tuple[int, int] | None:
    """Return the frame size for a bundle that takes any size, or None for a bundle that takes only one size.

    Raises UserError if the user chose a frame size but the bundle takes only one size.
    """
    bundle = Bundle.load(bundle_folder(path), verify="size")
    if bundle.vision.pixels is not None:
        return choice.size
    if asked and choice.plan is None:
        height, width = bundle.vision.size
        raise UserError(f"{path}: supports only frames of {width}x{height}; remove --frame-size")
    return None


def opening_lines(start: Start, run: RunLoop) -> Iterator[str]:
    """Yield the lines to print when a run starts, including the reason for its policy."""
    source, session = run.source, run.session
    if start.compares:
        yield "This camera shows a made-up world of coloured shapes. A small model watches it: ask it what it saw."
        yield "Three memories watch the same frames: watch what each forgets. /help lists commands, ctrl-D ends."
    elif start.drawn:
        yield f"Watching {source.name}. Ask about what it has seen so far; /help lists commands, ctrl-D ends."
    elif not start.as_json and run.plan.sample is not None:
        yield "A small model watches a made-up world of coloured shapes. Questions on stdin replace the demo's own."
    elif not start.as_json:
        yield f"Watching {source.name}."
    if session.model.is_demo and source.name != "demo":
        yield "note: the demo model only knows its own world; give --model BUNDLE for real pictures"
    if session.basis and (start.verbose or not start.drawn):  # on the drawn screen, /policy shows the reason
        yield session.basis if start.verbose else session.basis.partition("; ")[0]


def skip_to_snapshot(source: Source, writer: SnapshotWriter, plan: RunPlan) -> None:
    """Skip forward in a recording to the time of the resumed snapshot. A live source continues with its current frame.

    Questions planned for an earlier time are dropped.
    """
    if writer.resumed is None:
        return
    about = writer.resumed.about
    time_s = about["session"]["time_s"]
    plan.at = [(at, question) for at, question in plan.at if at >= time_s]
    if about.get("source", source.name) not in ("", source.name) and not source.live:
        plan.since = time_s  # watch a different video from its beginning
        return
    with progress(f"skipping to {time_s:.1f} s of {source.name}"):
        if not source.skip(time_s):
            plan.since = time_s + Instant.now().since(written_at(about))
