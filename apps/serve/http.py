"""The routes of ``edgevlm serve``: OpenAI's, streams, health, metrics and the page."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Path, Query, Request, Response, Security
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from edgevlm import __version__
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.forget import Span
from edgevlm.apps.run.clock import Asked, moment
from edgevlm.apps.run.output import finite, wall_clock
from edgevlm.apps.schemas import field as described
from edgevlm.apps.serve import answers
from edgevlm.apps.serve.answers import answer_of, list_of
from edgevlm.apps.serve.chat import ChatRequest, Completion, Moment, Strict
from edgevlm.apps.serve.config import Budget, CameraSettings, Fps, Name, ServeConfig
from edgevlm.apps.serve.errors import ERRORS, ApiError, add_errors, error_body
from edgevlm.apps.serve.metrics import Metrics
from edgevlm.apps.serve.responses import ModelResponse, ResponsesRequest
from edgevlm.apps.serve.service import Service, field
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import FieldError, UserError
from edgevlm.runtime.plugins import names
from edgevlm.runtime.policies import POLICIES, find_policy
from edgevlm.runtime.policies.description import describe

T = TypeVar("T")
PREPARING = 4  # questions whose pictures are fetched or whose form is compiled at once
SHORT = 4096  # characters that are tokenised in less time than another thread takes to begin
POLL_S = 0.1  # how often an MJPEG stream looks for a new frame
MJPEG_FPS = 5.0  # of one that is asked for none
PAGE = files("edgevlm.apps.serve").joinpath("page")
MAX_EVENTS = 1000  # of one request
ShortName = Annotated[str, Field(max_length=64)]
Words = Annotated[str, Field(max_length=256)]
Limit = Annotated[int, Field(ge=1, le=MAX_EVENTS)]
SourceText = Annotated[str, Field(min_length=1, max_length=4096)]
StreamName = Annotated[str, Path(max_length=64)]


class NewStream(Strict):
    """A camera to watch."""

    id: Name
    source: SourceText
    policy: Words | None = None
    budget: Budget = None
    fps: Fps | None = None


class StreamChange(Strict):
    """What is left out stays."""

    state: Literal["running", "paused"] | None = None
    policy: Words | None = None
    budget: Budget = None


class Forget(Strict):
    """What to delete: of one stream, or of all streams. since and until are as in questions. confirm: that it is meant."""

    stream: ShortName | None = None
    since: Moment | None = None
    until: Moment | None = None
    all: bool = False
    confirm: Literal[True]

    def span(self) -> Span:
        """Raises FieldError."""
        if self.all == bool(self.since or self.until):
            raise FieldError("all", "give since or until, or all")
        return Span(**window(self.since, self.until))


class WatchChange(Strict):
    state: Literal["running", "paused"]
    camera: ShortName | None = None


class WindowQuery(BaseModel):
    since: Moment | None = Field(None, description="From then on: `10m`, `14:03` or RFC 3339.")
    until: Moment | None = Field(None, description="Up to then.")
    camera: ShortName | None = None
    limit: Limit = 100

    def found(self) -> dict[str, Any]:
        """The query, its times in seconds since 1970. Raises FieldError."""
        return {**self.model_dump(), **window(self.since, self.until)}


class JournalQuery(WindowQuery):
    search: Words | None = Field(None, description="Words that all occur.")


class DigestQuery(JournalQuery):
    since: Moment = "8h"
    limit: Limit = MAX_EVENTS


class EventQuery(WindowQuery):
    watch: ShortName | None = None
    text: Words | None = Field(None, description="Part of the question, or of the name of watch or camera.")


class TestedSource(Strict):
    source: SourceText


def window(since: str | None, until: str | None) -> dict[str, float]:
    """The seconds since 1970 of those that are given. Raises FieldError."""
    found = {}
    for name, given in (("since", since), ("until", until)):
        if given is not None:
            with field(name):
                found[name] = moment(given)
    if found.get("until", math.inf) < found.get("since", -math.inf):
        raise FieldError("until", "is before since")
    return found


class Server:
    """The routes over a service. Questions that run or wait are counted, and bounded."""

    def __init__(self, service: Service) -> None:
        self.service, self.metrics = service, Metrics(service)
        self.closing = asyncio.Event()
        self.testing = threading.Lock()  # a camera: one at a time
        self._preparing = CapacityLimiter(PREPARING)

    def stream(self, name: str | None, param: str = "name") -> CameraStream:
        try:
            return self.service.stream(name)
        except UserError as error:
            raise ApiError(404, str(error), "not_found", param) from None

    async def complete(self, asked: ChatRequest) -> Completion:
        """Ask; 429 where too many wait. The caller calls :meth:`finished` once."""
        limit = self.service.config.server.max_requests
        stream = self.stream(asked.stream_name, "model")
        question, turns = asked.question()
        if not stream.session.stats.frames:
            raise ApiError(503, f"no frame of {stream.name} has been watched yet; ask again in a moment", "not_ready")
        if self.metrics.unfinished >= limit:
            self.metrics.refused.inc()
            soon = max(1, math.ceil(self.metrics.answer_s))  # one place is free then
            why = f"{limit} questions are being answered or wait; ask again in {soon} s"
            raise ApiError(429, why, "rate_limit_exceeded", soon=soon)
        self.metrics.unfinished += 1
        try:
            wanted = asked.max_completion_tokens or asked.max_tokens
            tokens = None if wanted is None else min(wanted, stream.session.text_budget.answer)
            window = Asked(**asked.window, offset=stream.observer.offset)
            with field("since" if window.since else "until"):
                sampling = {"max_tokens": tokens, **asked.sampling, **window.seconds()}
            if not asked.is_free:
                sampling["logits_processor"] = await self._prepared(asked.logits_processor, stream.model)
            if asked.has_pictures:
                settings = self.service.config.server
                sampling["pictures"] = await self._prepared(asked.pictures, settings, stream.session.prepare)
            if len(question) + sum(len(said) for turn in turns for said in turn) < SHORT:
                answer = stream.ask(question, turns, **sampling)
            else:
                answer = await run_in_threadpool(stream.ask, question, turns, **sampling)
        except BaseException:
            self.metrics.unfinished -= 1
            raise
        return Completion(asked, stream, question, answer, window)

    async def _prepared(self, work: Callable[..., T], *arguments: Any) -> T:
        """What a question needs before it is asked, on one of a few threads: others are left for the rest."""
        return await to_thread.run_sync(work, *arguments, limiter=self._preparing)

    def finished(self, completion: Completion) -> None:
        completion.cancel()
        self.metrics.unfinished -= 1
        answer = completion.answer
        if not isinstance(answer, str) and answer.token_ids:
            self.metrics.answer_s += (time.perf_counter() - completion.began - self.metrics.answer_s) / 8
            self.metrics.answered(completion.stream.name, answer)


class AnswerResponse(EventSourceResponse):
    """An answer as it comes. However it ends, also before its first piece, its place is free then."""

    def __init__(self, server: Server, completion: Completion, events: AsyncIterator[dict[str, str]]) -> None:
        super().__init__(events, ping=15)
        self._server, self._completion = server, completion

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._server.finished(self._completion)


async def unless_gone(request: Request, answer: Completion | ModelResponse) -> dict[str, Any]:
    """The whole answer; it is cancelled once the client has gone away."""

    async def cancel_when_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    watching = asyncio.create_task(cancel_when_gone())
    try:
        return await answer.complete()
    finally:
        watching.cancel()


def make_app(service: Service, load: Callable[[], ServeConfig] | None = None) -> FastAPI:
    """The ASGI application over a service. load: reads its configuration again."""
    app = FastAPI(
        title="edgevlm", version=__version__, description="Cameras that can be asked.", redoc_url=None, responses=ERRORS
    )
    server = Server(service)
    app.state.server = server
    add_errors(app)
    add_health(app, server)
    if service.config.server.key is not None:  # the guard asks for it; here it is described, of the routes that follow
        app.router.dependencies.append(Security(HTTPBearer(auto_error=False, description="The server's key.")))
    for add in (add_openai, add_streams, add_events, add_watches):
        add(app, server)
    add_rest(app, server, load)
    return app


def content(*types: str) -> dict[int | str, dict[str, Any]]:
    """A successful answer of these media types, as OpenAPI describes it."""
    return {200: {"content": {each: {} for each in types}}}


MJPEG = "multipart/x-mixed-replace"
JPEG = content("image/jpeg")
WATTS = (float | None, described("Of the machine, where it has a meter."))
SINCE, UNTIL = (str, described("From when: RFC 3339, UTC.")), (str, described("Until when."))


def add_openai(app: FastAPI, server: Server) -> None:
    @app.post(
        "/v1/chat/completions", tags=["OpenAI"], response_model=None, responses=content("application/json", "text/event-stream")
    )
    async def chat_completions(request: Request, asked: ChatRequest) -> Response:
        """Ask a stream: `model` is its name, or ends in `/NAME`. Its memory is the video that the question is about."""
        completion = await server.complete(asked)
        return await respond(request, completion, completion, bool(asked.stream))

    @app.post("/v1/responses", tags=["OpenAI"], response_model=None, responses=content("application/json", "text/event-stream"))
    async def responses(request: Request, asked: ResponsesRequest) -> Response:
        """Ask a stream through OpenAI's newer interface. Nothing is stored: a conversation is sent along as `input`."""
        completion = await server.complete(asked.as_chat())
        return await respond(request, completion, ModelResponse(asked, completion), bool(asked.stream))

    async def respond(request: Request, completion: Completion, answer: Completion | ModelResponse, streamed: bool) -> Response:
        if not streamed:
            try:
                return JSONResponse(await unless_gone(request, answer))
            finally:
                server.finished(completion)

        async def events() -> AsyncIterator[dict[str, str]]:
            told = answer.events()
            try:
                async for event in told:
                    yield event
            except UserError as error:
                yield {"data": json.dumps(error_body(mask_credentials(str(error)), None, kind="server_error"))}
            finally:
                await told.aclose()

        return AnswerResponse(server, completion, events())

    @app.get("/v1/models", tags=["OpenAI"], responses=list_of(answers.Model))
    async def models() -> dict[str, Any]:
        """The streams, as models that can be asked."""
        return {"object": "list", "data": [model_entry(stream) for stream in server.service.streams.values()]}

    @app.get("/v1/models/{name}", tags=["OpenAI"], responses=answer_of(answers.Model))
    async def model(name: StreamName) -> dict[str, Any]:
        """One of these models."""
        return model_entry(server.stream(name, "model"))


