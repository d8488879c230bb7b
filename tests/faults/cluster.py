"""Three real nodes of a cluster, 12 demo cameras, and every minute a fault of one of them at random.

``python tests/faults/cluster.py --minutes 10`` prints what came of each fault, and ends with 1 where anything was wrong: a
camera that was not watched again in time, watched twice, went on from another snapshot than its last, or gave no answer;
events of a watch that do not take turns; at the end, answers and memories other than those of the last snapshots, opened here.

Faults of all processes of a node: ``kill`` (SIGKILL), ``freeze`` (SIGSTOP, and back), ``slow`` (a tenth of its time), ``drain``
(SIGTERM); ``cut`` from the network, in network namespaces, which only root may make. ``--head`` kills the head at the end.
"""

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import psutil

from edgevlm import Session
from edgevlm.apps.run.memory_view import view_memory
from edgevlm.runtime.snapshots.directory import verified
from edgevlm.runtime.snapshots.format import Snapshot
from edgevlm.runtime.taught import OFFERED
from edgevlm.runtime.taught import ask as taught

KEY = "key-of-the-fault-test"
CAMERAS = [f"cam{number}" for number in range(12)]
FPS, STATE_EVERY_S, LEASE_S, GRACE_S = 1.0, 5.0, 15.0, 5.0
MEMORY_MB = 150  # of a node: the demo and seven of its cameras, so that all three are needed, and two do
SLACK_S = 25.0  # to open four cameras on a machine that does other things too
MOVED_S = LEASE_S + GRACE_S + SLACK_S
SLOW_S, TURN_S, RUNNING = 40.0, 1.0, 0.1  # how long a node is slow, and its turns: seconds, and the share that it runs
BACK_S = 300.0  # that a node may take to have cameras again, Ray included
QUESTIONS = [taught(kind, 0, 0, 0).text for kind in OFFERED]  # of each kind that the demo knows, about the same color and shape
NOW = "how many objects are there now?"
NEWNET = 0x40000000


class Network:
    """A network of this program's own, with a namespace for each node, so that a node can be cut off from the others."""

    def __init__(self):
        """Raises OSError where that is not allowed."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._setns, self._holders = libc.setns, {}
        run("ip link set lo up; ip link add bridge type bridge; ip link set bridge up")

    def add(self, name, ip):
        """A namespace; the words before a command that has it run there."""
        holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)  # it ends with this program
        self._holders[name] = holder
        while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        run(f"ip link add to-{name} type veth peer name out netns {holder.pid}; ip link set to-{name} master bridge up")
        inside = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        for command in ("ip link set lo up", f"ip addr add {ip}/24 dev out", "ip link set out up"):
            subprocess.run([*inside, *command.split()], check=True)
        return inside

    def enter(self, name):
        """Have this thread's connections begin there."""
        with open(f"/proc/{self._holders[name].pid}/ns/net") as namespace:
            if self._setns(namespace.fileno(), NEWNET):
                raise OSError("setns")

    def set(self, name, state):
        run(f"ip link set to-{name} {state}")

    def end(self):
        for holder in self._holders.values():
            holder.kill()


def run(commands):
    for command in commands.split(";"):
        subprocess.run(command.split(), check=True)


