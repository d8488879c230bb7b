"""Clients that go away or send nothing: their places are free at once."""

import asyncio
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from starlette.exceptions import HTTPException as StarletteHTTPException

from edgevlm.apps.serve import guard, http, run
from edgevlm.apps.serve.config import ServeConfig, ServerSettings
from edgevlm.apps.serve.service import Service

SCOPE = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [(b"host", b"localhost")]}


def service(key=None, **settings):
    """What a guard needs of a service."""
    return SimpleNamespace(config=SimpleNamespace(server=ServerSettings(**settings)), key=key)


class NeverAnswered:
    """A completion whose answer does not come until it is cancelled."""

    def __init__(self):
        self.cancelled = asyncio.Event()

    def cancel(self):
        self.cancelled.set()

    async def complete(self):
        await self.cancelled.wait()
        return {}


def test_an_answer_that_is_not_streamed_is_cancelled_when_its_client_goes_away():
    async def gone():
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    async def ask():
        completion = NeverAnswered()
        reply = http.Reply(SimpleNamespace(finished=print), completion, streamed=False)
        await asyncio.wait_for(reply({"type": "http"}, gone, send), 60)
        assert completion.cancelled.is_set()

    asyncio.run(ask())


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(guard, "BODY_S", 0.01)

    async def app(scope, receive, send):
        await receive()

    async def ask():
        with pytest.raises(StarletteHTTPException, match="the body did not arrive"):
            await guard.Guard(app, service())(SCOPE, asyncio.Event().wait, None)

    asyncio.run(asyncio.wait_for(ask(), 60))


@asynccontextmanager
async def listening(app, limit):
    """uvicorn's state and port, in front of ``app``."""
    import uvicorn

    config = uvicorn.Config(app, http=run.TimedProtocol, limit_concurrency=limit, lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: run.TimedProtocol(config, state, {}), "127.0.0.1", 0)
    try:
        yield state, server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


async def until(true):
    while not true():
        await asyncio.sleep(0.01)


def test_connections_that_send_nothing_are_closed(monkeypatch):
    monkeypatch.setattr(run, "HEAD_S", 0.5)

    async def connect():
        async with listening(answer, 4) as (state, port):
            links = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            await until(lambda: state.connections)
            links[-1][1].write(b"GET / HTTP/1.1\r\nHost:")
            for reader, writer in links:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
            await until(lambda: not state.connections)

    asyncio.run(asyncio.wait_for(connect(), 60))


def test_a_client_that_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(run, "READ_S", 0.1)
    sent = []

    async def pours(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            sent.append(1)
            if receive.__self__.disconnected:
                return

    async def connect():
        async with listening(pours, 4) as (state, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: state.connections)
            await until(lambda: not state.connections)
            writer.close()

    asyncio.run(asyncio.wait_for(connect(), 60))
    assert len(sent) < 100


def test_large_bodies_at_once_are_bounded_and_small_ones_pass():
    sent, release = [], asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        await release.wait()

    async def ask(server, size):
        async def receive():
            return {"type": "http.request", "body": bytes(size), "more_body": False}

        await server(SCOPE, receive, sent.append)

    async def all_at_once():
        server = guard.Guard(app, service(max_body=1 << 17))
        tasks = [asyncio.create_task(ask(server, 1 << 17)) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        small = asyncio.create_task(ask(server, 100))
        with pytest.raises(StarletteHTTPException, match="too many large requests"):
            await ask(server, 1 << 17)
        assert not small.done()
        release.set()
        await asyncio.gather(small, *tasks)
        await ask(server, 1 << 17)

    asyncio.run(asyncio.wait_for(all_at_once(), 60))


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("LOCALHOST", 200), ("[::1]:8000", 200), ("192.168.1.9:8000", 200), ("box.lan", 200),
     ("evil.example", 421), ("localhost.evil.example", 421), ("localhost:80.evil.example", 421), ("a@localhost", 421),
     ("localhost/", 421), ("", 421), ("[::1", 421), ("127.1", 421), ("[::1].evil.example", 421),
     ("[fe80::1%evil.example]", 421)],
)  # fmt: skip
def test_names_that_are_not_this_servers_are_refused(host, status):
    sent = []

    async def send(message):
        sent.append(message)

    async def ask(**headers):
        scope = {**SCOPE, "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
        await guard.Guard(answer, service(hosts=["box.lan"]))(scope, None, send)

    asyncio.run(ask(host=host))
    assert sent[0]["status"] == status
    if status == 200:
        asyncio.run(ask(host=host, origin=f"http://{host}"))
        asyncio.run(ask(host=host, origin="http://evil.example"))
        asyncio.run(ask(host=host, origin="null"))
        assert [message["status"] for message in sent[2::2]] == [200, 403, 403]


def test_with_a_key_every_path_but_the_page_and_health_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_TEST", "k" * 32)
    served = Service(ServeConfig(state=str(tmp_path), server=ServerSettings(key="env:KEY_OF_A_TEST")), print)
    client = TestClient(guard.Guard(http.make_app(served), served), "http://localhost")
    asked = ("/", "/static/app.js", "/health", "/metrics", "/openapi.json", "/v1/streams")
    assert [client.get(path).status_code for path in asked] == [200, 200, 200, 401, 401, 401]


def test_an_address_that_asks_too_often_waits_and_others_do_not(monkeypatch):
    now, sent = [0.0], []
    monkeypatch.setattr(guard.time, "monotonic", lambda: now[0])
    server = guard.Guard(answer, service(max_rate=2))

    async def send(message):
        sent.append(message)

    def ask(address):
        sent.clear()
        asyncio.run(server({**SCOPE, "client": (address, 1)}, None, send))
        return sent[0]["status"]

    assert [ask("a") for _ in range(21)] == 20 * [200] + [429]
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert ask("b") == 200
    now[0] = 1.0
    assert [ask("a") for _ in range(3)] == [200, 200, 429]
