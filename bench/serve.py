"""Measure what ``edgevlm serve`` saves when cameras share one process and model, compared with one process per camera.

The servers are started by the ``edgevlm serve`` command and watch demo cameras at full speed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from edgevlm.apps.planning.plan import PlanRequest, make_plan
from edgevlm.apps.sources import SourceOptions
from edgevlm.apps.sources.demo import DemoSource
from edgevlm.bench.timing import spread
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.progress import show
from edgevlm.runtime.engine import DEFAULT_ENGINE

WATCHED = 16
FASTEST = 1000.0  # frames per second on the camera's clock, so that no frame is skipped
START_S = 600.0
SETTLES_S = 0.5
SNAPSHOTS_S = 5.0  # time between snapshots, so that the measured memory includes their copies


class EagerDemo(DemoSource):
    """The demo camera without a limit on its frame rate: the next frame is always ready."""

    live = True

    def __init__(self, target: str, options: SourceOptions) -> None:
        super().__init__(options.fps, options.seed)


def cameras(
    model: str = "demo",
    cameras: Sequence[int] = (1, 4, 16),
    rounds: int = 5,
    seconds: float = 4.0,
    engine: str = DEFAULT_ENGINE,
    threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the total frames per second and the memory, for each number of cameras, in one process and in several.

    Each rate is a median over ``rounds`` windows of ``seconds``, in which all other servers are stopped. The memory of each
    additional camera is compared with what ``edgevlm plan`` predicts. Raises UserError if a server does not start.
    """
    threads = threads or default_threads()
    planned, alone = 1e6 * make_plan(PlanRequest(model)).line()["camera_mb"], 0
    for count in cameras:
        with TemporaryDirectory(prefix="edgevlm-bench-") as folder, ExitStack() as stack:
            ways: dict[int, list[Served]] = {}
            for processes in dict.fromkeys((1, count)):
                show(f"{count} cameras: starting {processes} processes")
                ways[processes] = []
                for number in range(processes):
                    server = Served(model, engine, count // processes, threads, Path(folder) / f"{processes}-{number}")
                    ways[processes].append(server)
                    stack.callback(server.end)
                    _until(lambda: min(server.frames()) >= WATCHED)  # noqa: B023
                    server.process.send_signal(signal.SIGSTOP)
            rates: dict[int, list[float]] = {processes: [] for processes in ways}
            for number, (processes, servers) in product(range(rounds), ways.items()):
                show(f"{count} cameras: round {number + 1} of {rounds}")
                rates[processes].append(_rate(servers, seconds))
            for processes, servers in ways.items():
                memory = [psutil.Process(server.process.pid).memory_full_info() for server in servers]
                line: dict[str, Any] = {
                    "bench": "serve-cameras", "model": model, "threads": threads, "cameras": count, "processes": processes,
                    **spread(rates[processes], "fps", "fps_low", "fps_high"),
                    "rss_bytes": sum(each.rss for each in memory), "pss_bytes": sum(each.pss for each in memory),
                }  # fmt: skip
                if processes > 1:
                    ratios = (one / own for one, own in zip(rates[processes], rates[1], strict=True))
                    line |= {"against": "one process", **spread(ratios, "fps_ratio")}
                elif count == 1:
                    alone = line["rss_bytes"]
                elif alone:
                    more = round((line["rss_bytes"] - alone) / (count - 1))
                    line |= {"camera_bytes": more, "planned_bytes": round(planned), "error": round(planned / more - 1, 3)}
                yield line


class Served:
    """A server process with demo cameras. Raises UserError if the server does not start."""

    def __init__(self, model: str, engine: str, cameras: int, threads: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shared = {"model": model, "engine": engine, "threads": threads, "fps": FASTEST, "state": str(folder)}
        shared["state_every"] = SNAPSHOTS_S
        text = [f"{key} = {json.dumps(value)}" for key, value in shared.items()]
        text += [f"[cameras.camera-{number}]\nsource = {json.dumps(f'{__file__}:EagerDemo')}" for number in range(cameras)]
        (folder / "edgevlm.toml").write_text("\n".join(text), encoding="utf-8")
        options = [str(folder / "edgevlm.toml"), "--port", "0", "--json", "--quiet", "--set", "server.max_rate=1e6"]
        command = [sys.executable, "-m", "edgevlm", "serve", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        try:
            if not (line := self.process.stdout.readline()):
                raise UserError(f"edgevlm serve exited with {self.process.wait()} before it was ready; see above")
        except BaseException:
            self.end()
            raise
        self._url = json.loads(line)["url"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def frames(self) -> list[int]:
        found = httpx.get(f"{self._url}/v1/streams", timeout=START_S, trust_env=False).json()["data"]
        return [stream["frames_watched"] for stream in found]


def _rate(servers: Sequence[Served], seconds: float) -> float:
    """Let the servers run, then pause them. Return the frames per second of all servers together.

    The servers run for at least ``seconds`` and watch at least one frame.
    """

    def total() -> int:
        return sum(sum(server.frames()) for server in servers)

    for server in servers:
        server.process.send_signal(signal.SIGCONT)
    time.sleep(SETTLES_S)
    try:
        before, began = total(), time.monotonic()
        time.sleep(seconds)
        _until(lambda: total() > before)
        return (total() - before) / (time.monotonic() - began)
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGSTOP)


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + START_S
    while not done():
        if time.monotonic() > end:
            raise UserError(f"fewer than {WATCHED} frames were watched in {START_S:g} s; measure a smaller model")
        time.sleep(0.05)