def model_entry(stream: CameraStream) -> dict[str, Any]:
    return {"id": stream.name, "object": "model", "created": 0, "owned_by": stream.describe()["model"]}


def add_streams(app: FastAPI, server: Server) -> None:
    @app.get("/v1/streams", tags=["streams"], responses=list_of(answers.Stream, watts=WATTS))
    async def streams() -> dict[str, Any]:
        """Every camera and its status. watts: of the machine, where it has a meter."""
        watts = await run_in_threadpool(server.service.power.watts)
        data = [stream.describe() for stream in server.service.streams.values()]
        return {"object": "list", "data": data, "watts": finite(watts)}

    @app.get("/v1/policies", tags=["streams"], responses=list_of(answers.Policy))
    async def policies() -> dict[str, Any]:
        """The policies that a camera's memory can have."""
        known = [describe(find_policy(name)) for name in dict.fromkeys([*POLICIES, *names("policies")])]
        return {"object": "list", "data": [{"id": one.policy, "object": "policy", "idea": one.idea} for one in known]}

    @app.post("/v1/streams", tags=["streams"], status_code=201, responses=answer_of(answers.Stream, 201))
    async def add(new: NewStream) -> dict[str, Any]:
        """Watch another camera, until it is removed or, except in a cluster, the server restarts."""
        settings = CameraSettings(**new.model_dump(exclude={"id"}, exclude_none=True))
        stream = await run_in_threadpool(server.service.add, new.id, settings, by_client=True)
        return stream.describe()

    @app.post("/v1/streams/test", tags=["streams"])
    async def test(tested: TestedSource) -> dict[str, Any]:
        """Open a source once and tell what it shows: size, frames a second, a JPEG in base64. Nothing is added."""
        if not server.testing.acquire(blocking=False):
            raise ApiError(429, "another camera is being tested; try again in a moment", "rate_limit_exceeded")
        try:
            return await run_in_threadpool(server.service.test, tested.source)
        finally:
            server.testing.release()

    @app.get("/v1/streams/{name}", tags=["streams"], responses=answer_of(answers.Stream))
    async def stream(name: StreamName) -> dict[str, Any]:
        """A camera and its status."""
        return server.stream(name).describe()

    @app.patch("/v1/streams/{name}", tags=["streams"], responses=answer_of(answers.Stream))
    async def change(name: StreamName, change: StreamChange) -> dict[str, Any]:
        """Pause a camera, let it go on, or give it another policy or budget. A paused one can be asked.

        Another policy or budget begins a new memory and, except in a cluster, lasts until the server restarts.
        """
        found = server.stream(name)
        if change.policy is not None or change.budget is not None:
            found = await run_in_threadpool(server.service.switch, name, change.policy, change.budget)
        if change.state is not None:
            await run_in_threadpool(found.pause if change.state == "paused" else found.resume)
        return found.describe()

    @app.delete("/v1/streams/{name}", tags=["streams"], status_code=204)
    async def remove(name: StreamName) -> None:
        """Stop watching a camera. Its snapshots stay."""
        server.stream(name)
        await run_in_threadpool(server.service.remove, name)

    @app.get("/v1/streams/{name}/frame.jpg", tags=["streams"], response_class=Response, responses=JPEG)
    async def frame(name: StreamName) -> Response:
        """The newest frame that was watched."""
        picture = await run_in_threadpool(server.stream(name).jpeg)
        return as_picture(picture, "no frame has been watched yet")

    @app.get("/v1/streams/{name}/thumbnails/{number}.jpg", tags=["streams"], response_class=Response, responses=JPEG)
    async def thumbnail(name: StreamName, number: Annotated[int, Path(ge=0, lt=1 << 62)]) -> Response:
        """A frame of which something is in memory, small."""
        picture = await run_in_threadpool(server.stream(name).observer.thumbnails.jpeg, number)
        return as_picture(picture, "this frame is not in memory any more")

    @app.get("/v1/streams/{name}/mjpeg", tags=["streams"], response_class=Response, responses=content(MJPEG))
    async def mjpeg(name: StreamName, fps: Annotated[float, Query(gt=0, le=30)] = MJPEG_FPS) -> StreamingResponse:
        """The frames as they are watched, `fps` a second at most."""
        stream = server.stream(name)

        async def parts() -> AsyncIterator[bytes]:
            last: object = None
            while not server.closing.is_set() and server.service.streams.get(name) is stream:
                frame = stream.loop.frame
                if frame is not None and frame is not last:
                    last, picture = frame, await run_in_threadpool(stream.jpeg)
                    if picture is not None:
                        head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
                        yield head.encode() + picture + b"\r\n"
                await asyncio.sleep(max(POLL_S, 1 / fps))

        return StreamingResponse(parts(), media_type=f"{MJPEG}; boundary=frame")

    @app.get("/v1/streams/{name}/memory", tags=["streams"])
    async def memory(name: StreamName) -> dict[str, Any]:
        """What is held: for each frame its time, thumbnail, fraction held, in all and by group of layers, and one hexadecimal
        digit a token; and how many frames wait for their chunk."""
        return await run_in_threadpool(server.stream(name).memory)

    @app.get("/v1/streams/{name}/events", tags=["streams"], response_class=Response, responses=content("text/event-stream"))
    async def events(name: StreamName) -> EventSourceResponse:
        """Server-sent events: answer, state, stats, notice, watch, journal. A listener that does not keep up is dropped."""
        stream = server.stream(name)

        async def listen() -> AsyncIterator[dict[str, str]]:
            queue = stream.events.listen()
            try:
                yield {"event": "state", "data": json.dumps({"state": stream.state, "problem": stream.problem})}
                while (event := await queue.get()) is not None:
                    yield {"event": event[0], "data": json.dumps(event[1])}
            finally:
                stream.events.leave(queue)

        return EventSourceResponse(listen(), ping=15)