class Node:
    """One ``edgevlm serve --cluster`` with all its processes. inside: the words that begin a command in its namespace."""

    def __init__(self, folder, name, ip, head, inside, enter):
        self.folder, self.name, self.url = folder, name, f"http://{ip}:9200"
        joins = "head" if name == "a" else head
        settings = {"cluster.snapshots": folder / "shared", "cluster.node": name, "cluster.memory": MEMORY_MB}
        settings |= {"state_every": STATE_EVERY_S, "server.max_rate": 1000}
        self.command = [*inside, sys.executable, "-m", "edgevlm", "serve", "--cluster", f"{joins}:26379", "--host", ip]
        self.command += ["--port", "9200", "--key-file", str(folder / "key"), "--threads", "1", "--fps", str(FPS)]
        self.command += ["--state", str(folder / name)]
        self.command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        if name == "a":
            self.command += [part for camera in CAMERAS for part in ("--camera", f"{camera}=demo")]
        self.asker = ThreadPoolExecutor(1, "ask", *enter)
        self.log = folder / f"{name}.log"
        self.start()

    def start(self):
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def processes(self):
        with suppress(psutil.NoSuchProcess):
            return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        return []

    def send(self, number):
        """To all its processes."""
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def in_turns(self, seconds):
        """It runs for a tenth of the time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.send(signal.SIGSTOP)
            time.sleep(TURN_S * (1 - RUNNING))
            self.send(signal.SIGCONT)
            time.sleep(TURN_S * RUNNING)

    def get(self, path, body=None, here=False, timeout=30):
        """From its own namespace, where it can be asked even while it is cut off."""
        return self.asker.submit(self._get, path, body, here, timeout).result()

    def _get(self, path, body, here, timeout):
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        headers |= {"x-edgevlm-node": "t"} if here else {}
        data = None if body is None else json.dumps(body).encode()
        method = "PATCH" if path.count("/") == 3 and body and "state" in body else None
        asked = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(asked, timeout=timeout) as answer:
            return json.load(answer)

    def streams(self):
        """Cameras that it itself watches, by name; none where it does not answer."""
        with suppress(OSError, ValueError):
            return {each["id"]: each for each in self.get("/v1/streams", here=True, timeout=5)["data"]}
        return {}


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
    with suppress(OSError, ValueError, KeyError):
        found = {each["id"]: each for each in one.get("/v1/streams")["data"]}
        good = {node.name for node in nodes if node is not faulty}
        alright = all(each["state"] == "running" and each["node"] in good and each["stats"] for each in found.values())
        return found if len(found) == len(CAMERAS) and alright else None
    return None


def shared(nodes):
    """All cameras by name, where each runs and each node has some."""
    found = watched(nodes, None)
    return found if found and len({each["node"] for each in found.values()}) == len(nodes) else None


def twice(nodes):
    """Cameras of which two nodes take in frames."""
    counts = []
    for _ in range(2):
        counts.append(
            {(camera, node.name): each["frames_watched"] for node in nodes for camera, each in node.streams().items()}
        )
        time.sleep(3 / FPS)
    running = [camera for (camera, name), count in counts[1].items() if count > counts[0].get((camera, name), count)]
    return sorted({camera for camera in running if running.count(camera) > 1})


def late(node, before):
    """Cameras that a node which is back watches on as if nothing had been."""
    found = []
    for _ in range(5):
        for camera, each in node.streams().items():
            known = before.get(camera, {"epoch": None})
            if each["epoch"] == known["epoch"] and each["frames_watched"] > known["frames_watched"] + 2:
                found.append(camera)
        time.sleep(0.5)
    return sorted(set(found))


def newest(folder, camera):
    """The newest good snapshot of a camera: its file's name, its frames and when it was written; None where there is none."""
    for epoch in sorted((folder / "shared" / camera).glob("epoch-*[0-9]"), key=lambda path: -int(path.name[6:])):
        for path, found in verified(epoch):
            if isinstance(found, Snapshot):
                return path.name, found.about["session"]["frames"], found.about["written"]
    return None


def resumed(node, camera):
    """The snapshot that a node last said it went on from."""
    found = re.findall(rf"^{camera}: resumed from (\S+): ([\d,]+) frames", node.log.read_text(), re.MULTILINE)
    return (found[-1][0], int(found[-1][1].replace(",", ""))) if found else None


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


def asked(node, camera, question):
    body = {"model": camera, "messages": [{"role": "user", "content": question}], "temperature": 0}
    return node.get("/v1/chat/completions", body)["choices"][0]["message"]["content"].strip()


def unlike_snapshots(nodes, draw):
    """Pauses all cameras, notes what they answer and hold, kills all nodes, and opens the last snapshots: what is unlike."""
    for camera in CAMERAS:
        draw.choice(nodes).get(f"/v1/streams/{camera}", {"state": "paused"})
    time.sleep(2 * STATE_EVERY_S)  # a snapshot of what they held then
    told = {camera: draw.choice(nodes).get(f"/v1/streams/{camera}/memory") for camera in CAMERAS}
    answers = {camera: [asked(draw.choice(nodes), camera, question) for question in QUESTIONS] for camera in CAMERAS}
    for node in nodes:
        node.send(signal.SIGKILL)
        node.process.wait()
    wrong = []
    for camera in CAMERAS:
        folder = max((nodes[0].folder / "shared" / camera).glob("epoch-*[0-9]"), key=lambda path: int(path.name[6:]))
        copy = nodes[0].folder / "copies" / camera
        shutil.copytree(folder, copy)
        with Session.open("demo", state=copy) as session:
            view = view_memory(session)
            fractions = [[frame, round(float(part), 4)] for frame, part in zip(view.frames, view.fractions, strict=True)]
            held = [[each["frame"], each["fraction"]] for each in told[camera]["frames"]]
            if (view.watched, view.tokens, fractions) != (told[camera]["frames_watched"], told[camera]["tokens"], held):
                wrong.append(f"{camera}: {told[camera]['frames_watched']} frames were watched, its snapshot has {view.watched}")
            again = [str(session.ask(question)).strip() for question in QUESTIONS]
            if again != answers[camera]:
                wrong.append(f"{camera}: answered {answers[camera]}, its snapshot answers {again}")
    return wrong


