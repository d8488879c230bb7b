"""What a service says and measures of many cameras on one model, with clocks of the test's own.

``PYTHONPATH=tests python tests/apps/serve/test_load.py SEED SECONDS``: 50 clients of 16 cameras, for longer.
"""

import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

pytest.importorskip("fastapi")

from served import NOW, WAIT_S, eventually, serving

from edgevlm.apps.run.clock import Span
from edgevlm.apps.serve.config import CameraSettings, ServeConfig, ServerSettings, settings_of
from edgevlm.apps.serve.http import make_app
from edgevlm.apps.serve.service import Service
from edgevlm.apps.sources import SourceOptions
from edgevlm.apps.watches.sinks import Sink
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import UserError


def test_a_camera_with_a_torn_memory_goes_on_from_its_last_snapshot(tmp_path, monkeypatch):
    said, fails = [], [True]
    cameras = {"demo": CameraSettings(), "yard": CameraSettings()}
    config = ServeConfig(state=str(tmp_path), state_every=0.2, fps=8.0, cameras=cameras)
    service = Service(config, said.append, SourceOptions(speed=8))
    try:
        service.open()
        torn, other = service.stream("demo"), service.stream("yard")
        eventually(lambda: torn.session.stats.snapshots)
        real = type(torn.session.cache).commit

        def commit(cache, *arguments):
            if fails and cache is torn.session.cache:
                fails.pop()
                raise MemoryError("std::bad_alloc")
            return real(cache, *arguments)

        monkeypatch.setattr(type(torn.session.cache), "commit", commit)
        eventually(lambda: torn.state == "failed")
        assert "bad_alloc" in torn.problem
        for _ in range(2):
            service.reopen_torn()
        again = eventually(lambda: (now := service.stream("demo")) is not torn and now)
        eventually(lambda: again.session.stats.frames > 32 and again.state == "running")
        assert service.stream("yard") is other
        assert not other.session.is_torn
        assert sum("continuing from the last snapshot" in line for line in said) == 1
    finally:
        service.close()


def test_a_reload_applies_key_and_limits_and_says_what_waits_for_a_restart(tmp_path):
    (tmp_path / "key").write_text("correct-horse")
    service = Service(ServeConfig(state=str(tmp_path)), print)
    wanted = ServerSettings(key=f"file:{tmp_path / 'key'}", host="0.0.0.0", port=9, max_requests=5)
    for _ in range(2):
        assert service.reload(ServeConfig(state="/else", server=wanted)) == [
            "state: restart the server to apply the change",
            "server.host: restart the server to apply the change",
            "server.port: restart the server to apply the change",
        ]
    assert (service.key, service.config.server.max_requests, service.config.server.host) == ("correct-horse", 5, "127.0.0.1")
    (tmp_path / "key").write_text("schlüssel")
    with pytest.raises(UserError, match="ASCII"):
        service.reload(ServeConfig(server=wanted))
    assert service.key == "correct-horse"


def test_any_key_is_set_on_the_command_line(tmp_path):
    path, options = tmp_path / "edgevlm.toml", {"server": {"port": 9, "host": None}}
    path.write_text("[cameras.demo]\nfps = 1\n[server]\nmax_rate = 5\n")
    given = ["server.max_rate=30", "cameras.demo.policy=last-seen", "server.hosts=['box.lan']", "cameras.yard.source=0"]
    with pytest.raises(UserError, match=r"cameras\.yard\.source"):
        settings_of(path, [], options, given)
    config = settings_of(path, ["door=0", "1", "2"], options, [*given[:3], "cameras.yard.source=rtsp://a/b=c"])
    assert (config.server.max_rate, config.server.hosts, config.server.port) == (30, ["box.lan"], 9)
    assert config.cameras["demo"] == CameraSettings(fps=1.0, policy="last-seen")
    assert [config.cameras[name].source for name in ("yard", "door", "camera", "camera-2")] == ["rtsp://a/b=c", "0", "1", "2"]
    assert [each.name for each in settings_of(None, ["Front Door=demo"]).cameras.values()] == ["Front Door"]
    with pytest.raises(UserError, match="duplicate camera name"):
        settings_of(None, ["a=demo", "a=0"])
    for wrong in ("server.max_rate", "=5", "server..port=1", "fps.x=1", "server=head"):
        with pytest.raises(UserError):
            settings_of(None, [], options, ["fps=1", wrong])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda service: service.switch("demo", "last-seen", None),
        lambda service: service.forget("demo", Span()),
        lambda service: service.remove("demo", keep_model=True),
    ],
)
def test_a_question_whose_stream_is_closed_is_refused_with_the_reason(tmp_path, change, streamed):
    service, gate = Service(ServeConfig(state=str(tmp_path), cameras={"demo": CameraSettings()}), print), threading.Event()
    question = {"model": "demo", "stream": streamed, "messages": [{"role": "user", "content": NOW}]}

    async def asked_meanwhile():
        stream = service.stream("demo")
        stream.model.scheduler.submit(object(), gate.wait, urgent=True)  # the question waits behind it
        client = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://localhost")
        reply = asyncio.create_task(client.post("/v1/chat/completions", json=question))
        while not any(not answer.finished for answer in stream.session._answers):
            await asyncio.sleep(0.01)
        changing = threading.Thread(target=change, args=(service,))
        changing.start()
        try:
            return await asyncio.wait_for(asyncio.shield(reply), 5)
        except asyncio.TimeoutError:
            gate.set()
            return await reply
        finally:
            gate.set()
            await asyncio.to_thread(changing.join)
            await client.aclose()

    try:
        service.open()
        eventually(lambda: service.stream("demo").session.stats.frames)
        reply = asyncio.run(asked_meanwhile())
        assert reply.status_code == (200 if streamed else 409)
        assert "demo was changed, forgotten, reopened or removed" in reply.text
    finally:
        gate.set()
        service.close()


