"""Whether the page of ``edgevlm serve`` grows while it stays open for hours, or the server does.

Time is simulated: each second of it the camera gives a frame, the server sends its figures, and the page's clock moves on by a
second, once everything that it looks for then is there and drawn. Timers, polls, events, pictures and what becomes too old are
those of so many hours; only the waiting between them is left out. Before each sample the browser collects its garbage. It is
told what to do without Playwright, which makes it keep something of all that a page loads: of this one 90 MB an hour.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import uvicorn

from edgevlm.apps.run import memory_view
from edgevlm.apps.serve import http
from edgevlm.apps.serve.config import CameraSettings, ServeConfig, ServerSettings
from edgevlm.apps.serve.run import bound, uvicorn_config
from edgevlm.apps.serve.service import Service
from edgevlm.apps.sources import Frame
from edgevlm.bench.serve import EagerDemo
from edgevlm.errors import UserError
from edgevlm.progress import Notify, to_stderr

FPS = 1.0  # of the camera
BUDGET = 256  # tokens of its memory: what is drawn of it takes as long as it is large
POLL = 3  # simulated seconds from one look of the page at the memory to the next
STEP = 15  # that pass between two words with the browser
LEAST = 12  # samples
HOUR = 3600
CLOCK = """(() => {
  const timers = new Map(), start = Date.now(), get = fetch;
  const paint = requestAnimationFrame.bind(window), wait = setTimeout.bind(window), forget = clearTimeout.bind(window);
  let now = 0, last = 0, look = () => {};
  window.setTimeout = (work, ms = 0, ...rest) => {
    timers.set(++last, { at: now + ms, ms, work: () => work(...rest) });
    look();
    return last;
  };
  window.clearTimeout = (id) => timers.delete(id);
  Date.now = () => start + now;
  window.polls = window.figures = 0;
  window.fetch = (path, ...rest) => { if (path.endsWith("/memory")) window.polls++; return get(path, ...rest); };
  const painted = () => new Promise(paint);
  const until = (done) => new Promise((go) => {
    const late = wait(go, 10000);
    look = () => { if (done()) { forget(late); go(); } };
    look();
  });
  const polled = () => [...timers.values()].filter(({ ms }) => ms === MEMORY_MS || ms === STREAMS_MS).length >= 3;
  window.simulate = async (seconds, heard) => {
    for (let second = 1; second <= seconds; second++) {
      now += 1000;
      for (const [id, { at, work }] of [...timers]) if (at <= now && timers.delete(id)) work();
      await until(() => polled() && window.figures >= heard + second);
      await painted();
    }
  };
  addEventListener("DOMContentLoaded", () => {
    const before = heard;
    heard = (name, event, data) => { if (event === "stats") window.figures++; before(name, event, data); look(); };
  });
})()"""
ALONE = ("--no-sandbox", "--no-first-run", "--disable-background-networking", "--disable-component-update")
FLAGS = (*ALONE, "--disable-frame-rate-limit", "--disable-gpu-vsync")
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}  # drawn in less time than a large window
METRICS = {"JSHeapUsedSize": "heap_bytes", "Nodes": "nodes", "JSEventListeners": "listeners"}
RELEASED = threading.Semaphore(0)  # frames that the camera may give


class Browser:
    """Chromium without a window, and its page. It is told what to do, by its DevTools protocol, through a pipe."""

    def __init__(self, program: str, folder: str) -> None:
        (told, self._tell), (self._hear, heard) = os.pipe(), os.pipe()

        def at_3_and_4() -> None:
            for place, end in enumerate((os.dup(told), os.dup(heard)), 3):
                os.dup2(end, place)

        command = [program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={folder}", *FLAGS, "about:blank"]
        self.process = subprocess.Popen(command, preexec_fn=at_3_and_4, close_fds=False, stderr=subprocess.DEVNULL)
        os.close(told)
        os.close(heard)
        self._rest, self._sent, self._session = b"", 0, {}
        shown = next(each for each in self.do("Target.getTargets")["targetInfos"] if each["type"] == "page")
        session = self.do("Target.attachToTarget", targetId=shown["targetId"], flatten=True)["sessionId"]
        self._session = {"sessionId": session}

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result. Raises UserError where the browser refuses, or has ended."""
        self._sent += 1
        said = {"id": self._sent, "method": method, "params": parameters, **self._session}
        os.write(self._tell, json.dumps(said).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._hear, 1 << 20)
                if not read:
                    raise UserError("the browser ended")
                self._rest += read
            line, _, self._rest = self._rest.partition(b"\0")
            answer: dict[str, Any] = json.loads(line)
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise UserError(f"the browser refuses {method}: {answer['error']['message']}")
                return dict(answer["result"])

    def evaluate(self, script: str) -> Any:
        """What a script in the page comes to. Raises UserError."""
        found = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise UserError(f"the page fails: {found['exceptionDetails']['text']}")
        return found["result"].get("value")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._tell)
        os.close(self._hear)