def add_events(app: FastAPI, server: Server) -> None:
    @app.get("/v1/journal", tags=["events"], responses=list_of(answers.Line))
    async def journal(asked: Annotated[JournalQuery, Query()]) -> dict[str, Any]:
        """What cameras have written in words, newest first."""
        found = await run_in_threadpool(lambda query: server.service.lines(**query), asked.found())
        return {"object": "list", "data": [line.json() for line in found]}

    @app.get("/v1/events", tags=["events"], responses=list_of(answers.Event))
    async def events(asked: Annotated[EventQuery, Query()]) -> dict[str, Any]:
        """Watches that opened and closed, newest first."""
        found = await run_in_threadpool(lambda query: server.service.delivery.store.query(**query), asked.found())
        return {"object": "list", "data": [each.json() for each in found]}

    @app.get("/v1/digest", tags=["events"], responses=list_of(answers.Opening, answers.Line, since=SINCE, until=UNTIL))
    async def digest(asked: Annotated[DigestQuery, Query()]) -> dict[str, Any]:
        """What happened meanwhile, by time: `opening`, when a watch was open, and `line`, of the journal, each with what it was
        read from. limit: the newest."""
        span = {"until": time.time(), **window(asked.since, asked.until)}
        found = await run_in_threadpool(server.service.digest, **span, camera=asked.camera, search=asked.search)
        return {"object": "digest", **{name: wall_clock(at) for name, at in span.items()}, "data": found[-asked.limit :]}

    @app.get("/v1/events/{event}/{place}.jpg", tags=["events"], response_class=Response, responses=JPEG)
    async def picture(
        event: Annotated[str, Path(pattern="^[0-9a-f]{32}$")], place: Annotated[int, Path(ge=0, lt=1 << 15)]
    ) -> Response:
        """What an event was read from: the picture of its evidence at that place, from 0."""
        jpeg = await run_in_threadpool(lambda: server.service.delivery.store.picture(event, place))
        return as_picture(jpeg, "there is no such picture, or it is not kept any more")


