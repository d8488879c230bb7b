"""What ``edgevlm serve`` costs and saves: ``ttft`` through HTTP, and ``cameras`` on one model.

Cameras here are demo cameras that give frames as fast as they are taken.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import uvicorn

from edgevlm.apps.planning.plan import PlanRequest, make_plan
from edgevlm.apps.serve.config import CameraSettings, ServeConfig
from edgevlm.apps.serve.http import make_app
from edgevlm.apps.serve.service import Service
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.apps.sources import SourceOptions
from edgevlm.apps.sources.demo import DemoSource
from edgevlm.bench.camera import QUESTION
from edgevlm.bench.timing import spread
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.progress import Notify

WATCHED = 16  # frames before questions and before frames are counted
FASTEST = 1000.0  # frames a second of the camera's clock, so that none is left out
START_S = 600.0  # for the first frames
SETTLES_S = 0.5  # after processes continue
SNAPSHOTS_S = 5.0  # from one to the next, so that their copies are among the memory measured


class EagerDemo(DemoSource):
    """The demo, whose next frame is there whenever it is read."""

    live = True

    def __init__(self, target: str, options: SourceOptions) -> None:
        super().__init__(options.fps, options.seed)


def ttft(
    model: str = "demo", rounds: int = 40, threads: int | None = None, *, progress: Notify = lambda what: None
) -> Iterator[dict[str, Any]]:
    """Yield a line: milliseconds to the first token through HTTP and in process, of answers of one token.

    The same session is asked in turn, its camera paused; medians over ``rounds`` pairs. Server and client share the process,
    so that the client's work counts; it connects before.
    """
    threads = threads or default_threads()
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        config = ServeConfig(model=model, threads=threads, fps=FASTEST, state=folder, cameras={"demo": CameraSettings()})
        with _served(config) as (stream, port):
            _until(lambda: stream.session.stats.frames >= WATCHED)
            stream.pause()
            ways = {"ttft_ms": partial(_ask_session, stream), "http_ttft_ms": partial(_ask_server, port)}
            took: dict[str, list[float]] = {way: [] for way in ways}
            for pair in range(rounds + 2):  # two to warm up
                progress(f"question {pair} of {rounds + 1}")
                for way in list(ways)[:: 1 if pair % 2 else -1]:
                    took[way].append(ways[way]())
    medians = {way: spread(times[2:], way)[way] for way, times in took.items()}
    ratios = [through / inside for through, inside in zip(took["http_ttft_ms"][2:], took["ttft_ms"][2:], strict=True)]
    about = {"bench": "serve-ttft", "model": model, "threads": threads, "questions": rounds}
    yield {**about, **medians, **spread(ratios, "ratio")}


@contextmanager
def _served(config: ServeConfig) -> Iterator[tuple[CameraStream, int]]:
    """The demo camera's stream, and the port of a server in this process."""
    service = Service(config, lambda line: None, SourceOptions(speed=FASTEST))
    server = uvicorn.Server(uvicorn.Config(make_app(service), port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, name="edgevlm-http", daemon=True)
    try:
        service.open()
        thread.start()
        _until(lambda: server.started)
        yield service.stream("demo"), server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        if thread.ident is not None:
            thread.join()
        service.close()


def _ask_session(stream: CameraStream) -> float:
    """Milliseconds to the first piece of an answer, or to its end where its token is no text."""
    started = time.perf_counter()
    answer = stream.ask(QUESTION, max_tokens=1)
    next(iter(answer), None)
    return 1e3 * (time.perf_counter() - started)


def _ask_server(port: int) -> float:
    body = {"stream": True, "max_tokens": 1, "messages": [{"role": "user", "content": QUESTION}]}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    connection.connect()
    started = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise UserError(f"the server refused a question: {response.status} {response.read(500)!r}")
    first = None
    for line in response:
        if first is None and line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            if choice["delta"].get("content") or choice["finish_reason"]:
                first = time.perf_counter()
    connection.close()
    return 1e3 * ((first or time.perf_counter()) - started)


def cameras(
    model: str = "demo",
    cameras: Sequence[int] = (1, 4, 16),
    rounds: int = 5,
    seconds: float = 4.0,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Yield a line for each number of cameras in one process and in one each: frames a second in all, and memory.

    Medians over ``rounds`` windows of ``seconds``; one way is stopped while the other is measured. What another camera takes
    of memory is beside what ``edgevlm plan`` predicts. Raises UserError where a server does not start.
    """
    threads = threads or default_threads()
    about = {"bench": "serve-cameras", "model": model, "threads": threads}
    planned, alone = 1e6 * make_plan(PlanRequest(model)).line()["camera_mb"], 0
    for count in cameras:
        with TemporaryDirectory(prefix="edgevlm-bench-") as folder, ExitStack() as stack:
            ways: dict[int, list[Served]] = {}
            for processes in dict.fromkeys((1, count)):
                progress(f"{count} cameras: starting {processes} processes")
                ways[processes] = []
                for number in range(processes):
                    place = Path(folder) / f"{processes}-{number}"
                    ways[processes].append(server := Served.start(model, count // processes, threads, place))
                    stack.callback(server.end)
                    _until(lambda: all(frames >= WATCHED for frames, _ in server.frames().values()))  # noqa: B023
                    server.process.send_signal(signal.SIGSTOP)
            rates: dict[int, list[float]] = {processes: [] for processes in ways}
            for number in range(rounds):
                progress(f"{count} cameras: round {number + 1} of {rounds}")
                for processes, servers in ways.items():
                    rates[processes].append(_rate(servers, seconds))
            for processes, servers in ways.items():
                line: dict[str, Any] = {"cameras": count, "processes": processes}
                line |= spread(rates[processes], "fps", "fps_low", "fps_high")
                memory = [psutil.Process(server.process.pid).memory_full_info() for server in servers]
                line |= {f"{kind}_bytes": sum(getattr(each, kind) for each in memory) for kind in ("rss", "pss")}
                if processes > 1:
                    ratios = [one / own for one, own in zip(rates[processes], rates[1], strict=True)]
                    line |= {"against": "one process", **spread(ratios, "fps_ratio")}
                elif count == 1:
                    alone = line["rss_bytes"]
                elif alone:
                    more = round((line["rss_bytes"] - alone) / (count - 1))
                    line |= {"camera_bytes": more, "planned_bytes": round(planned), "error": round(planned / more - 1, 3)}
                yield {**about, **line}


@dataclass(frozen=True)
class Served:
    """A server process of demo cameras."""

    process: subprocess.Popen[str]
    port: int

    @classmethod
    def start(cls, model: str, cameras: int, threads: int, folder: Path) -> Served:
        """Start one and wait until it answers. Raises UserError where it does not start; its own words are on stderr."""
        folder.mkdir(parents=True, exist_ok=True)
        shared = {"model": model, "threads": threads, "fps": FASTEST, "state": str(folder), "state_every": SNAPSHOTS_S}
        text = [f"{key} = {json.dumps(value)}" for key, value in shared.items()]
        text += [f"[cameras.camera-{number}]\nsource = {json.dumps(f'{__file__}:EagerDemo')}" for number in range(cameras)]
        (folder / "edgevlm.toml").write_text("\n".join(text), encoding="utf-8")
        options = [str(folder / "edgevlm.toml"), "--port", "0", "--json", "--quiet", "--set", "server.max_rate=1e6"]
        process = subprocess.Popen([sys.executable, "-m", "edgevlm", "serve", *options], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            if not (line := process.stdout.readline()):
                raise UserError(f"edgevlm serve ended with {process.wait()} before it served; see above")
        except BaseException:
            process.kill()
            process.wait()
            raise
        return cls(process, int(json.loads(line)["url"].rpartition(":")[2]))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def frames(self) -> dict[str, tuple[int, float]]:
        """Frames that each camera has been watched for, and when that was, seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("GET", "/v1/streams")
            found = json.load(connection.getresponse())["data"]
        finally:
            connection.close()
        return {stream["id"]: (stream["frames_watched"], time.monotonic()) for stream in found}


def _rate(servers: Sequence[Served], seconds: float) -> float:
    """Frames a second of all cameras, over ``seconds`` and until there is one, while other servers are stopped."""
    for server in servers:
        server.process.send_signal(signal.SIGCONT)
    time.sleep(SETTLES_S)
    try:
        before, after = [server.frames() for server in servers], list[dict[str, tuple[int, float]]]()

        def gained() -> bool:
            after[:] = [server.frames() for server in servers]
            return any(late[name][0] > early[name][0] for early, late in zip(before, after, strict=True) for name in early)

        time.sleep(seconds)
        _until(gained)
        return sum(
            (late[name][0] - early[name][0]) / (late[name][1] - early[name][1])
            for early, late in zip(before, after, strict=True)
            for name in early
        )
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGSTOP)


def _until(done: Callable[[], bool]) -> None:
    """Wait for it. Raises UserError after START_S."""
    end = time.monotonic() + START_S
    while not done():
        if time.monotonic() > end:
            raise UserError(f"no {WATCHED} frames were watched in {START_S:g} s; measure a smaller model")
        time.sleep(0.05)