def test_a_start_that_fails_announces_nothing(tmp_path):
    """Devices of watches that it did not come to would be removed. A camera may have any id."""

    class Announced(Sink):
        watches: ClassVar[list[str]] = []

        def announce(self, watches):
            self.watches.extend(each.watch for each in watches)

    red, unknown = Watch(question="is there a red square?"), Watch(question="is it raining?")
    for watches, announced in (([red, unknown], []), ([red], [red.name])):
        config = ServeConfig(state=str(tmp_path), cameras={"id": CameraSettings()}, watches=watches)
        with (
            closing(Service(config, print, sinks={"kept": Announced()})) as service,
            nullcontext() if announced else pytest.raises(UserError, match="never taught"),
        ):
            service.open()
        assert list(dict.fromkeys(Announced.watches)) == announced


REFUSALS = {404: "not_found", 409: "conflict", 429: "rate_limit_exceeded", 503: "not_ready"}  # that a question may get
MOVING, POLICIES, CONFIGURED = 16, ("sliding-window", "last-seen", "infinipot-v"), 4


class Crowd:
    """Clients of one server. Each camera is changed by one of them, who knows what has to be true of it; the others ask.

    ``counts``: what was answered, by status. The first cameras are in the configuration, and are changed by reloading it.
    """

    def __init__(self, server, config, seed, seconds):
        self.server, self.config, self.seed, self.seconds = server, config, seed, seconds
        self.counts, self.tokens, self.changes = Counter(), Counter(), Counter()

    async def run(self):
        limits = httpx.Limits(keepalive_expiry=1)  # before the server closes what is idle
        async with httpx.AsyncClient(base_url=self.server.url, timeout=WAIT_S, limits=limits) as self.http:
            self.end = time.monotonic() + self.seconds
            moved = [self.move(f"c{number}", random.Random(f"{self.seed} {number}")) for number in range(CONFIGURED, MOVING)]
            asked = [self.ask(random.Random(f"{self.seed} ask {number}")) for number in range(50 - len(moved) - 1)]
            await asyncio.gather(self.reload(random.Random(f"{self.seed} reload")), *moved, *asked)
            await self.check_counts()

    async def send(self, method, path, body=None, expected=200):
        reply = await self.http.request(method, path, json=body)
        assert reply.status_code == expected, (method, path, body, reply.status_code, reply.text)
        return reply.json() if reply.content else None

    async def move(self, name, drawn):
        """Add a camera, change it, and remove it again, over and over."""
        while time.monotonic() < self.end:
            await self.send("POST", "/v1/streams", {"id": name, "source": "demo", "fps": 8}, 201)
            await self.send("POST", "/v1/streams", {"id": name, "source": "demo"}, 400)
            listening = asyncio.create_task(self.listen(name))
            for _ in range(drawn.randrange(1, 6)):
                await asyncio.sleep(drawn.random() * 0.5)
                await self.change(name, drawn.choice(["pause", "switch", "forget", "window"]), drawn)
            await self.send("DELETE", f"/v1/streams/{name}", expected=204)
            await self.send("GET", f"/v1/streams/{name}", expected=404)
            await self.send("PATCH", f"/v1/streams/{name}", {"state": "paused"}, 404)
            await asyncio.wait_for(listening, 20)  # it ends with its stream
            if drawn.random() < 0.5:
                reply = await self.http.post("/v1/forget", json={"stream": name, "all": True, "confirm": True})
                assert reply.status_code in (200, 404), reply.text  # nothing is kept of one that was switched
            self.changes["moved"] += 1

    async def change(self, name, what, drawn):
        path = f"/v1/streams/{name}"
        if what == "pause":
            assert (await self.send("PATCH", path, {"state": "paused"}))["state"] == "paused"
            before = (await self.send("GET", path))["frames_watched"]
            await asyncio.sleep(0.1)
            now = await self.send("GET", path)
            assert (now["state"], now["frames_watched"]) == ("paused", before)
            await self.send("PATCH", path, {"state": "running"})
        elif what == "switch":
            wanted = {"policy": drawn.choice(POLICIES), "budget": drawn.choice([64, 128])}
            assert wanted.items() <= (await self.send("PATCH", path, wanted)).items()
            await self.send("PATCH", path, {"policy": "none-such"}, 400)
            assert wanted.items() <= (await self.send("GET", path)).items()
        elif what == "forget":
            await self.send("PATCH", path, {"state": "paused"})
            await self.send("POST", "/v1/forget", {"stream": name, "all": True, "confirm": True})
            memory = await self.send("GET", f"{path}/memory")
            assert (memory["frames"], memory["frames_watched"]) == ([], 0)
            await self.send("PATCH", path, {"state": "running"})
        else:
            told = await self.send("POST", "/v1/forget", {"stream": name, "since": "1s", "confirm": True})
            assert set(told["streams"]) <= {name}
        self.changes[what] += 1

    async def listen(self, name):
        async with self.http.stream("GET", f"/v1/streams/{name}/events") as reply:
            kinds = {line.partition(": ")[2] async for line in reply.aiter_lines() if line.startswith("event:")}
        assert kinds <= {"state", "stats", "answer", "notice", "watch", "journal"}
        assert "state" in kinds

    async def reload(self, drawn):
        """Change the configured cameras, all but the first, by reloading; one that was removed comes back."""
        while time.monotonic() < self.end:
            await asyncio.sleep(drawn.random())
            there = {0, *(number for number in range(1, CONFIGURED) if drawn.random() < 0.6)}
            self.config.write_text(configured(there, drawn.choice([4, 8])))
            await self.send("POST", "/v1/reload")
            for number in range(CONFIGURED):
                await self.send("GET", f"/v1/streams/c{number}", expected=200 if number in there else 404)
            self.changes["reload"] += 1

    async def ask(self, drawn):
        while time.monotonic() < self.end:
            name, streamed = f"c{drawn.randrange(MOVING)}", drawn.random() < 0.4
            if drawn.random() < 0.2:
                await self.look(name, drawn)
                continue
            body = {"model": name, "messages": [{"role": "user", "content": NOW}], "stream": streamed}
            reply = await self.http.post("/v1/chat/completions", json=body)
            if reply.status_code != 200:
                assert reply.json()["error"]["code"] == REFUSALS[reply.status_code], reply.text
                assert name in reply.text or reply.status_code == 429, reply.text
                self.counts[reply.status_code] += 1
                continue
            if streamed:
                data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
                events = [json.loads(each) for each in data if each != "[DONE]"]
                if "error" in events[-1]:
                    assert events[-1]["error"]["code"] in ("conflict", "not_ready"), events[-1]
                    self.counts["broken off"] += 1
                    continue
                assert data[-1] == "[DONE]"
                text = "".join(each["choices"][0]["delta"].get("content", "") for each in events)
                assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
            else:
                answer = reply.json()
                text, used = answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]
                assert answer["edgevlm"]["stream"] == name
                assert used > 0
                self.tokens[name] += used
            assert text.strip(), reply.text
            self.counts[200] += 1
            self.counts[name] += 1

    async def look(self, name, drawn):
        path = drawn.choice(["", "/memory", "/frame.jpg", "/list", "/metrics", "/ready"])
        if path == "/list":
            names = [each["id"] for each in (await self.send("GET", "/v1/streams"))["data"]]
            assert len(set(names)) == len(names)
            assert set(names) <= {f"c{number}" for number in range(MOVING)}
            return
        whole = {"/metrics": "/metrics", "/ready": "/health/ready"}.get(path, f"/v1/streams/{name}{path}")
        reply = await self.http.get(whole)
        assert reply.status_code in (200, 503 if path == "/ready" else 404), (whole, reply.status_code, reply.text)
        assert reply.content
        self.counts["looked"] += 1

    async def check_counts(self):
        """What the server counts, once nobody asks, is what its clients counted. The first camera is always there."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        counted = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
        assert counted["edgevlm_num_requests_running"] == counted["edgevlm_num_requests_waiting"] == 0
        answered = counted.get('edgevlm_time_to_first_token_seconds_count{stream="c0"}', 0)
        assert self.counts["c0"] <= answered <= self.counts["c0"] + self.counts[409] + self.counts["broken off"]
        assert counted.get('edgevlm_generation_tokens_total{stream="c0"}', 0) >= self.tokens["c0"]


def configured(numbers, fps):
    cameras = "".join(f'[cameras.c{number}]\nsource = "demo"\nfps = {fps if number else 8}\n' for number in numbers)
    return f"state_every = 1\n[server]\nmax_rate = 1e6\n{cameras}"


def crowd(folder, seed, seconds):
    config = folder / "edgevlm.toml"
    config.write_text(configured(range(CONFIGURED), 8))
    with serving(folder / "served", config) as server:
        crowd = Crowd(server, config, seed, seconds)
        asyncio.run(crowd.run())
        assert server.end() == 0
    assert "Traceback" not in (folder / "served" / "stderr").read_text()
    return crowd


def test_every_answer_to_a_crowd_is_whole_or_says_why_not(tmp_path):
    found = crowd(tmp_path, 0, 2)
    assert found.counts[200] > 10
    assert {"moved", "reload"} <= found.changes.keys()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        told = crowd(Path(scratch), sys.argv[1], float(sys.argv[2]))
        print(dict(told.counts), dict(told.changes))
