"""What ``edgevlm serve`` costs and saves: time to the first token through HTTP, and cameras on one model beside processes.

Through HTTP and in process the same session is asked, in turn, while its camera is paused; server and client share the bench's
process, so that the client's work counts too. The cameras are demo cameras that give frames as fast as they are taken, in
``edgevlm serve`` processes; one way of running them stands still while the other is measured.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import uvicorn

from edgevlm.apps.serve.client import chunks
from edgevlm.apps.serve.config import CameraSettings, ServeConfig
from edgevlm.apps.serve.http import make_app
from edgevlm.apps.serve.run import bound, uvicorn_config
from edgevlm.apps.serve.service import Service
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.apps.sources import SourceOptions
from edgevlm.apps.sources.demo import DemoSource
from edgevlm.bench.camera import QUESTION
from edgevlm.bench.timing import spread
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Progress

WATCHED = 16  # frames before questions and before frames are counted
FASTEST = 1000.0  # frames a second of the camera's clock, so that none is left out
START_S = 600.0  # for the first frames
SETTLES_S = 0.5  # after processes go on


class EagerDemo(DemoSource):
    """The demo, whose next frame is there whenever it is read."""

    live = True

    def __init__(self, target: str, options: SourceOptions) -> None:
        super().__init__(options.fps, options.seed)


def serve(
    model: str = "demo",
    cameras: int = 4,
    rounds: int = 5,
    seconds: float = 4.0,
    threads: int | None = None,
    *,
    progress: Progress = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """A line for the time to the first token (medians over four pairs a round), one for a single camera, one for each way of
    running ``cameras`` (frames a second, medians over ``rounds`` windows of ``seconds``).

    Raises UserError where a server does not start.
    """
    threads = threads or default_threads()
    context = {"model": model, "threads": threads}
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        config = ServeConfig(model=model, threads=threads, fps=FASTEST, state=folder, cameras={"demo": CameraSettings()})
        progress("time to the first token")
        yield {"bench": "serve-ttft", **_first_tokens(config, 4 * rounds), **context}
    for count in dict.fromkeys((1, cameras)):
        progress(f"{count} cameras")
        yield from ({**line, **context} for line in _cameras(model, count, rounds, seconds, threads))


def _first_tokens(config: ServeConfig, pairs: int) -> dict[str, Any]:
    with _served(config) as (stream, url):
        _until(lambda: stream.session.stats.frames >= WATCHED)
        stream.pause()
        ways = {"ttft_ms": lambda: _ask_session(stream), "http_ttft_ms": lambda: _ask_server(url)}
        took: dict[str, list[float]] = {way: [] for way in ways}
        for pair in range(pairs + 1):
            for way in list(ways)[:: 1 if pair % 2 else -1]:
                took[way].append(ways[way]())
    medians = {way: spread(times[1:], way, "low", "high")[way] for way, times in took.items()}
    ratios = [through / inside for through, inside in zip(took["http_ttft_ms"][1:], took["ttft_ms"][1:], strict=True)]
    return {**medians, **spread(ratios, "ratio"), "questions": pairs}


@contextmanager
def _served(config: ServeConfig) -> Iterator[tuple[CameraStream, str]]:
    """The demo's stream, and the address of a server in this process."""
    service = Service(config, lambda line: None)
    listening = bound("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(make_app(service), config, None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="edgevlm-http", daemon=True)
    try:
        service.open()
        thread.start()
        yield service.stream("demo"), f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        if thread.ident is not None:
            thread.join()
        listening.close()
        service.close()


def _ask_session(stream: CameraStream) -> float:
    """Milliseconds to the first piece of an answer."""
    started, first = time.perf_counter(), None
    for _ in stream.ask(QUESTION):
        first = first or time.perf_counter()
    return 1e3 * ((first or time.perf_counter()) - started)


def _ask_server(url: str) -> float:
    started, first = time.perf_counter(), None
    for chunk in chunks(url, {"stream": True, "messages": [{"role": "user", "content": QUESTION}]}, None):
        if first is None and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
            first = time.perf_counter()
    return 1e3 * ((first or time.perf_counter()) - started)


def _cameras(model: str, count: int, rounds: int, seconds: float, threads: int) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        ways: list[list[Served]] = []
        try:
            for processes in dict.fromkeys((1, count)):
                ways.append([])
                for number in range(processes):
                    state = Path(folder) / f"{processes}-{number}"
                    ways[-1].append(Served.start(model, count // processes, threads, state))
                _until(lambda: all(frames >= WATCHED for server in ways[-1] for frames, _ in server.frames().values()))
                for server in ways[-1]:
                    server.process.send_signal(signal.SIGSTOP)
            rates: list[list[float]] = [[] for _ in ways]
            for _ in range(rounds):
                for way, servers in enumerate(ways):
                    rates[way].append(_rate(servers, seconds))
            for servers, rate in zip(ways, rates, strict=True):
                ratios = [one / own for one, own in zip(rate, rates[0], strict=True)]
                against = {} if servers is ways[0] else {"against": "one process", **spread(ratios, "fps_ratio")}
                about = {"bench": "serve-cameras", "cameras": count, "processes": len(servers)}
                memory = {
                    "rss_bytes": sum(server.rss for server in servers),
                    "pss_bytes": sum(server.pss for server in servers),
                }
                yield {**about, **spread(rate, "fps", "fps_low", "fps_high"), **memory, **against}
        finally:
            for server in (server for servers in ways for server in servers):
                server.process.kill()
                server.process.wait()


@dataclass(frozen=True)
class Served:
    """A server process of demo cameras."""

    process: subprocess.Popen[str]
    port: int

    @classmethod
    def start(cls, model: str, cameras: int, threads: int, state: Path) -> Served:
        """Start one and wait until it answers. Raises UserError where it does not start; its own words are on stderr."""
        options = ["--model", model, "--threads", str(threads), "--fps", str(FASTEST), "--state", str(state), "--port", "0"]
        command = [
            sys.executable,
            "-m",
            "edgevlm",
            "serve",
            *[f"--camera={__file__}:EagerDemo"] * cameras,
            *options,
            "--json",
            "--quiet",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if not line:
            raise UserError(f"edgevlm serve ended with {process.wait()} before it served; see above")
        return cls(process, int(json.loads(line)["url"].rpartition(":")[2]))

    def frames(self) -> dict[str, tuple[int, float]]:
        """Frames that each camera has been watched for, and when that was, seconds."""
        names = [stream["id"] for stream in self._get("/v1/streams")["data"]]
        return {name: (self._get(f"/v1/streams/{name}/memory")["frames_watched"], time.monotonic()) for name in names}

    @property
    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def pss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_full_info().pss)

    def _get(self, path: str) -> Any:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("GET", path)
            return json.load(connection.getresponse())
        finally:
            connection.close()


def _rate(servers: list[Served], seconds: float) -> float:
    """Frames a second of all cameras over a time in which the others stand still."""
    for server in servers:
        server.process.send_signal(signal.SIGCONT)
    time.sleep(SETTLES_S)
    before = [server.frames() for server in servers]
    time.sleep(seconds)
    after = [server.frames() for server in servers]
    for server in servers:
        server.process.send_signal(signal.SIGSTOP)
    return sum(
        (late[name][0] - early[name][0]) / (late[name][1] - early[name][1])
        for early, late in zip(before, after, strict=True)
        for name in early
    )


def _until(done: Callable[[], bool]) -> None:
    """Wait for it. Raises UserError after START_S."""
    end = time.monotonic() + START_S
    while not done():
        if time.monotonic() > end:
            raise UserError(f"no {WATCHED} frames were watched in {START_S:g} s; measure a smaller model")
        time.sleep(0.05)
