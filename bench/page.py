"""Whether the page of ``edgevlm serve`` grows when it stays open, or the server does.

A demo camera gives frames as fast as they are taken, a process of its own serves it and sends the figures that it sends each
second SPEED times a second, and the page's clock runs SPEED times as fast, so that it looks as often. Simulated time is that of
the slowest of the three. Before each sample the browser collects its garbage.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import uvicorn

from edgevlm.apps.run.events import to_stderr
from edgevlm.apps.serve.config import CameraSettings, ServeConfig
from edgevlm.apps.serve.http import make_app
from edgevlm.apps.serve.run import bound, uvicorn_config
from edgevlm.apps.serve.service import Service
from edgevlm.apps.serve.stream import described
from edgevlm.bench import serve as eager
from edgevlm.engines.threads import default_threads
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Progress

SPEED = 100.0
FPS = 2.0  # of a camera, were it not sped up
POLL_S = 3.0  # of the page, for what the memory holds
SAMPLES = 12
FASTER = f"""
const real = setTimeout, get = fetch;
window.setTimeout = (work, ms, ...rest) => real(work, ms / {SPEED}, ...rest);
window.polls = 0;
window.fetch = (path, ...rest) => {{ if (path.endsWith("/memory")) window.polls++; return get(path, ...rest); }};
"""
METRICS = {"JSHeapUsedSize": "heap_bytes", "Nodes": "nodes", "JSEventListeners": "listeners"}


def page(model: str = "demo", seconds: float = 180.0, *, progress: Progress = lambda what: None) -> Iterator[dict[str, Any]]:
    """A line for each of SAMPLES moments, and one with the growth an hour of simulated time over them, by least squares.

    Raises UserError where there is no browser.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise UserError("bench serve page needs a browser: pip install playwright") from None
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise UserError("bench serve page needs chromium on the PATH (apt install chromium)")
    samples: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="edgevlm-bench-") as folder, sync_playwright() as started:
        command = [sys.executable, "-c", f"from edgevlm.bench.page import keep_serving as s; s({model!r}, {folder!r})"]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            if not url:
                raise UserError("the server did not start; see above")
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            opened = browser.new_page()
            opened.set_default_timeout(60_000)
            opened.add_init_script(FASTER)
            opened.goto(url)
            opened.locator("#frames [role=option]").first.wait_for()
            session = opened.context.new_cdp_session(opened)
            session.send("Performance.enable")
            opened.wait_for_timeout(1000 * seconds / SAMPLES)
            for number in range(SAMPLES):
                progress(f"sample {number + 1} of {SAMPLES}")
                opened.wait_for_timeout(1000 * seconds / SAMPLES)
                for _ in range(2):  # what wraps a node goes first, then the node
                    session.send("HeapProfiler.collectGarbage")
                found = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
                server.stdin.write("\n")
                server.stdin.flush()
                frames, events = map(int, server.stdout.readline().split())
                hours = min(frames / FPS, events, opened.evaluate("polls") * POLL_S) / 3600
                measured = {ours: int(found[theirs]) for theirs, ours in METRICS.items()}
                rss = int(psutil.Process(server.pid).memory_info().rss)
                samples.append({"bench": "serve-page", "hours": round(hours, 3), **measured, "rss_bytes": rss})
                yield samples[-1]
            browser.close()
        finally:
            server.kill()
            server.wait()
    hours, sizes = [each["hours"] for each in samples], (*METRICS.values(), "rss_bytes")
    grown = {name: round(float(np.polyfit(hours, [each[name] for each in samples], 1)[0]), 1) for name in sizes}
    yield {"bench": "serve-page-growth", "model": model, "hours": round(hours[-1] - hours[0], 3), **grown}


def keep_serving(model: str, folder: str) -> None:
    """Serve, print the address, and for each line on stdin the frames watched and the figures sent; until stdin ends."""
    camera = CameraSettings(source=f"{eager.__file__}:EagerDemo")
    config = ServeConfig(model=model, threads=default_threads(), fps=1000.0, state=folder, cameras={"demo": camera})
    service, listening = Service(config, to_stderr), bound("127.0.0.1", 0)
    service.open()
    stream = service.stream("demo")
    server = uvicorn.Server(uvicorn_config(make_app(service), service))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    while stream.stats is None or not server.started:
        time.sleep(0.05)
    sent = 0

    def send() -> None:
        nonlocal sent
        while True:
            time.sleep(1 / SPEED)
            if stream.stats is not None:
                stream.events.send("stats", described(stream.stats))
                sent += 1

    threading.Thread(target=send, daemon=True).start()
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    for _ in sys.stdin:
        print(stream.session.stats.frames, sent, flush=True)
