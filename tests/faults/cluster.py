"""Three real nodes of a cluster on loopback, 12 demo cameras, and a node killed or frozen every minute at random.

``python tests/faults/cluster.py --minutes 10`` prints what came of each fault, and ends with 1 where anything was wrong: a
camera that was not watched again in time, watched twice, went on from less than its last snapshot, or gave no answer; events
of a watch that do not take turns.
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

KEY = "key-of-the-fault-test"
CAMERAS = [f"cam{number}" for number in range(12)]
FPS, STATE_EVERY_S, LEASE_S, GRACE_S = 1.0, 5.0, 15.0, 5.0
MEMORY_MB = 150  # of a node: the demo and seven of its cameras, so that all three are needed, and two do
SLACK_S = 25.0  # to open four cameras on a machine that does other things too
MOVED_S = LEASE_S + GRACE_S + SLACK_S
NOW = "how many objects are there now?"


class Node:
    """One ``edgevlm serve --cluster`` with all its processes."""

    def __init__(self, folder, name, number, port):
        self.folder, self.name, self.ip = folder, name, f"127.0.0.{number}"
        self.url = f"http://{self.ip}:{port}"
        joins = "head" if name == "a" else "127.0.0.1"
        settings = {"cluster.snapshots": folder / "shared", "cluster.node": name, "cluster.memory": MEMORY_MB}
        settings |= {"state_every": STATE_EVERY_S, "server.max_rate": 1000}
        self.command = [sys.executable, "-m", "edgevlm", "serve", "--cluster", f"{joins}:26379", "--host", self.ip]
        self.command += ["--port", str(port), "--key-file", str(folder / "key"), "--threads", "1", "--fps", str(FPS)]
        self.command += ["--state", str(folder / name)]
        self.command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        if name == "a":
            self.command += [part for camera in CAMERAS for part in ("--camera", f"{camera}=demo")]
        self.start()

    def start(self):
        with open(self.folder / f"{self.name}.log", "a") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.is_up = True

    def send(self, number):
        """To all its processes."""
        with suppress(psutil.NoSuchProcess):
            whole = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
            for each in whole:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)

    def get(self, path, body=None, here=False, timeout=30):
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"} | (
            {"x-edgevlm-node": "t"} if here else {}
        )
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=timeout) as answer:
            return json.load(answer)


def until(found, seconds):
    """Seconds until it was true; None where it was not in time."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        with suppress(OSError, ValueError, KeyError):
            if found():
                return time.monotonic() - began
        time.sleep(0.5)
    return None


def watched(nodes, faulty):
    """All cameras by name, where each runs on a node without a fault."""
    one = next(node for node in nodes if node is not faulty)
    found = {each["id"]: each for each in one.get("/v1/streams")["data"]}
    good = {node.name for node in nodes if node is not faulty}
    alright = all(each["state"] == "running" and each["node"] in good and each["stats"] for each in found.values())
    return found if len(found) == len(CAMERAS) and alright else None


def shared(nodes):
    """All cameras by name, where each runs and each node has some."""
    found = watched(nodes, None)
    return found if found and len({each["node"] for each in found.values()}) == len(nodes) else None


def twice(nodes):
    """Cameras of which two nodes take in frames."""
    counts = []
    for _ in range(2):
        seen = {}
        for node in nodes:
            with suppress(OSError, ValueError):
                for each in node.get("/v1/streams", here=True, timeout=5)["data"]:
                    seen[each["id"], node.name] = each["frames_watched"]
        counts.append(seen)
        time.sleep(3 / FPS)
    running = [camera for (camera, name), count in counts[1].items() if count > counts[0].get((camera, name), count)]
    return sorted({camera for camera in running if running.count(camera) > 1})