class SteppedDemo(EagerDemo):
    """The demo, which gives a frame when it is told to."""

    def read(self) -> Frame | None:
        import_module("edgevlm.bench.page").RELEASED.acquire()
        return super().read()


def page(model: str = "demo", hours: float = 1.0, *, progress: Notify = lambda what: None) -> Iterator[dict[str, Any]]:
    """A line for each simulated hour, LEAST at least, and one with the growth an hour over the second half of them.

    That is by least squares: what fills up once, like thumbnails, is full by then if ``hours`` are many enough.

    Raises UserError where there is no browser.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise UserError("bench serve page needs chromium on the PATH (apt install chromium)")
    samples: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder:
        command = [sys.executable, "-c", f"from edgevlm.bench.page import keep_serving as s; s({model!r}, {folder!r})"]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdin is not None
        assert server.stdout is not None
        browser = Browser(chromium, f"{folder}/browser")
        try:
            url = server.stdout.readline().strip()
            if not url:
                raise UserError("the server did not start; see above")
            browser.do("Emulation.setDeviceMetricsOverride", **PHONE)
            browser.do("Page.enable")
            browser.do("Page.addScriptToEvaluateOnNewDocument", source=CLOCK)
            browser.do("Page.navigate", url=url)
            while not browser.evaluate("window.simulate && document.readyState === 'complete'"):
                time.sleep(0.05)
            browser.do("Performance.enable")
            watched, sent, steps = 0, 0, max(1, round(hours * HOUR / STEP))
            every = max(1, min(HOUR // STEP, steps // LEAST))
            for step in range(1, steps + 1):
                server.stdin.write(f"{STEP}\n")
                server.stdin.flush()
                browser.evaluate(f"simulate({STEP}, {sent})")
                watched, sent, pictures = map(int, server.stdout.readline().split())
                if step % every:
                    continue
                for _ in range(2):  # what wraps a node goes first, then the node
                    browser.do("HeapProfiler.collectGarbage")
                found = {each["name"]: each["value"] for each in browser.do("Performance.getMetrics")["metrics"]}
                heard, polls = browser.evaluate("[figures, polls]")
                done = min(watched / FPS, pictures / FPS, heard, polls * POLL) / HOUR
                measured = {ours: int(found[theirs]) for theirs, ours in METRICS.items()}
                measured |= {"rss_bytes": rss(server.pid), "browser_bytes": own_bytes(browser.process.pid)}
                samples.append({"bench": "serve-page", "hours": round(done, 3), **measured})
                progress(f"hour {done:.2f} of {hours:g}")
                yield samples[-1]
        finally:
            browser.close()
            server.kill()
            server.wait()
    late = samples[len(samples) // 2 :]
    times, sizes = [each["hours"] for each in late], (*METRICS.values(), "rss_bytes", "browser_bytes")
    grown = {name: round(float(np.polyfit(times, [each[name] for each in late], 1)[0]), 1) for name in sizes}
    yield {"bench": "serve-page-growth", "model": model, "hours": round(times[-1] - times[0], 3), **grown}


def rss(process: int) -> int:
    return int(psutil.Process(process).memory_info().rss)


def own_bytes(process: int) -> int:
    """Resident memory of a process and its children, but for what is shared: how that counts depends on other programs."""
    found, main = 0, psutil.Process(process)
    for each in (main, *main.children(recursive=True)):
        with suppress(psutil.Error):
            memory = each.memory_info()
            found += memory.rss - memory.shared
    return found


def keep_serving(model: str, folder: str) -> None:
    """Serve and print the address; for each number on stdin let so many seconds pass, and print the frames watched, the figures
    and the pictures sent; until stdin ends."""
    http.POLL_S, http.MJPEG_FPS, memory_view.EVERY_S = 0.02, 1000.0, 0.0
    camera = CameraSettings(source=f"{__file__}:SteppedDemo", fps=FPS)
    server_settings = ServerSettings(max_rate=1e6)
    config = ServeConfig(
        model=model, threads=1, budget=BUDGET, state=folder, state_every=10.0, cameras={"demo": camera}, server=server_settings
    )
    service, listening = Service(config, to_stderr), bound("127.0.0.1", 0)
    began, watched, sent, pictures = time.time(), 0, 0, 0
    time.time = lambda: began + watched / FPS  # the clock that thumbnails and events are kept by
    service.open()
    stream = service.stream("demo")
    tell, show = stream.stats_line, stream.jpeg

    def shown() -> bytes | None:
        nonlocal pictures
        pictures += 1
        return show()

    stream.stats_line, stream.jpeg = lambda stats: None, shown  # type: ignore[method-assign]
    server = uvicorn.Server(uvicorn_config(http.make_app(service), service))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    for line in sys.stdin:
        for _ in range(int(line)):
            watched += 1
            RELEASED.release()
            end = time.monotonic() + 1.0
            while (stream.session.stats.frames < watched or pictures < watched) and time.monotonic() < end:
                time.sleep(0.002)
            tell(stream.loop.stats())
            sent += 1
        print(stream.session.stats.frames, sent, pictures, flush=True)
