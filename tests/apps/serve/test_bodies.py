"""Ten clients send the bodies that take a server longest to read, while another asks for its health.

``PYTHONPATH=tests python tests/apps/serve/test_bodies.py SECONDS [AT_ONCE]`` prints what the health took, and the memory after.
"""

import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest

pytest.importorskip("fastapi")

from served import NOW, WAIT_S, serving

from edgevlm.apps.serve.guard import MAX_VALUES, TRIM_S

CHAT, RESPONSES, VALUES = "/v1/chat/completions", "/v1/responses", MAX_VALUES - 100
ASKED = [{"role": "user", "content": NOW}]
MANY = {f"u{number}": 1 for number in range(VALUES)}
PARAMETERS = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(30)}}


def parts(kind, messages, each, **more):
    return [{"role": "user", "content": [{"type": kind, "text": "x", **more}] * each}] * messages


BODIES = {  # by name: path, fields, statuses
    "values": (CHAT, {"messages": ASKED, **MANY, "more": [1] * 200}, {413}),
    "parts": (CHAT, {"messages": parts("text", 4, 1000)}, {200}),
    "too many parts": (CHAT, {"messages": parts("text", 1, VALUES // 2 - 10)}, {400}),
    "messages of parts": (CHAT, {"messages": parts("text", 1000, 3)}, {200}),
    "unknown in parts": (CHAT, {"messages": parts("text", 3, 1000, u=1)}, {200}),
    "unknown": (CHAT, {"messages": ASKED, **MANY}, {200}),
    "unknown objects": (CHAT, {"messages": ASKED, "x": [{"a": {}}] * VALUES}, {200}),
    "numbers": (CHAT, {"messages": ASKED, "x": [10**600] * 8000}, {200}),
    "a number": (CHAT, {"messages": ASKED, "x": [10**700]}, {400}),
    "calls": (CHAT, {"messages": [{"role": "user", "content": NOW, "tool_calls": [1] * VALUES}]}, {400}),
    "tools": (CHAT, {"messages": ASKED, "tools": [{"function": {"name": "f", "parameters": PARAMETERS}}] * 250}, {200}),
    "text": (CHAT, {"messages": [{"role": "user", "content": "\u1234" * 10_000}] * 230}, {200}),
    "a picture": (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 14_000_000}}]}]}, {400}),
    "input": (RESPONSES, {"input": [{"role": "user", "content": "x"}] * 1024}, {200}),
    "input parts": (RESPONSES, {"input": parts("input_text", 4, 1000)}, {200}),
    "stream": ("/v1/streams", {"id": "a", "source": "demo", **MANY}, {400}),
    "forget": ("/v1/forget", {"confirm": True, **MANY}, {400}),
}  # fmt: skip


def sent(port, path, body=None):
    link = HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        link.request("GET" if body is None else "POST", path, body, {"content-type": "application/json"})
        response = link.getresponse()
        response.read()
        return response.status
    finally:
        link.close()


def client(port, seed, seconds, told):
    """Send each body once, then such as are drawn."""
    drawn, bodies, found = random.Random(seed), list(BODIES), Counter()
    ready = {name: json.dumps({"model": "demo", **fields}).encode() for name, (_, fields, _) in BODIES.items()}
    drawn.shuffle(bodies)
    end = time.monotonic() + seconds
    while bodies or time.monotonic() < end:
        name = bodies.pop() if bodies else drawn.choice(list(BODIES))
        found[name, sent(port, BODIES[name][0], ready[name])] += 1
    told.put(found)


def attack(folder, seconds, at_once, rest):
    """Statuses by body, sorted seconds of the health requests, and memory ``rest`` seconds after one client and after all."""
    with serving(folder / "served") as server:
        server.watched("demo", 1)
        context = multiprocessing.get_context("spawn")
        found, took, told, process = Counter(), [], context.Queue(), psutil.Process(server.process.pid)
        for clients in (1, at_once):
            before = process.memory_info().rss
            sending = [context.Process(target=client, args=(server.port, seed, seconds, told)) for seed in range(clients)]
            for each in sending:
                each.start()
            while any(each.is_alive() for each in sending) or not told.empty():
                while not told.empty():
                    found += told.get()
                began = time.monotonic()
                assert sent(server.port, "/health/live") == 200
                took += [time.monotonic() - began] * (clients == at_once)
                time.sleep(0.01)
            time.sleep(rest)
        after = process.memory_info().rss
        assert server.end() == 0
    assert (folder / "served" / "stderr").read_text() == ""
    return found, sorted(took), before, after


def test_the_worst_bodies_are_answered_and_leave_no_memory(tmp_path):
    found, _, before, after = attack(tmp_path, 0, 2, TRIM_S + 1)
    assert [each for each in found if each[1] not in BODIES[each[0]][2]] == []
    assert {name for name, _ in found} == set(BODIES)
    assert after < 1.2 * before


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found, took, before, after = attack(Path(scratch), float(sys.argv[1]), int((*sys.argv[2:], 10)[0]), 60)
    odd = {each: count for each, count in found.items() if each[1] not in {429, *BODIES[each[0]][2]}}
    print(f"{found.total()} requests; statuses other than expected: {odd}")
    middle, late = took[len(took) // 2], took[int(0.99 * len(took))]
    print(f"health, {len(took)} requests: {middle:.3f} s, p99 {late:.3f} s, longest {took[-1]:.3f} s")
    print(f"memory: {before / 1e6:.1f} -> {after / 1e6:.1f} MB, {after / before - 1:+.1%}")