def event_problems(nodes):
    """Watches whose openings and closings do not take turns, and how many events there are."""
    events = {}
    for node in nodes:
        for each in node.get("/v1/events?limit=1000", here=True)["data"]:
            events[each["id"]] = each
    wrong = []
    for camera in CAMERAS:
        states = [each["state"] for each in sorted(events.values(), key=lambda each: each["time"]) if each["camera"] == camera]
        if any(first == second for first, second in pairwise(states)):
            wrong.append(f"{camera}: {' '.join(states)}")
    return wrong, len(events)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default="kill,freeze")
    parser.add_argument("--head", action="store_true", help="kill the head at the end, and start it again")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    draw, wrong = random.Random(given.seed), []

    def say(line, is_wrong=False):
        print(f"{time.strftime('%H:%M:%S')} {'WRONG: ' if is_wrong else ''}{line}", flush=True)
        if is_wrong:
            wrong.append(line)

    folder = Path(tempfile.mkdtemp(prefix="edgevlm-cluster-"))
    (folder / "key").write_text(KEY)
    nodes = []
    try:
        for number, name in enumerate("abc", 1):
            nodes.append(Node(folder, name, number, 9200 + number))
            if until(lambda: nodes[-1].get("/v1/nodes"), 180) is None:
                raise SystemExit(f"node {name} did not start: {(folder / f'{name}.log').read_text()[-2000:]}")
        if until(lambda: shared(nodes), 180) is None:
            raise SystemExit("the cameras were not opened")
        nodes[0].get("/v1/watches", {"name": "red", "question": "is there a red square?", "every": 1})
        say(f"12 cameras on {sorted({each['node'] for each in watched(nodes, None).values()})}")
        end = time.monotonic() + 60 * given.minutes
        while time.monotonic() < end:
            began, before = time.monotonic(), watched(nodes, None) or {}
            node, fault = draw.choice(nodes[1:]), draw.choice(given.faults.split(","))
            had = [camera for camera, each in before.items() if each["node"] == node.name]
            node.send(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            took = until(lambda node=node: watched(nodes, node), MOVED_S)
            after = {} if took is None else watched(nodes, node) or {}
            if took is None:
                say(f"{fault} {node.name}: {len(had)} cameras not watched again within {MOVED_S:g} s", True)
            else:
                lost = [after[camera]["lost_s"] for camera in had if after.get(camera, {}).get("lost_s") is not None]
                say(f"{fault} {node.name}: {len(had)} cameras watched again after {took:.1f} s, lost {sorted(lost)} s")
                for camera in had:
                    least = before[camera]["frames_watched"] - FPS * (STATE_EVERY_S + 3)
                    if after and after[camera]["frames_watched"] < least:
                        say(f"{camera}: goes on from {after[camera]['frames_watched']} frames, {least:.0f} expected", True)
            asked, answered = [each for each in nodes if each is not node], 0
            for camera in CAMERAS:
                with suppress(OSError, ValueError, KeyError):
                    body = {"model": camera, "messages": [{"role": "user", "content": NOW}]}
                    answer = draw.choice(asked).get("/v1/chat/completions", body)
                    answered += re.fullmatch(r"\d+", answer["choices"][0]["message"]["content"].strip()) is not None
            if answered < len(CAMERAS):
                say(f"{answered} of {len(CAMERAS)} cameras answered", True)
            if fault == "freeze":
                node.send(signal.SIGCONT)
            else:
                node.process.wait()
                node.start()
            if found := twice(nodes):
                say(f"watched twice: {found}", True)
            if until(lambda: shared(nodes), 120) is None:
                say(f"{node.name} has no cameras 120 s after it came back", True)
            if found := twice(nodes):
                say(f"watched twice: {found}", True)
            time.sleep(max(0.0, 60 - (time.monotonic() - began)))
        if given.head:
            nodes[0].send(signal.SIGKILL)
            nodes[0].process.wait()
            began = time.monotonic()
            while time.monotonic() < began + LEASE_S + GRACE_S:
                if found := twice(nodes[1:]):
                    say(f"watched twice while the head was away: {found}", True)
            nodes[0].start()
            if until(lambda: shared(nodes), 300) is None:
                say("not well again 300 s after the head came back", True)
            else:
                say(f"head killed, and started again: all is well {time.monotonic() - began:.0f} s after the kill")
        unlike, count = event_problems(nodes)
        for line in unlike:
            say(f"events do not take turns: {line}", True)
        say(f"{count} events; {len(wrong)} wrong")
    except urllib.error.HTTPError as error:
        say(f"{error.url}: {error.read().decode()[:300]}", True)
    finally:
        for node in reversed(nodes):
            node.send(signal.SIGCONT)
            node.process.terminate()
        for node in nodes:
            try:
                node.process.wait(60)
            except subprocess.TimeoutExpired:
                node.send(signal.SIGKILL)
        print(f"logs: {folder}", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
