"""``edgevlm bench all``: planned commands one after the other, each in a process of its own; lines are kept as they come."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from edgevlm.apps.credentials import mask_credentials
from edgevlm.bench.cli import COMMANDS
from edgevlm.bench.output import Line
from edgevlm.bench.results import environment
from edgevlm.bench.results.journal import ResultsWriter, Run, lines_of, runs_of
from edgevlm.engines.devices.machine import Machine
from edgevlm.errors import UserError, nearest
from edgevlm.progress import Notify

PROGRAM = [sys.executable, "-m", "edgevlm", "bench"]
PATIENCE_S = 10.0  # for a process that was asked to end


@dataclass(frozen=True, slots=True)
class Planned:
    """``text``: what is typed after ``edgevlm bench``."""

    name: str
    text: str

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.text)

    @property
    def command(self) -> str:
        """As one would type it, without passwords."""
        return mask_credentials(f"edgevlm bench {self.text} --json")


QUICK = (
    Planned("quick-stream", "stream --frames 16,64,256 --chunk 8 --idle 3 --threads 1"),
    Planned("quick-compression", "compression --policy infinipot-v --rounds 3"),
    Planned("quick-decode", "speed decode --model demo --held 300,1184 --precisions fp32,int8 --threads 1 --rounds 9"),
    Planned("quick-snapshot", "memory snapshot --threads 1"),
    Planned("quick-camera", "camera --frames 20 --threads 1 --no-realtime"),
    Planned(
        "quick-accuracy",
        "accuracy --suite streamqa --policy infinipot-v,hermes,purekv,last-seen --budget 25%,12.5%,6.25% --streams 4",
    ),
)
OPENVINO = "--model seeded-0.5b --against openvino --held 784,6000 --precisions int8,int4 --kv fp32,int8 --rounds 5"
FULL = (
    Planned("stream-demo", "stream --frames 16,64,200,256,512,600,1000,1200 --chunk 8,16 --threads 1"),
    Planned("stream-0.5b", "stream --model seeded-0.5b --policy full,infinipot-v,hermes --frames 16,48 --questions 3 "
            "--threads 2"),
    Planned("compression", "compression --policy all --dtype all --rounds 5"),
    Planned("compression-2", "compression --policy infinipot-v --threads 2 --rounds 5"),
    Planned("decode-1", "speed decode --kv fp32,fp16,int8 --threads 1 --rounds 11"),
    Planned("decode-2", "speed decode --kv fp32,fp16,int8 --threads 2 --rounds 11"),
    Planned("decode-openvino-1", f"speed decode {OPENVINO} --threads 1"),
    Planned("decode-openvino-2", f"speed decode {OPENVINO} --threads 2"),
    Planned("decode-3b", "speed decode --model seeded-3b --layers 8 --against transformers --kv fp32 --held 300 "
            "--rounds 5"),
    Planned("decode-3b-int4", "speed decode --model seeded-3b --precisions int4 --against '' --kv fp32 --rounds 5"),
    Planned("prefill", "speed prefill --model seeded-0.5b,demo --rounds 2"),
    Planned("prefill-llama.cpp", "speed prefill --model seeded-135m --tokens-per-frame 64 --against llama.cpp --held 784,6000 "
            "--frames 1 --precisions fp32,int8,int4 --kv fp32,fp16,int8 --rounds 5"),
    Planned("prefill-openvino-1", f"speed prefill {OPENVINO} --frames 1 --threads 1"),
    Planned("prefill-openvino-2", f"speed prefill {OPENVINO} --frames 1 --threads 2"),
    Planned("vision", "speed vision --layers 2 --rounds 3"),
    Planned("snapshot", "memory snapshot --model seeded-0.5b,demo"),
    Planned("store", "memory store"),
    Planned("camera", "camera --frames 40"),
    Planned("accuracy", "accuracy --suite streamqa --policy all --streams 12 --seed test"),
)  # fmt: skip


def planned(quick: bool, only: str | None, also: Sequence[str]) -> list[Planned]:
    """The plan; ``only``: entries or commands by name, separated by commas; ``also``: further commands.

    Raises UserError for a name that is not in the plan and for a command that there is not.
    """
    plan = [*(QUICK if quick else FULL)]
    if only is not None:
        wanted = {name.strip() for name in only.split(",") if name.strip()}
        known = list(dict.fromkeys(name for entry in plan for name in (entry.arguments[0], entry.name)))
        if not wanted or wanted - {*known}:
            unknown = min(wanted - {*known}, default="nothing")
            raise UserError(f"--only {only}: {unknown} is not planned; there is {', '.join(known)}")
        plan = [entry for entry in plan if {entry.arguments[0], entry.name} & wanted]
    for text in also:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"--also {text!r}: {error}") from None
        if not words:
            raise UserError("--also: give a command as after edgevlm bench, such as 'speed decode --model CHECKPOINT'")
        if words[0] not in COMMANDS:
            raise UserError(f"--also {text!r}: there is no edgevlm bench {words[0]}; {nearest(words[0], list(COMMANDS))}")
        plan.append(Planned(mask_credentials(shlex.join(words)), shlex.join(words)))
    return plan


def run_all(
    folder: Path,
    plan: Sequence[Planned],
    notify: Notify,
    progress: Notify,
    *,
    quick: bool,
    new: bool = False,
    machine: Machine | None = None,
) -> Run:
    """Run the commands that the run in ``folder`` lacks; returns the run, its results read back.

    ``notify`` is told which command begins, ``progress`` what a command says on stderr.

    Continues the last run of the same kind unless ``new``. A command that fails is a line with its error, and the rest go on.
    Raises UserError for a run of another machine or version.
    """
    machine = machine or Machine()
    header = {"versions": environment.versions(machine), "machine": environment.describe(machine)}
    with ResultsWriter(folder) as results:
        earlier = [run for run in runs_of(lines_of(results.path), "") if run.header.get("quick") == quick]
        if new or not earlier:
            run = Run(f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
            results.add({"event": "run", "id": run.id, "at": _now(), "quick": quick, **header})
        else:
            run = earlier[-1]
            _check_same(run, header)
        done = {entry.command for entry in run.entries.values() if entry.seconds is not None}
        left = [entry for entry in plan if entry.command not in done]
        notify(f"run {run.id}: {len(left)} of {len(plan)} commands to do; results in {results.path}")
        _run_each(run.id, left, results, notify, progress)
        return next(found for found in runs_of(lines_of(results.path), "") if found.id == run.id)


def _run_each(run: str, left: Sequence[Planned], results: ResultsWriter, notify: Notify, progress: Notify) -> None:
    for position, entry in enumerate(left, start=1):
        notify(f"[{position}/{len(left)}] {entry.command}")
        context, began = {"run": run, "entry": entry.name}, time.monotonic()
        results.add({"event": "begin", **context, "command": entry.command, "at": _now()})
        code, error = _process(entry, lambda line, context=context: results.add({**context, **line}), progress)  # type: ignore[misc]
        took = time.monotonic() - began
        if code:
            notify(f"[{position}/{len(left)}] failed: {error}")
            results.add({"event": "failed", **context, "code": code, "error": error})
        else:
            results.add({"event": "end", **context, "seconds": round(took, 1)})


def _process(entry: Planned, keep: Callable[[Line], object], progress: Notify) -> tuple[int, str]:
    """Its exit code and the last line of its stderr; objects on its stdout are kept at once."""
    said = [""]
    with subprocess.Popen(
        [*PROGRAM, *entry.arguments, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True, errors="backslashreplace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=_pass_on, args=(process.stderr, said, progress), daemon=True)
        reader.start()
        try:
            for text in process.stdout:
                if (line := _object(text)) is not None:
                    keep(line)
            process.wait()
        finally:
            _end(process)
        reader.join()
    return process.returncode, said[-1] or f"its process ended with code {process.returncode}"


def _pass_on(stream: IO[str], said: list[str], progress: Notify) -> None:
    with closing(stream):
        for text in stream:
            if text.strip():
                said[-1] = text.strip()
                progress(said[-1])


def _object(text: str) -> Line | None:
    """The object of a line, NaN and infinities replaced by None; None for anything else."""
    try:
        line = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _check_same(run: Run, header: Line) -> None:
    """Refuse to add to a run what another machine or version measures."""
    before, now = run.section("versions"), header["versions"]
    changed = [f"{name} {before.get(name)} and {now.get(name)}" for name in before | now if before.get(name) != now.get(name)]
    apart = environment.difference(run.section("machine"), header["machine"]) or ", ".join(changed)
    if apart:
        raise UserError(f"run {run.id} was measured with something else ({apart}): begin another with --new")


def _now() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