def add_watches(app: FastAPI, server: Server) -> None:
    watches = server.service.watches

    def known(name: str) -> str:
        try:
            return watches.watch(name).name
        except UserError as error:
            raise ApiError(404, str(error), "not_found", "name") from None

    @app.get("/v1/watches", tags=["watches"], responses=list_of(answers.WatchState))
    async def every() -> dict[str, Any]:
        """Every watch, and how it stands on each of its cameras."""
        return {"object": "list", "data": [watches.describe(name) for name in watches.watches]}

    @app.post("/v1/watches", tags=["watches"], status_code=201, responses=answer_of(answers.WatchState, 201))
    async def add(watch: Watch) -> dict[str, Any]:
        """Ask a question again and again, until it is removed or, except in a cluster, the server restarts."""
        await run_in_threadpool(watches.add, watch)
        return watches.describe(watch.name)

    @app.get("/v1/watches/{name}", tags=["watches"], responses=answer_of(answers.WatchState))
    async def one(name: StreamName) -> dict[str, Any]:
        """A watch, and how it stands on each of its cameras."""
        return watches.describe(known(name))

    @app.patch("/v1/watches/{name}", tags=["watches"], responses=answer_of(answers.WatchState))
    async def change(name: StreamName, change: WatchChange) -> dict[str, Any]:
        """Pause a watch, or let it go on: on one camera, or on all. One that is open closes."""
        if change.camera is not None:
            server.stream(change.camera, "camera")
        await run_in_threadpool(watches.pause, known(name), change.state == "paused", change.camera)
        return watches.describe(name)

    @app.delete("/v1/watches/{name}", tags=["watches"], status_code=204)
    async def remove(name: StreamName) -> None:
        """Delete a watch. Where it is open it closes."""
        await run_in_threadpool(watches.remove, known(name))


