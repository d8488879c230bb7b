"""Clients that go away or send nothing: their places are free at once."""

import asyncio
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from edgevlm.apps.serve import guard, http, run
from edgevlm.apps.serve.config import ServerSettings


class NeverAnswered:
    """A completion whose answer does not come until it is cancelled."""

    def __init__(self):
        self.cancelled = asyncio.Event()

    def cancel(self):
        self.cancelled.set()

    async def whole(self):
        await self.cancelled.wait()
        return {}


def test_an_answer_that_is_not_streamed_is_cancelled_when_its_client_goes_away():
    async def gone():
        return {"type": "http.disconnect"}

    async def ask():
        completion = NeverAnswered()
        await asyncio.wait_for(http.unless_gone(SimpleNamespace(receive=gone), completion), 60)
        assert completion.cancelled.is_set()

    asyncio.run(ask())


def test_a_streamed_answer_frees_its_place_also_when_nothing_of_it_was_sent():
    finished = []

    async def events():
        yield {"data": "x"}

    async def gone(message=None):
        raise OSError("the client went away")

    async def ask():
        response = http.AnswerResponse(SimpleNamespace(finished=finished.append), "completion", events())
        with pytest.raises(BaseException):  # noqa: B017, PT011 - a group of errors or one, by the library's version
            await response({"type": "http"}, asyncio.Event().wait, gone)

    asyncio.run(ask())
    assert finished == ["completion"]


def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(guard, "BODY_S", 0.01)

    async def app(scope, receive, send):
        await receive()

    async def ask():
        scope = {"type": "http", "path": "/", "headers": [(b"host", b"localhost")]}
        with pytest.raises(http.StarletteHTTPException, match="the body did not come"):
            await guard.Guard(app, ServerSettings(), None)(scope, asyncio.Event().wait, None)

    asyncio.run(asyncio.wait_for(ask(), 60))


@asynccontextmanager
async def listening(app, limit):
    """uvicorn's state and port, in front of ``app``."""
    import uvicorn

    config = uvicorn.Config(app, http=run.BoundedProtocol, limit_concurrency=limit, lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: run.BoundedProtocol(config, state, {}), "127.0.0.1", 0)
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


def test_connections_that_send_nothing_are_closed_and_their_number_is_bounded(monkeypatch):
    monkeypatch.setattr(run, "HEAD_S", 0.5)

    async def connect():
        async with listening(answer, 4) as (state, port):
            links = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            await until(lambda: len(state.connections) <= 4)
            links[-1][1].write(b"GET / HTTP/1.1\r\nHost:")
            for reader, writer in links:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
            await until(lambda: not state.connections)

    asyncio.run(asyncio.wait_for(connect(), 60))


@pytest.mark.parametrize("held", [b"GET / HTTP/1.1\r\nHost: loc", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"])
def test_those_who_ask_are_answered_while_others_hold_all_connections(held):
    async def reads(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await answer(scope, receive, send)

    async def connect():
        async with listening(reads, 4) as (state, port):
            links = []
            for _ in range(12):
                links.append(await asyncio.open_connection("127.0.0.1", port))
                links[-1][1].write(held)
            await until(lambda: len(state.connections) <= 4)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: len(state.connections) < 4)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            for _, writer in links:
                writer.close()

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
    settings, sent, release = ServerSettings(max_body=1 << 17), [], asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        await release.wait()

    async def ask(server, size):
        async def receive():
            return {"type": "http.request", "body": bytes(size), "more_body": False}

        scope = {"type": "http", "path": "/", "headers": [(b"host", b"localhost")]}
        await server(scope, receive, sent.append)

    async def all_at_once():
        server = guard.Guard(app, settings, None)
        tasks = [asyncio.create_task(ask(server, 1 << 17)) for _ in range(4)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        small = asyncio.create_task(ask(server, 100))
        with pytest.raises(http.StarletteHTTPException, match="too many large requests"):
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
     ("localhost/", 421), ("", 421), ("[::1", 421), ("127.1", 421)],
)  # fmt: skip
def test_names_that_are_not_this_servers_are_refused(host, status):
    sent = []

    async def send(message):
        sent.append(message)

    async def ask(**headers):
        scope = {"type": "http", "path": "/", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
        await guard.Guard(answer, ServerSettings(hosts=["box.lan"]), None)(scope, None, send)

    asyncio.run(ask(host=host))
    assert sent[0]["status"] == status
    if status == 200:
        asyncio.run(ask(host=host, origin=f"http://{host}"))
        asyncio.run(ask(host=host, origin="http://evil.example"))
        asyncio.run(ask(host=host, origin="null"))
        assert [message["status"] for message in sent[2::2]] == [200, 403, 403]


def test_headers_are_bounded():
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/", "headers": [(b"host", b"localhost"), (b"x", bytes(1 << 17))]}
    asyncio.run(guard.Guard(answer, ServerSettings(), None)(scope, None, send))
    assert sent[0]["status"] == 431
