"""Run the planned commands one after another, each in its own process, and save their result lines as they arrive."""

from __future__ import annotations

import json
import platform
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil

from edgevlm import __version__
from edgevlm.apps.doctor.power import clocks_of, mode_of
from edgevlm.bench.output import Line
from edgevlm.bench.results.compare import difference
from edgevlm.bench.results.journal import NAME, Run, lines_of, runs_of
from edgevlm.engines.devices.jetson import l4t_of
from edgevlm.engines.devices.machine import Machine
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.files import JsonLines

PROGRAM = [sys.executable, "-m", "edgevlm", "bench"]
PATIENCE_S = 10.0
SOURCE = Path(__file__).resolve().parents[2]  # a git checkout if this folder contains .git
PACKAGES = (
    "onnxruntime", "onnxruntime-gpu", "tensorrt", "numpy", "torch", "transformers", "onnx", "llama-cpp-python",
    "openvino", "nncf", "opencv-python", "opencv-python-headless", "av",
)  # fmt: skip
_PLAN = json.loads(files(__package__).joinpath("plan.json").read_text(encoding="utf-8"))
QUICK, FULL = _PLAN["quick"], _PLAN["full"]


def planned(quick: bool, only: str | None) -> dict[str, str]:
    """Return the arguments of each planned ``edgevlm bench`` command, by the command's name.

    ``only``: the names or commands to keep, separated by commas. Raises UserError for a name that is not in the plan.
    """
    plan: dict[str, str] = QUICK if quick else FULL
    if only is None:
        return dict(plan)
    wanted = {name.strip() for name in only.split(",") if name.strip()}
    known = list(dict.fromkeys(name for entry, text in plan.items() for name in (text.split()[0], entry)))
    if not wanted or wanted - {*known}:
        raise UserError(f"--only {only}: choose from {', '.join(known)}")
    return {name: text for name, text in plan.items() if {text.split()[0], name} & wanted}


def typed(text: str) -> str:
    return f"edgevlm bench {text} --json"


def run_all(folder: Path, plan: dict[str, str], notify: Notify, *, quick: bool, machine: Machine | None = None) -> Run:
    """Run the planned commands that the last run in ``folder`` did not finish. Return the run, including all its results.

    A new run begins if ``quick``, the machine or a package version has changed since the last run. If a command fails, its
    error is saved and the other commands still run. Raises UserError if the folder cannot be written.
    """
    machine = machine or Machine()
    header: Line = {"quick": quick, "versions": versions(machine), "machine": describe(machine)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror})") from None
    path = folder / NAME
    with JsonLines(path) as results:
        runs = runs_of(lines_of(path), "")
        if not runs or not _continues(runs[-1].header, header):
            runs.append(Run(f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"))
            results.add({"event": "run", "id": runs[-1].id, "at": _now(), **header})
        run = runs[-1]
        done = {entry.command for entry in run.entries.values() if entry.seconds is not None}
        left = {name: text for name, text in plan.items() if typed(text) not in done}
        notify(f"run {run.id}: {len(left)} of {len(plan)} commands to do; results in {path}")
        for position, (name, text) in enumerate(left.items(), start=1):
            notify(f"[{position}/{len(left)}] {typed(text)}")
            context, began = {"run": run.id, "entry": name}, time.monotonic()
            results.add({"event": "begin", **context, "command": typed(text), "at": _now()})
            code, why = _process(text, context, results)
            if code:
                notify(f"[{position}/{len(left)}] failed: {why}")
                results.add({"event": "failed", **context, "code": code, "error": why})
            else:
                results.add({"event": "end", **context, "seconds": round(time.monotonic() - began, 1)})
        return next(found for found in runs_of(lines_of(path), "") if found.id == run.id)


def _process(text: str, context: Line, results: JsonLines) -> tuple[int, str]:
    """Run a command, saving each JSON object as it is printed; return its exit code and its last line on stderr."""
    command = [*PROGRAM, *shlex.split(text), "--json"]
    with TemporaryFile("w+", errors="backslashreplace") as said:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, stdin=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if (found := _object(line)) is not None:
                        results.add({**context, **found})
                process.wait()
            finally:
                _end(process)
        said.seek(0)
        last = [line.strip() for line in said if line.strip()][-1:]
    return process.returncode, last[0] if last else f"its process exited with code {process.returncode}"


def _object(text: str) -> Line | None:
    """Parse a line as a JSON object, or return None for any other text. NaN and infinities become None."""
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


def _continues(header: Line, now: Line) -> bool:
    same = all(header.get(name) == now[name] for name in ("quick", "versions"))
    return same and not difference(header.get("machine", {}), now["machine"])


def _now() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def versions(machine: Machine) -> dict[str, str]:
    """Return the versions of edgevlm, Python and installed packages. ``commit`` ends in ``+`` if files have changed."""
    installed, found = machine.packages(), {"edgevlm": __version__}
    if (SOURCE / ".git").exists():
        commit = (machine.run(["git", "-C", str(SOURCE), "rev-parse", "--short=12", "HEAD"]) or "").strip()
        changed = machine.run(["git", "-C", str(SOURCE), "status", "--porcelain", "--untracked-files=no"])
        found["commit"] = commit + ("+" if changed else "")
    return found | {"python": platform.python_version()} | {name: installed[name] for name in PACKAGES if name in installed}


def describe(machine: Machine) -> dict[str, Any]:
    """Return a description of the machine, with None for facts that cannot be read."""
    cpu = machine.fields("proc/cpuinfo")
    memory = machine.fields("proc/meminfo").get("MemTotal", "").split()
    load = re.match(r"[\d.]+", machine.read("proc/loadavg") or "")
    driver = re.search(r"Kernel Module[^\d]*([\d.]+)", machine.read("proc/driver/nvidia/version") or "")
    cards: Sequence[str] = machine.names("proc/driver/nvidia/gpus")
    gpus = [machine.fields(f"proc/driver/nvidia/gpus/{card}/information").get("Model", "") for card in cards]
    return {
        "cpu": cpu.get("model name") or cpu.get("Model") or cpu.get("CPU part"),
        "arch": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "governor": machine.read("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_gb": round(int(memory[0]) / 1e6, 1) if memory and memory[0].isdigit() else None,
        "kernel": machine.read("proc/sys/kernel/osrelease"),
        "gpu": ", ".join(filter(None, gpus)) or None,
        "driver": driver[1] if driver else None,
        "device": machine.read("proc/device-tree/model"),
        "l4t": l4t_of(machine),
        "power_mode": mode_of(machine),
        "clocks_mhz": {name: round(mhz) for name, mhz in clocks_of(machine).items()},
        "load": float(load[0]) if load else None,
    }