def add_health(app: FastAPI, server: Server) -> None:
    @app.get("/health/live", tags=["health"], responses=answer_of(answers.Health))
    async def live() -> dict[str, str]:
        """200 while the process answers."""
        return {"status": "ok"}

    @app.get("/health/ready", tags=["health"], responses=answer_of(answers.Health))
    async def ready() -> dict[str, str]:
        """200 once every stream that is not paused has been watched; 503 before."""
        streams = server.service.streams.values()
        waiting = [stream for stream in streams if not (stream.paused or stream.session.stats.frames)]
        if waiting:
            raise ApiError(503, f"{len(waiting)} of {len(streams)} streams have not been watched yet", "not_ready")
        return {"status": "ok"}


def add_rest(app: FastAPI, server: Server, load: Callable[[], ServeConfig] | None) -> None:
    @app.post("/v1/forget", tags=["streams"], responses=answer_of(answers.Forgotten))
    async def forget(what: Forget) -> dict[str, Any]:
        """Delete what was seen in a time: rows, snapshots, thumbnails, events, journal lines. It does not come back."""
        if what.stream is not None and what.stream not in server.service.removed():
            server.stream(what.stream)
        done = await run_in_threadpool(server.service.forget, what.stream, what.span())
        return {"object": "forget", "streams": done}

    @app.post("/v1/reload", tags=["streams"], responses=answer_of(answers.Reloaded))
    async def reload() -> dict[str, Any]:
        """Read the configuration again, as SIGHUP does: cameras that changed are opened again. `done` has a line for each."""
        if load is None:
            raise ApiError(400, "this server has no configuration to read again", "invalid_value")
        done = await run_in_threadpool(lambda: server.service.reload(load()))
        return {"object": "reload", "done": done}

    @app.get("/metrics", tags=["metrics"], response_class=Response, responses=content("text/plain"))
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(await run_in_threadpool(generate_latest, server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(str(PAGE.joinpath("index.html")))

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: Literal["app.js", "style.css"]) -> FileResponse:
        return FileResponse(str(PAGE.joinpath(name)))


def as_picture(jpeg: bytes | None, otherwise: str) -> Response:
    if jpeg is None:
        raise ApiError(404, otherwise, "not_found")
    return Response(jpeg, media_type="image/jpeg", headers={"cache-control": "no-store"})


async def close_listeners(server: Server) -> None:
    """Let responses come to their end, answers too."""
    server.closing.set()
    for stream in server.service.streams.values():
        stream.session.cancel()
        with suppress(RuntimeError):
            stream.events.close()
