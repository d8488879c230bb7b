"""From options to a run: check them, open model, source and session, choose the output."""

from __future__ import annotations

import math
import re
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from edgevlm.apps.bundles.cache import resolve_model
from edgevlm.apps.run.events import JsonOutput, Output, TextOutput
from edgevlm.apps.run.frame_preparation import FramePreparation, Gate, parse_gate
from edgevlm.apps.run.loop import Plan, Run
from edgevlm.apps.run.shutdown import silence_what_is_gone
from edgevlm.apps.sources import RECORDED, Source, SourceOptions, check_source, kind_of, open_source
from edgevlm.errors import UserError
from edgevlm.progress import progress
from edgevlm.runtime.auto import check_policy
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.model import Model
from edgevlm.runtime.plugins import load_class
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots import SnapshotWriter
from edgevlm.runtime.store import StoreSettings

DEMO_FRAMES = 128  # of the demo without a terminal: more than its memory holds


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
    store_bytes: str | None = None
    host_bytes: str | None = None
    engine: str = DEFAULT_ENGINE


def launch(request: RunRequest) -> None:
    """Run to the end. Raises UserError before anything is opened where that is possible."""
    is_demo_source = request.video is None and request.camera in (None, "demo")
    interactive = not request.as_json and is_terminal()
    plan = make_plan(request)
    endless = kind_of(request.camera, request.video)[0] not in RECORDED and plan.frames is None and plan.seconds is None
    if is_demo_source and endless and (not interactive or plan.end):
        plan.frames = DEMO_FRAMES
    elif endless and plan.end:
        raise UserError("--ask is answered at the end of the stream, and a camera has none: add --seconds or --frames")
    realtime = request.realtime if request.realtime is not None else is_demo_source and interactive
    budget = parse_count(request.budget) if request.budget is not None else None
    check_policy(request.policy)
    store = parse_store(request.store_bytes, request.host_bytes)
    gate = Gate(rule) if (rule := parse_gate(request.gate)) else None
    check_source(request.camera, request.video)
    writer = SnapshotWriter(request.state, request.state_every, to_stderr) if request.state is not None else None
    source: Source | None = None
    try:
        load_class("engines", request.engine)
        with progress("reading the model") as step:  # the first time, a checkpoint is exported
            bundle = resolve_model(request.model, step, to_stderr, request.engine)
        source = open_source(request.camera, request.video, replace(request.source, realtime=realtime))
        with progress("verifying and loading the model"):  # a large bundle takes seconds
            model = Model.load(bundle, engine=request.engine, threads=request.threads)
        session = Session.open(
            model, policy=request.policy, budget=budget, chunk=request.chunk, reindexing=request.reindexing, state=writer,
            store=store,
        )  # fmt: skip
        if writer is not None:
            writer.source = source.name
            go_on(source, writer, plan, gate)
        own_questions = model.is_demo and is_demo_source and not plan.questions
        if own_questions:
            plan.sample = np.random.default_rng(request.source.seed)
        output = make_output(request.as_json, interactive, with_truth=own_questions)
        source.prepare = FramePreparation(session.prepare, gate)
        session.notify = output.notice
        if writer is not None:
            writer.notify = output.notice
        run = Run(session, source, output, plan)
        run.check()
        if session.basis:
            output.notice(session.basis)
        if model.is_demo and not is_demo_source:
            output.notice("note: the demo model only knows its own world; give --model BUNDLE for real pictures")
    except BaseException:
        if source is not None:
            source.close()
        if writer is not None:
            writer.close()
        raise
    try:
        with screen_of(output, run, is_demo_source):
            run()
    except KeyboardInterrupt:
        if run.shutdown.forced:
            raise
    except OSError:
        if not silence_what_is_gone():  # else nobody is there to be told
            raise


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def make_plan(request: RunRequest) -> Plan:
    """Limits and questions as typed. Raises UserError for what is none."""
    if request.seconds is not None and not math.isfinite(request.seconds):
        raise UserError(f"--seconds {request.seconds}: give a number of seconds")
    if not all(text.strip() for text in request.ask):
        raise UserError("--ask '': give a question")
    return Plan(request.frames, request.seconds, list(request.ask), [parse_ask_at(text) for text in request.ask_at])


def make_output(as_json: bool, interactive: bool, with_truth: bool) -> Output:
    """``with_truth``: JSON answers of the program's own questions carry it; for a person it is always shown."""
    if as_json:
        return JsonOutput(with_truth)
    if not interactive:
        return TextOutput()
    from edgevlm.apps.terminal.screen import Screen

    return Screen()


def screen_of(output: Output, run: Run, show_picture: bool) -> AbstractContextManager[None]:
    from edgevlm.apps.terminal.screen import Screen

    if not isinstance(output, Screen):
        return nullcontext()
    output.show_picture = show_picture
    return output.attached(run)


def parse_count(text: str) -> int:
    """``6k`` is 6,000."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kK]?)", text.strip())
    if not match:
        raise UserError(f"--budget {text}: give a number of tokens, like 512 or 6k")
    return int(float(match[1]) * (1000 if match[2] else 1))


def parse_store(file: str | None, host: str | None) -> StoreSettings | None:
    """As typed; None where nothing was."""
    if file is None and host is None:
        return None
    given = {"file_bytes": ("--store-bytes", file), "host_bytes": ("--host-bytes", host)}
    return StoreSettings(**{name: parse_bytes(*typed) for name, typed in given.items() if typed[1] is not None})


def parse_bytes(option: str, text: str | None) -> int:
    """``8G`` is 8,000,000,000."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kKmMgGtT]?)", (text or "").strip())
    if not match:
        raise UserError(f"{option} {text}: give a number of bytes, like 8G or 256M")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


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


def list_questions() -> list[str]:
    from edgevlm.calib.demo.questions import all_questions

    return all_questions()


def go_on(source: Source, writer: SnapshotWriter, plan: Plan, gate: Gate | None = None) -> None:
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