class Run:
    """What is said of the run, and how often something was wrong."""

    def __init__(self, folder, seed):
        self.folder, self.draw, self.wrong, self.nodes, self.took = folder, random.Random(seed), 0, [], {}

    def say(self, line, is_wrong=False):
        print(f"{time.strftime('%H:%M:%S')} {'WRONG: ' if is_wrong else ''}{line}", flush=True)
        self.wrong += is_wrong

    def ready(self):
        """All cameras watched, each node with some."""
        return shared(self.nodes)

    def fault(self, node, fault, network):
        """One fault of a node, and back."""
        before, own = watched(self.nodes, None) or {}, node.streams()
        had = [camera for camera, each in before.items() if each["node"] == node.name]
        slow = threading.Thread(target=node.in_turns, args=(SLOW_S,))
        began = time.monotonic()
        if fault == "kill":
            node.send(signal.SIGKILL)
        elif fault == "freeze":
            node.send(signal.SIGSTOP)
        elif fault == "drain":
            node.process.terminate()
        elif fault == "cut":
            network.set(node.name, "down")
        else:
            slow.start()
        if fault == "slow":
            while slow.is_alive():
                self.none_twice()
        else:
            promised = {camera: newest(self.folder, camera) for camera in had} if fault in ("kill", "freeze") else {}
            self.moved(node, fault, had, promised)
            if fault == "cut":
                self.none_twice()
            self.answers([each for each in self.nodes if each is not node])
        if fault in ("kill", "drain"):
            try:
                code = node.process.wait(60)
                if fault == "drain" and code:
                    self.say(f"drain {node.name}: ended with {code}", True)
            except subprocess.TimeoutExpired:
                self.say(f"drain {node.name}: has not ended 60 s after", True)
                node.send(signal.SIGKILL)
            node.start()
        elif fault == "freeze":
            node.send(signal.SIGCONT)
            if found := late(node, own):
                self.say(f"{node.name} was frozen, and watched on: {found}", True)
        elif fault == "cut":
            network.set(node.name, "up")
        back = time.monotonic()
        self.none_twice()
        while until(self.ready, BACK_S) is None:
            self.say(f"{node.name} has no cameras {time.monotonic() - back:.0f} s after it came back", True)
            if node.process.poll() is not None:
                self.say(f"{node.name} ended: {node.log.read_text().splitlines()[-1]}", True)
                node.start()
        self.none_twice()
        what = f"{len(had)} cameras" if fault == "slow" else "back"
        times = f"{time.monotonic() - back:.0f} s after, {time.monotonic() - began:.0f} s in all"
        self.say(f"{fault} {node.name}: {what}, all shared {times}")

    def moved(self, node, fault, had, promised):
        """Wait until cameras are watched by others, and see from which snapshots."""
        fault_at, took = time.time(), until(lambda: watched(self.nodes, node), MOVED_S)
        if took is None:
            self.say(f"{fault} {node.name}: {len(had)} cameras not watched again within {MOVED_S:g} s", True)
            return
        told = {}

        def known():
            told.update(watched(self.nodes, node) or {})
            return all(told[camera]["lost_s"] is not None for camera in had)

        until(known, 10)
        lost = {camera: told[camera]["lost_s"] for camera in had if told[camera]["lost_s"] is not None}
        said = f"lost {sorted(lost.values())} s" if len(lost) == len(had) else f"what was lost is said only of {sorted(lost)}"
        self.say(f"{fault} {node.name}: {len(had)} cameras watched again after {took:.1f} s, {said}", len(lost) < len(had))
        self.took.setdefault(fault, []).append((took, max(lost.values(), default=0.0)))
        for camera, snapshot in promised.items():
            name, frames, written = snapshot or ("none", 0, fault_at)
            now_at = next(each for each in self.nodes if each.name == told[camera]["node"])
            if snapshot and resumed(now_at, camera) != (name, frames):
                self.say(f"{camera}: went on from {resumed(now_at, camera)}, not from {snapshot}", True)
            if snapshot and not fault_at - written - 1 <= lost.get(camera, -1) <= time.time() - written + 1:
                self.say(f"{camera}: lost {lost.get(camera)} s, of {fault_at - written:.1f} s at the fault", True)

    def answers(self, nodes):
        """All cameras answer, asked of these nodes."""
        answered = 0
        for camera in CAMERAS:
            with suppress(OSError, ValueError, KeyError):
                answered += re.fullmatch(r"\d+", asked(self.draw.choice(nodes), camera, NOW)) is not None
        if answered < len(CAMERAS):
            self.say(f"{answered} of {len(CAMERAS)} cameras answered", True)

    def none_twice(self):
        if found := twice(self.nodes):
            self.say(f"watched twice: {found}", True)

    def head(self):
        """The head's processes killed, all of them, and started again with the same folder."""
        head, before = self.nodes[0], watched(self.nodes, None)
        head.send(signal.SIGKILL)
        head.process.wait()
        began = time.monotonic()
        while time.monotonic() < began + LEASE_S + GRACE_S:
            self.none_twice()
        head.start()
        while (took := until(self.ready, 2 * BACK_S)) is None:
            self.say(f"not well again {time.monotonic() - began:.0f} s after the head was killed", True)
        after = watched(self.nodes, None) or {}
        back = [camera for camera in after if after[camera]["epoch"] < before[camera]["epoch"]]
        lost = sorted(each["lost_s"] for each in after.values() if each["lost_s"] is not None)
        if back:
            self.say(f"epochs went back: {back}", True)
        self.none_twice()
        self.say(f"head killed, and started again after {LEASE_S + GRACE_S:g} s: all is well {took:.0f} s later, lost {lost} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default="kill,freeze,cut,slow,drain")
    parser.add_argument("--head", action="store_true", help="kill the head at the end, and start it again")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="edgevlm-cluster-"))
    (folder / "key").write_text(KEY)
    run, faults, network = Run(folder, given.seed), given.faults.split(","), None
    nodes, ips, inside = run.nodes, [f"127.0.0.{number}" for number in (1, 2, 3)], [[], [], []]
    with ExitStack() as ends:
        try:
            network = Network()
            ends.callback(network.end)
            ips = [f"10.77.0.{number}" for number in (1, 2, 3)]
            inside = [network.add(name, ip) for name, ip in zip("abc", ips, strict=True)]
        except OSError as error:
            run.say(f"no network namespaces ({error}): all nodes on loopback, none is cut off")
            faults = [fault for fault in faults if fault != "cut"]
        ends.callback(end, nodes)
        for name, ip, words in zip("abc", ips, inside, strict=True):
            enter = () if network is None else (network.enter, (name,))
            nodes.append(Node(folder, name, ip, ips[0], words, enter))
            if until(lambda: nodes[-1].get("/v1/nodes"), BACK_S) is None:
                raise SystemExit(f"node {name} did not start: {nodes[-1].log.read_text()[-2000:]}")
        if until(run.ready, BACK_S) is None:
            raise SystemExit("the cameras were not opened")
        nodes[0].get("/v1/watches", {"name": "red", "question": "is there a red square?", "every": 1})
        run.say(f"12 cameras on {sorted({each['node'] for each in watched(nodes, None).values()})}; logs: {folder}")
        end_at, turn = time.monotonic() + 60 * given.minutes, []
        try:
            while time.monotonic() < end_at:
                began, turn = time.monotonic(), turn or run.draw.sample(faults, len(faults))
                run.fault(run.draw.choice(nodes[1:]), turn.pop(), network)
                time.sleep(max(0.0, 60 - (time.monotonic() - began)))
            if given.head:
                run.head()
            wrong, count = event_problems(nodes)
            for line in wrong:
                run.say(f"events do not take turns: {line}", True)
            run.say(f"{count} events of {len(CAMERAS)} cameras")
            wrong = unlike_snapshots(nodes, run.draw)
            for line in wrong:
                run.say(line, True)
            run.say(f"answers and memory of {len(CAMERAS) - len(wrong)} cameras are those of their last snapshots")
        except urllib.error.HTTPError as error:
            run.say(f"{error.url}: {error.read().decode()[:300]}", True)
    for fault, found in sorted(run.took.items()):
        took, lost = zip(*found, strict=True)
        run.say(f"{fault}: {len(found)} times, watched again after {max(took):.1f} s at most, lost {max(lost):.1f} s at most")
    run.say(f"{run.wrong} wrong")
    sys.exit(bool(run.wrong))


def end(nodes):
    for node in reversed(nodes):
        node.send(signal.SIGCONT)
        node.process.terminate()
    for node in nodes:
        try:
            node.process.wait(60)
        except subprocess.TimeoutExpired:
            node.send(signal.SIGKILL)


if __name__ == "__main__":
    main()
