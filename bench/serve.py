"""What ``edgevlm serve`` costs and saves: ``ttft`` through HTTP, ``cameras`` on one model, ``clients`` beside a camera.

Cameras here are demo cameras that give frames as fast as they are taken.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import uvicorn

from edgevlm.apps.planning.plan import PlanRequest, make_plan
from edgevlm.apps.serve.client import problem
from edgevlm.apps.serve.config import CameraSettings, ServeConfig
from edgevlm.apps.serve.http import make_app
from edgevlm.apps.serve.run import bound, uvicorn_config
from edgevlm.apps.serve.service import Service
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.apps.sources import SourceOptions
from edgevlm.apps.sources.demo import DemoSource
from edgevlm.bench.camera import QUESTION
from edgevlm.bench.models import SEEDED, TOKENS_PER_FRAME, filling, has_noise
from edgevlm.bench.noise import FRAMES
from edgevlm.bench.timing import spread
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.packages import needed
from edgevlm.progress import Notify
from edgevlm.runtime.model import Model

WATCHED = 16  # frames before questions and before frames are counted
FASTEST = 1000.0  # frames a second of the camera's clock, so that none is left out
START_S = 600.0  # for the first frames
SETTLES_S = 0.5  # after processes go on
SNAPSHOTS_S = 5.0  # from one to the next, so that their copies are among the memory measured
LISTENERS = 100
RATES = (10, 30, 100, 300, 1000, 3000)  # requests a second
FALLEN = 0.9  # of the frames a second without requests
REACHED = 0.8  # of the rate asked for: below it the generator or the server is at its end
CONNECTIONS = 4  # that requests are made over


class EagerDemo(DemoSource):
    """The demo, whose next frame is there whenever it is read."""

    live = True

    def __init__(self, target: str, options: SourceOptions) -> None:
        super().__init__(options.fps, options.seed)


def ttft(
    model: str = "demo", rounds: int = 40, threads: int | None = None, *, progress: Notify = lambda what: None
) -> Iterator[dict[str, Any]]:
    """A line: milliseconds to the first token through HTTP and in process, the same session asked in turn, its camera paused.

    Server and client share the process, so that the client's work counts; it is connected before. Medians over ``rounds``
    pairs. Answers have one token.
    """
    threads = threads or default_threads()
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        config = ServeConfig(model=model, threads=threads, fps=FASTEST, state=folder, cameras={"demo": CameraSettings()})
        with _served(config, Path(folder), progress) as (stream, port):
            enough = FRAMES if has_noise(stream.model) else WATCHED
            with filling(stream.model):
                _until(lambda: stream.session.stats.frames >= enough)
            stream.pause()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
            ways = {"ttft_ms": partial(_ask_session, stream), "http_ttft_ms": partial(_ask_server, connection)}
            took: dict[str, list[float]] = {way: [] for way in ways}
            for pair in range(rounds + 2):  # two to warm up
                progress(f"question {pair} of {rounds + 1}")
                for way in list(ways)[:: 1 if pair % 2 else -1]:
                    took[way].append(ways[way]())
            connection.close()
    medians = {way: spread(times[2:], way, "low", "high")[way] for way, times in took.items()}
    ratios = [through / inside for through, inside in zip(took["http_ttft_ms"][2:], took["ttft_ms"][2:], strict=True)]
    about = {"bench": "serve-ttft", "model": model, "threads": threads, "questions": rounds}
    yield {**about, **medians, **spread(ratios, "ratio")}


@contextmanager
def _served(config: ServeConfig, folder: Path, progress: Notify) -> Iterator[tuple[CameraStream, int]]:
    """The demo camera's stream, and the port of a server in this process. SEEDED has random weights of 8 bits."""
    service = Service(config, lambda line: None, SourceOptions(speed=FASTEST))
    if config.model == SEEDED:
        progress(f"{SEEDED}: writing random weights")
        seeded = needed("edgevlm.bench.seeded", "a model of random weights")
        shape, threads = seeded.SHAPES[SEEDED][1], config.threads
        model: Model = seeded.seeded_model(folder, shape, TOKENS_PER_FRAME, threads, precision="int8")
        service.serve_as(SEEDED, model)
    listening = bound("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_config(make_app(service), service))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="edgevlm-http", daemon=True)
    try:
        service.open()
        thread.start()
        yield service.stream("demo"), int(listening.getsockname()[1])
    finally:
        server.should_exit = True
        if thread.ident is not None:
            thread.join()
        listening.close()
        service.close()


def _ask_session(stream: CameraStream) -> float:
    """Milliseconds to the first piece of an answer, or to its end where its token is no text."""
    started = time.perf_counter()
    answer = stream.ask(QUESTION, max_tokens=1)
    next(iter(answer), None)
    return 1e3 * (time.perf_counter() - started)


def _ask_server(connection: http.client.HTTPConnection) -> float:
    body = {"stream": True, "max_tokens": 1, "messages": [{"role": "user", "content": QUESTION}]}
    connection.close()
    connection.connect()  # a server closes what is idle for some seconds
    started, first = time.perf_counter(), None
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise UserError(f"the server refused a question: {problem(response.status, response.read(65_536))}")
    for line in response:
        if first is None and line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            if choice["delta"].get("content") or choice["finish_reason"]:
                first = time.perf_counter()
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
    """A line for each way of running so many cameras, in one process and in one each: frames a second in all, and memory.

    Medians over ``rounds`` windows of ``seconds``; one way stands still while the other is measured. What a camera more takes
    of memory is beside what ``edgevlm plan`` predicts. Raises UserError where a server does not start.
    """
    threads = threads or default_threads()
    about = {"bench": "serve-cameras", "model": model, "threads": threads}
    planned, alone = 1e6 * make_plan(PlanRequest(model)).line()["camera_mb"], 0
    for count in cameras:
        with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
            for line in _measured(model, count, rounds, seconds, threads, Path(folder), progress):
                if count == 1:
                    alone = line["rss_bytes"]
                elif line["processes"] == 1 and alone:
                    more = round((line["rss_bytes"] - alone) / (count - 1))
                    line |= {"camera_bytes": more, "planned_bytes": round(planned), "error": round(planned / more - 1, 3)}
                yield {**about, **line}


def _measured(
    model: str, count: int, rounds: int, seconds: float, threads: int, folder: Path, progress: Notify
) -> Iterator[dict[str, Any]]:
    with _servers() as running:
        ways: list[list[Served]] = []
        for processes in dict.fromkeys((1, count)):
            ways.append([])
            for number in range(processes):
                progress(f"{count} cameras: process {number + 1} of {processes}")
                ways[-1].append(Served.start(model, count // processes, threads, folder / f"{processes}-{number}"))
                running.append(ways[-1][-1])
                _until(lambda: all(frames >= WATCHED for frames, _ in ways[-1][-1].frames().values()))
                running[-1].process.send_signal(signal.SIGSTOP)
        rates: list[list[float]] = [[] for _ in ways]
        for number in range(rounds):
            progress(f"{count} cameras: round {number + 1} of {rounds}")
            for way, servers in enumerate(ways):
                rates[way].append(_rate(servers, seconds))
        for servers, rate in zip(ways, rates, strict=True):
            ratios = [one / own for one, own in zip(rate, rates[0], strict=True)]
            against = {} if servers is ways[0] else {"against": "one process", **spread(ratios, "fps_ratio")}
            memory = {
                "rss_bytes": sum(server.rss for server in servers),
                "pss_bytes": sum(server.pss for server in servers),
            }
            yield {
                "cameras": count,
                "processes": len(servers),
                **spread(rate, "fps", "fps_low", "fps_high"),
                **memory,
                **against,
            }


def clients(
    model: str = "demo", rounds: int = 3, seconds: float = 3.0, *, progress: Notify = lambda what: None
) -> Iterator[dict[str, Any]]:
    """What clients cost a camera that takes all that is left: LISTENERS on its events, then rising rates of requests.

    The clients have a core of their own, the server the others. A line for each rate, with frames a second beside those
    without clients, medians over ``rounds`` pairs of windows of ``seconds``, and frames a second of the server's processor
    time likewise, which other work on the machine does not change; none follows the first where three quarters of the pairs
    fall by 10 %. Raises UserError on a machine of one core.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < 2:
        raise UserError("bench serve clients: needs Linux and two cores, one of them for the clients")
    about = {"bench": "serve-clients", "model": model, "threads": len(cores) - 1}
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder, _servers() as running:
        os.sched_setaffinity(0, cores[1:])  # the server's, which it keeps
        try:
            server = Served.start(model, 1, len(cores) - 1, Path(folder))
            running.append(server)
            os.sched_setaffinity(0, cores[:1])
            _until(lambda: server.frames()["camera"][0] >= WATCHED)
            paths = {"events": (1,), "metrics": RATES, "frame.jpg": RATES}
            for kind, steps in paths.items():
                for rate in steps:
                    progress(f"{kind}: {LISTENERS if kind == 'events' else f'{rate} a second'}")
                    line = _beside(server, kind, rate, rounds, seconds)
                    yield {**about, "requests": kind, **line}
                    reached = line.get("reached", rate)
                    if line["high"] < FALLEN or reached < REACHED * rate:
                        break
        finally:
            os.sched_setaffinity(0, cores)


def _beside(server: Served, kind: str, rate: int, rounds: int, seconds: float) -> dict[str, Any]:
    ratios, of_cpu, reached = [], [], []
    for _ in range(rounds):
        alone = _paced(server, seconds)
        path = "/metrics" if kind == "metrics" else f"/v1/streams/camera/{kind}"
        with _listening(server.port, path) if kind == "events" else _requesting(server.port, path, rate) as done:
            time.sleep(SETTLES_S)
            before, began = done(), time.monotonic()
            beside = _paced(server, seconds)
            reached.append((done() - before) / (time.monotonic() - began))
        ratios.append(beside[0] / alone[0])
        of_cpu.append(beside[1] / alone[1])
    found = {**spread(ratios, "fps_ratio"), "cpu_fps_ratio": spread(of_cpu, "median")["median"]}
    if kind == "events":
        return {"clients": LISTENERS, **found}
    return {"rate": rate, "reached": spread(reached, "reached", "low", "high")["reached"], **found}


@contextmanager
def _listening(port: int, path: str) -> Iterator[Callable[[], int]]:
    """LISTENERS clients of server-sent events; how many bytes they have read."""
    read, ended = [0] * LISTENERS, threading.Event()

    def listen(number: int) -> None:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2 * SETTLES_S)
            connection.request("GET", path)
            response = connection.getresponse()
            while not ended.is_set():
                with suppress(TimeoutError):
                    read[number] += len(response.readline())
            connection.close()

    threads = [threading.Thread(target=listen, args=(number,), daemon=True) for number in range(LISTENERS)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sum(read)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def _requesting(port: int, path: str, rate: int) -> Iterator[Callable[[], int]]:
    """Requests at a rate over connections that are kept; how many were answered."""
    answered, ended = [0] * CONNECTIONS, threading.Event()

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        began = time.monotonic()
        while not ended.is_set():
            connection.request("GET", path)
            connection.getresponse().read()
            answered[number] += 1
            due = began + answered[number] * CONNECTIONS / rate
            ended.wait(max(0.0, due - time.monotonic()))
        connection.close()

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sum(answered)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def _servers() -> Iterator[list[Served]]:
    """Server processes, which end with it."""
    running: list[Served] = []
    try:
        yield running
    finally:
        for server in running:
            server.process.kill()
            server.process.wait()


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
        names = ["camera", *(f"camera-{number}" for number in range(1, cameras))]
        text = [f"{key} = {json.dumps(value)}" for key, value in shared.items()]
        text += [f"[cameras.{name}]\nsource = {json.dumps(f'{__file__}:EagerDemo')}" for name in names]
        (folder / "edgevlm.toml").write_text("\n".join(text), encoding="utf-8")
        options = [str(folder / "edgevlm.toml"), "--port", "0", "--json", "--quiet", "--set", "server.max_rate=1e6"]
        process = subprocess.Popen([sys.executable, "-m", "edgevlm", "serve", *options], stdout=subprocess.PIPE, text=True)
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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request("GET", "/v1/streams")
            found = json.load(connection.getresponse())["data"]
        finally:
            connection.close()
        return {stream["id"]: (stream["frames_watched"], time.monotonic()) for stream in found}

    @property
    def cpu_s(self) -> float:
        """Its processor seconds so far."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    @property
    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def pss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_full_info().pss)


def _rate(servers: list[Served], seconds: float) -> float:
    """Frames a second of all cameras over a time in which the others stand still."""
    for server in servers:
        server.process.send_signal(signal.SIGCONT)
    time.sleep(SETTLES_S)
    try:
        return _watched(servers, seconds)
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGSTOP)


def _paced(server: Served, seconds: float) -> tuple[float, float]:
    """Frames a second, and frames a second of its processor time."""
    used, began = server.cpu_s, time.monotonic()
    fps = _watched(server, seconds)
    return fps, fps * (time.monotonic() - began) / (server.cpu_s - used)


def _watched(servers: Served | Sequence[Served], seconds: float) -> float:
    """Frames a second of all cameras, over ``seconds`` and for as long as there is none."""
    servers = [servers] if isinstance(servers, Served) else servers
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


def _until(done: Callable[[], bool]) -> None:
    """Wait for it. Raises UserError after START_S."""
    end = time.monotonic() + START_S
    while not done():
        if time.monotonic() > end:
            raise UserError(f"no {WATCHED} frames were watched in {START_S:g} s; measure a smaller model")
        time.sleep(0.05)
