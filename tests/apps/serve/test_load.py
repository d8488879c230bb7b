"""What a service says and measures of many cameras on one model, with clocks of the test's own."""

import asyncio
import threading
from contextlib import closing, nullcontext
from typing import ClassVar

import httpx
import pytest

pytest.importorskip("fastapi")

from served import NOW, eventually

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
        assert sum("going on from the last snapshot" in line for line in said) == 1
    finally:
        service.close()


def test_a_reload_applies_key_and_limits_and_says_what_waits_for_a_restart(tmp_path):
    (tmp_path / "key").write_text("correct-horse")
    service = Service(ServeConfig(state=str(tmp_path)), print)
    wanted = ServerSettings(key=f"file:{tmp_path / 'key'}", host="0.0.0.0", port=9, max_requests=5)
    for _ in range(2):
        assert service.reload(ServeConfig(state="/else", server=wanted)) == [
            "state: it changes when the server is restarted",
            "server.host: it changes when the server is restarted",
            "server.port: it changes when the server is restarted",
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
    with pytest.raises(UserError, match="two cameras have this name"):
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
        assert "demo was switched, forgotten, opened again or removed" in reply.text
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
