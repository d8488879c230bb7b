"""A server over a long stream of the demo, with questions, snapshots and a camera that fails now and then: what it takes.

``python tests/soak.py hybrid docs/soak.jsonl --frames 1000000`` adds a line every thousand frames, and ``python
docs/pictures.py`` draws them. Every frame of the demo world is watched, at ``--rate`` a second. ``python tests/soak.py memory
docs/requests.jsonl --requests 100000``, and ``questions``, send a paused camera that many requests, a line every thousand.
"""

import argparse
import http.client
import json
import random
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from edgevlm.apps.sources.demo import DemoSource
from edgevlm.calib.demo.questions import is_about_now
from edgevlm.runtime.taught import COLOR, COLORS, KINDS, OFFERED, SHAPE, SHAPES, parse

EVERY = 1000  # frames from one line to the next
ASK_EVERY = 50  # frames
POLL_S, FAIL_S, SNAPSHOT_S = 0.2, 20.0, 15.0
FAULTS = ("hangup", "mode garbage", "mode ok", "size 1", "mode half", "mode ok", "size 0", "mode mute", "mode ok")
PICTURE_S = 0.5  # of the camera that fails


class SteadyDemo(DemoSource):
    """The demo, so many frames a second of the real clock: ``tests/soak.py:SteadyDemo:100``."""

    live = True

    def __init__(self, target, options):
        super().__init__(None, options.seed)
        self._pause, self._due = 1 / float(target), time.monotonic()

    def read(self):
        self._due = max(self._due + self._pause, time.monotonic())
        time.sleep(max(0.0, self._due - time.monotonic()))
        return super().read()


def listen(server, found):
    """All answers of the stream, as its listeners are told of them."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request("GET", "/v1/streams/demo/events")
    event = b""
    for line in connection.getresponse():
        if line.startswith(b"event:"):
            event = line[6:].strip()
        elif line.startswith(b"data:") and event == b"answer":
            found.append(json.loads(line[5:]))


def question(drawn):
    text = drawn.choice(KINDS[drawn.choice(OFFERED)].phrasings)
    return text.replace(COLOR, drawn.choice(COLORS)).replace(SHAPE, drawn.choice(SHAPES))


def measured(server, told):
    """What the server takes now, and what became of the questions since the line before."""
    process, line = psutil.Process(server.process.pid), {}
    with process.oneshot():
        line |= {"cpu_s": round(sum(process.cpu_times()[:2])), "rss_bytes": process.memory_info().rss}
        line |= {"descriptors": process.num_fds(), "threads": process.num_threads(), "processes": len(process.children())}
    line["reconnects"] = (server.get("/v1/streams/failing")["stats"] or {}).get("reconnects", 0)
    if told:
        p50, p95 = np.percentile([each["ttft_ms"] for each in told], [50, 95])
        line |= {"asked": len(told), "ttft_ms_p50": round(p50, 2), "ttft_ms_p95": round(p95, 2)}
    now = [each["text"] == each.get("truth") for each in told if is_about_now(parse(each["question"]).kind) and "truth" in each]
    return line | {"now": len(now), "right": sum(now)}


def configuration(policy, budget, rate, camera, folder):
    """edgevlm.toml of the server: the steady demo, and the camera that fails."""
    lines = [f'policy = "{policy}"', f"budget = {budget}", "fps = 1000", "threads = 1", f"state_every = {SNAPSHOT_S}"]
    lines += ["[cameras.demo]", f'source = "{Path(__file__).resolve()}:SteadyDemo:{rate}"']
    lines += ["[cameras.failing]", f'source = "http://127.0.0.1:{camera.port}/"', "fps = 2"]
    path = folder / "edgevlm.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def soak(policy, out, frames, hours, rate, budget, folder):
    from processes import mjpeg_camera  # which the server, that reads this file, does not have
    from served import serving

    (folder / "pictures").mkdir()
    drawn, told, began = random.Random(0), [], time.monotonic()
    with mjpeg_camera(folder / "pictures") as camera:
        camera.tell(f"pause {PICTURE_S}")
        with serving(folder, configuration(policy, budget, rate, camera, folder)) as server:
            threading.Thread(target=list, args=(server.process.stdout,), daemon=True).start()  # nobody reads what it says
            threading.Thread(target=listen, args=(server, told), daemon=True).start()
            done, asked, fails, next_fail = 0, 0, 0, time.monotonic() + FAIL_S
            while done < frames and time.monotonic() < began + 3600 * hours:
                time.sleep(POLL_S)
                reached, seconds = server.get("/v1/streams/demo")["frames_watched"], time.monotonic() - began
                if reached >= asked + ASK_EVERY:
                    messages = [{"role": "user", "content": question(drawn)}]
                    asking = server.client.with_options(max_retries=5)  # a connection may be closed as idle just then
                    asking.chat.completions.create(model="demo", messages=messages)
                    asked = reached
                if time.monotonic() > next_fail:
                    camera.tell(FAULTS[fails % len(FAULTS)])
                    fails, next_fail = fails + 1, next_fail + FAIL_S
                if reached // EVERY > done // EVERY:
                    answers, told[:] = told[:], []
                    line = {"policy": policy, "budget": budget, "frames": reached, "seconds": round(seconds)}
                    out.write(json.dumps(line | measured(server, answers)) + "\n")
                    out.flush()
                done = reached
            return server.end()


def requests(kind, out, count, folder):
    """What the server takes while a paused camera is asked for its memory, or questions that differ."""
    from served import serving

    (folder / "edgevlm.toml").write_text('threads = 1\n[server]\nmax_rate = 1e6\n[cameras.demo]\nsource = "demo"\nfps = 8\n')
    drawn, began = random.Random(0), time.monotonic()
    with serving(folder, folder / "edgevlm.toml") as server:
        server.watched("demo", 64)
        server.request("PATCH", "/v1/streams/demo", {"state": "paused"})
        link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        for number in range(count + 1):
            if number % EVERY == 0:
                taken = psutil.Process(server.process.pid).memory_info().rss
                line = {"kind": kind, "requests": number, "seconds": round(time.monotonic() - began), "rss_bytes": taken}
                out.write(json.dumps(line) + "\n")
                out.flush()
            if kind == "memory":
                link.request("GET", "/v1/streams/demo/memory")
            else:
                body = {"messages": [{"role": "user", "content": question(drawn)}]}
                link.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            response = link.getresponse()
            assert response.read(), response.status
            assert response.status == 200, response.status
        return server.end()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("policy", help="or `memory` or `questions`")
    options.add_argument("out", type=Path)
    options.add_argument("--frames", type=int, default=100_000)
    options.add_argument("--hours", type=float, default=24, help="end then at the latest")
    options.add_argument("--rate", type=float, default=100, help="frames a second")
    options.add_argument("--budget", type=int, default=512)
    options.add_argument("--requests", type=int, default=100_000, help="of `memory` and `questions`")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch, given.out.open("a") as file:
        if given.policy in ("memory", "questions"):
            raise SystemExit(requests(given.policy, file, given.requests, Path(scratch)))
        wanted = given.frames, given.hours, given.rate, given.budget
        print(f"the server ended with {soak(given.policy, file, *wanted, Path(scratch))}")
