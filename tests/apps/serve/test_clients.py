"""Clients that go away or send nothing: their places are free at once."""

import asyncio
from contextlib import suppress
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


def test_connections_that_send_nothing_are_closed_and_their_number_is_bounded(monkeypatch):
    import uvicorn

    monkeypatch.setattr(run, "HEAD_S", 0.5)

    async def connect():
        config = uvicorn.Config(lambda *_: None, http=run.BoundedProtocol, limit_concurrency=2, lifespan="off", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        server = await asyncio.get_running_loop().create_server(lambda: run.BoundedProtocol(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        links = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        links[0][1].write(b"GET / HTTP/1.1\r\nHost:")
        while len(state.connections) > 4:
            await asyncio.sleep(0.01)
        for reader, writer in links:
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        while state.connections:
            await asyncio.sleep(0.01)
        server.close()

    asyncio.run(asyncio.wait_for(connect(), 60))
