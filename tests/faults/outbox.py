"""A program that records and delivers events is killed, at each write in turn and at random moments, and started again.

``python tests/faults/outbox.py 200`` kills it 200 times and prints what came of it. No event that was recorded may be lost;
one may come twice, with the same id; those that come for the first time come in order.
"""

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

EVENTS = 3  # that a program records before it ends
LONGEST_MS = 400  # that it lives before it is killed at a random moment
KILLER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>
static long count, last;
void kill_at(long number) { count = 0; last = number; }
long writes(void) { return count; }
static int due(void) { return __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST) == last; }
#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))
#define WRITES(name, declared, half, ...) \
  ssize_t name declared { if (due()) { REAL(name) half; kill(getpid(), SIGKILL); } return REAL(name)(__VA_ARGS__); }
WRITES(write, (int fd, const void *p, size_t n), (fd, p, n / 2), fd, p, n)
WRITES(pwrite64, (int fd, const void *p, size_t n, off64_t at), (fd, p, n / 2, at), fd, p, n, at)
int fdatasync(int fd) { if (due()) kill(getpid(), SIGKILL); return REAL(fdatasync)(fd); }
int fsync(int fd) { if (due()) kill(getpid(), SIGKILL); return REAL(fsync)(fd); }
int ftruncate64(int fd, off64_t n) { if (due()) kill(getpid(), SIGKILL); return REAL(ftruncate64)(fd, n); }
ssize_t send(int fd, const void *p, size_t n, int flags)
{ if (due()) kill(getpid(), SIGKILL); return REAL(send)(fd, p, n, flags); }
"""


@dataclass
class Result:
    """at_writes, at_random: kills. acknowledged: events whose record returned. repeated: arrivals of one that had come."""

    at_writes: int = 0
    at_random: int = 0
    acknowledged: int = 0
    lost: int = 0
    repeated: int = 0
    out_of_order: int = 0


def program(state: str, url: str, first: int) -> int:
    """Record EVENTS events from number ``first`` on, tell of each, and deliver what there is; returns how many wait."""
    from edgevlm.apps.watches import delivery as module
    from edgevlm.apps.watches.events import EventStore, WatchEvent
    from edgevlm.apps.watches.sinks import Webhook

    module.FIRST_S = 0.01
    store = EventStore(state, days=1e6)
    delivery = module.Delivery(store, {"hook": Webhook(url)}, lambda line: None)
    for number in range(first, first + EVENTS):
        delivery.record(WatchEvent("door", "parcel", "open", 1e9 - number, 0.9, float(number)), [bytes(5000)])
        os.write(1, f"recorded {number}\n".encode())
    delivery.close()
    waiting = sum(store.waiting().values())
    store.close()
    return waiting


def nursery(state: str, url: str) -> None:
    """Run a program, a process of its own, for each line of stdin.

    A line has the first number, the write to be killed at or 0, and milliseconds to be killed after or 0.
    """
    import edgevlm.apps.watches.delivery
    import edgevlm.apps.watches.sinks  # noqa: F401, its children need not

    killer = ctypes.CDLL(None)
    for line in sys.stdin:
        first, at, after = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            if at:
                killer.kill_at(ctypes.c_long(at))
            waiting = program(state, url, first)
            os.write(1, f"ended {waiting}\nwrites {killer.writes() if hasattr(killer, 'writes') else 0}\n".encode())
            os._exit(0)
        if after:
            time.sleep(after / 1e3)
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.write(1, b"\nover 0\n")


class Receiver(ThreadingHTTPServer):
    """Notes the ids of events, in order; refuses one in ten."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.got, self.bodies, self.random = [], {}, random.Random(1)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if len(body) < int(self.headers["content-length"]):
            return  # it was killed while it sent
        refused = self.server.random.random() < 0.1
        if not refused:
            event = json.loads(body)["id"]
            assert self.server.bodies.setdefault(event, body) == body
            self.server.got.append(event)
        self.send_response(503 if refused else 204)
        self.end_headers()

    def log_message(self, *_):
        pass


def compiled(folder: Path) -> Path | None:
    """A library that kills its process at one of its writes, half done; None without a compiler."""
    if shutil.which("cc") is None:
        return None
    source, library = folder / "killer.c", folder / "killer.so"
    source.write_text(KILLER)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", "-o", library, source, "-ldl"], check=True)
    return library


def ordeal(folder: Path, kills: int) -> Result:
    """Kill the program so many times, then let it end, and count what arrived."""
    from edgevlm.apps.watches.events import WatchEvent

    result, receiver, library, chance = Result(), Receiver(), compiled(folder), random.Random(kills)
    url, state = f"http://127.0.0.1:{receiver.server_port}/", str(folder / "state")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **({"LD_PRELOAD": str(library)} if library else {})}
    command = [sys.executable, __file__, "--nursery", state, url]
    nurse = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    acknowledged = -1

    def run(at: int = 0, after: int = 0) -> dict[str, int]:
        """What it told last, by its first word; ``ended`` is missing where it was killed."""
        nonlocal acknowledged
        nurse.stdin.write(f"{acknowledged + 1} {at} {after}\n")
        nurse.stdin.flush()
        told = {}
        while "over" not in told:
            word, _, number = nurse.stdout.readline().strip().partition(" ")
            if word and number:
                told[word] = int(number)
        acknowledged = max(acknowledged, told.get("recorded", -1))
        return told

    half = kills // 2 if library else 0
    number, writes = 0, run()["writes"]
    while result.at_writes < half:
        result.at_writes += "ended" not in run(at=1 + number * writes // half % writes)
        number += 1
    while result.at_writes + result.at_random < kills:
        result.at_random += "ended" not in run(after=chance.randint(1, LONGEST_MS))
    while run()["ended"]:
        pass
    nurse.stdin.close()
    nurse.wait()
    nurse.stdout.close()
    receiver.shutdown()
    receiver.server_close()
    number_of = {WatchEvent("door", "parcel", "open", 0.0, 0.9, float(number)).id: number for number in range(acknowledged + 1)}
    arrivals = Counter(receiver.got)
    result.acknowledged = acknowledged + 1
    result.lost = len(number_of.keys() - arrivals.keys())
    result.repeated = arrivals.total() - len(arrivals)
    result.out_of_order = sum(late < early for early, late in pairwise(number_of[each] for each in dict.fromkeys(receiver.got)))
    return result


if __name__ == "__main__":
    if sys.argv[1:2] == ["--nursery"]:
        nursery(*sys.argv[2:])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, nargs="?", default=200)
    with tempfile.TemporaryDirectory() as scratch:
        found = ordeal(Path(scratch), parser.parse_args().kills)
    print(found)
    sys.exit(bool(found.lost or found.out_of_order))
