"""The routes of ``edgevlm serve``: OpenAI's API, streams, events, watches, health, metrics and the web page."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from html import escape
from importlib.resources import files
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response, Security
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgevlm import __version__
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.names import MAX_NAME, Name, NamedId, id_of
from edgevlm.apps.run.clock import Span, moment
from edgevlm.apps.run.output import finite, wall_clock
from edgevlm.apps.serve import answers
from edgevlm.apps.serve.answers import content, list_of
from edgevlm.apps.serve.chat import ChatRequest, Strict, TextRequest, unknown
from edgevlm.apps.serve.completion import Completion, TextCompletion
from edgevlm.apps.serve.config import Budget, CameraSettings, Fps, ServeConfig
from edgevlm.apps.serve.errors import ERRORS, ApiError, add_errors
from edgevlm.apps.serve.guard import named_prefix
from edgevlm.apps.serve.metrics import Metrics
from edgevlm.apps.serve.responses import ModelResponse, ResponsesRequest
from edgevlm.apps.serve.service import Service
from edgevlm.apps.serve.stream import CameraStream
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import FieldError, UserError
from edgevlm.runtime.plugins import names
from edgevlm.runtime.policies import POLICIES, find_policy
from edgevlm.runtime.policies.description import describe

PREPARING = 4  # maximum number of questions that fetch pictures or compile a grammar at once
POLL_S = 0.1
MJPEG = "multipart/x-mixed-replace"
PAGE = files("edgevlm.apps.serve").joinpath("page")
MAX_EVENTS = 1000


def wall_time(given: Any) -> float:
    if not isinstance(given, str) or len(given) > 40:
        raise ValueError("must be a time: 10m, 14:03 or RFC 3339")
    try:
        return moment(given)
    except UserError as error:
        raise ValueError(str(error)) from None


Words = Annotated[str, Field(max_length=256)]
Limit = Annotated[int, Field(ge=1, le=MAX_EVENTS)]
SourceText = Annotated[str, Field(min_length=1, max_length=4096)]
PathName = Annotated[str, Path(max_length=MAX_NAME)]
Time = Annotated[float, BeforeValidator(wall_time), WithJsonSchema({"type": "string", "maxLength": 40})]


class NewStream(Strict):
    """A camera to watch. `id` may be a name in any script, which is turned into an id; `name` is the displayed name."""

    id: NamedId
    name: Name | None = None
    source: SourceText
    username: Words | None = Field(None, description="User name for the source's address; any characters.")
    password: Words | None = Field(None, description="Password for the source's address; any characters.")
    policy: Words | None = None
    budget: Budget = None
    fps: Fps | None = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(name := values.get("id"), str) and id_of(name) != name:
            return {"name": name, **values}
        return values


class StreamChange(Strict):
    """Changes to a stream. Omitted settings stay as they are."""

    state: Literal["running", "paused"] | None = None
    policy: Words | None = None
    budget: Budget = None


class Window(BaseModel):
    since: Time | None = Field(None, description="Start of the period: `10m`, `14:03` or RFC 3339.")
    until: Time | None = Field(None, description="End of the period, written like `since`.")

    @field_validator("until")
    @classmethod
    def _follows_since(cls, until: Any, info: ValidationInfo) -> Any:
        if until is not None and until < (info.data.get("since") or -math.inf):
            raise ValueError("is before since")
        return until


class Forget(Window, Strict):
    """The period to delete, for one stream or for all streams. `all` deletes everything; `confirm` must be true."""

    stream: NamedId | None = None
    all: bool = False
    confirm: Literal[True]

    def span(self) -> Span:
        if self.all == bool(self.since or self.until):
            raise FieldError("all", "set either all, or since, until or both")
        return Span(self.since or -math.inf, self.until or math.inf)


class WatchChange(Strict):
    state: Literal["running", "paused"]
    camera: NamedId | None = None


class WindowQuery(Window):
    camera: NamedId | None = None
    limit: Limit = 100


class JournalQuery(WindowQuery):
    search: Words | None = Field(None, description="Only return entries that contain all of these words.")


class DigestQuery(JournalQuery):
    since: Time = Field("8h", validate_default=True, description="Start of the period: `10m`, `14:03` or RFC 3339.")
    limit: Limit = MAX_EVENTS


class EventQuery(WindowQuery):
    watch: NamedId | None = None
    text: Words | None = Field(None, description="Only return events with this text in question, watch name or camera name.")


class TestedSource(Strict):
    source: SourceText
    username: Words | None = None
    password: Words | None = None


class Server:
    """Holds the state that the routes share, including the number of questions that run or wait."""

    def __init__(self, service: Service, load: Callable[[], ServeConfig] | None) -> None:
        self.service, self.metrics, self.load = service, Metrics(service), load
        self.closing = asyncio.Event()
        self.testing = threading.Lock()  # held during a test of a source
        self._preparing = CapacityLimiter(PREPARING)

    def stream(self, name: str | None, param: str = "name") -> CameraStream:
        try:
            return self.service.stream(name)
        except UserError as error:
            raise ApiError(404, str(error), "not_found", param) from None

    async def ask(self, asked: ChatRequest | TextRequest | ResponsesRequest) -> Response:
        """Ask the stream that the request names. Raises ApiError with status 429 if too many questions run or wait."""
        chat = asked if isinstance(asked, ChatRequest) else asked.as_chat()
        settings, stream = self.service.config.server, self.stream(chat.stream_name, "model")
        if isinstance(asked, ResponsesRequest):
            completion: Completion = ModelResponse(asked, chat, stream)
        elif isinstance(asked, TextRequest):
            completion = TextCompletion(chat, stream, unknown(asked))
        else:
            completion = Completion(chat, stream, unknown(chat))
        if not stream.session.stats.frames:
            raise ApiError(503, f"no frame of {stream.name} has been watched yet; ask again in a moment", "not_ready")
        if self.metrics.unfinished >= settings.max_requests:
            self.metrics.refused.inc()
            soon = max(1, math.ceil(self.metrics.answer_s))  # the mean duration of an answer
            why = f"{settings.max_requests} questions are already running or waiting; ask again in {soon} s"
            raise ApiError(429, why, "rate_limit_exceeded", soon=soon)
        self.metrics.unfinished += 1
        try:  # questions with pictures or grammars share PREPARING threads, so that plain questions need not wait for them
            limiter = None if chat.is_plain else self._preparing
            await to_thread.run_sync(completion.ask, settings, limiter=limiter)
        except BaseException:
            self.metrics.unfinished -= 1
            raise
        return Reply(self, completion, bool(asked.stream))

    def finished(self, completion: Completion) -> None:
        completion.cancel()
        self.metrics.unfinished -= 1
        answer = completion.answer
        if not isinstance(answer, str) and answer.found.token_ids:
            self.metrics.answer_s += (time.perf_counter() - completion.began - self.metrics.answer_s) / 8
            self.metrics.answered(completion.stream.name, answer.found)


class Reply(Response):
    """Sends an answer, whole or as a stream, and cancels the answer if the client disconnects."""

    def __init__(self, server: Server, completion: Completion, streamed: bool) -> None:
        super().__init__()
        self._server, self._completion, self._streamed = server, completion, streamed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            if self._streamed:
                response: Response = EventSourceResponse(self._events(), ping=15)
            else:
                response = JSONResponse(await self._whole(receive))
            await response(scope, receive, send)
        finally:
            self._server.finished(self._completion)

    async def _events(self) -> AsyncIterator[dict[str, str]]:
        try:
            async for event in self._completion.events():
                yield event
        except ApiError as error:
            yield {"data": json.dumps(error.body)}
        except UserError as error:
            yield {"data": json.dumps(ApiError(500, mask_credentials(str(error)), None).body)}

    async def _whole(self, receive: Any) -> dict[str, Any]:
        async def cancel_when_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._completion.cancel()

        watching = asyncio.create_task(cancel_when_gone())
        try:
            return await self._completion.complete()
        finally:
            watching.cancel()


async def stream_of(name: PathName, request: Request) -> CameraStream:
    server: Server = request.app.state.server
    return server.stream(name)


async def watch_of(name: PathName, request: Request) -> str:
    service: Service = request.app.state.server.service
    try:
        return service.watches.watch(name).name
    except UserError as error:
        raise ApiError(404, str(error), "not_found", "name") from None


TheStream = Annotated[CameraStream, Depends(stream_of)]
WatchName = Annotated[str, Depends(watch_of)]
COMPLETION: Any = {"response_model": None, "responses": content("application/json", "text/event-stream")}
PICTURE: Any = {"response_class": Response, "responses": content("image/jpeg")}


class HeadAsGet:
    """Middleware that answers HEAD like GET, but without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "HEAD":
            await self._app(scope, receive, send)
            return
        begun = False

        async def received() -> Message:
            return {"type": "http.disconnect"} if begun else await receive()

        async def headed(message: Message) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, received, headed)


def make_app(service: Service, load: Callable[[], ServeConfig] | None = None) -> FastAPI:
    """Return the ASGI application that serves a service. ``POST /v1/reload`` calls ``load`` to read the configuration."""
    app = FastAPI(
        title="edgevlm", version=__version__, description="Ask live cameras questions.", responses=ERRORS,
        docs_url=None, redoc_url=None, redirect_slashes=False, servers=[{"url": "."}],
    )  # fmt: skip
    app.state.server = Server(service, load)
    app.add_middleware(HeadAsGet)
    add_errors(app)
    # for the OpenAPI description only: the guard checks the key
    key = [Security(HTTPBearer(auto_error=False, description="The server's key."))] if service.config.server.key else []
    for tag, add in (("health", add_health), ("OpenAI", add_openai), ("streams", add_streams), ("events", add_events),
                     ("watches", add_watches), ("metrics", add_rest)):  # fmt: skip
        router = APIRouter(tags=[tag], dependencies=[] if tag == "health" else key)
        add(router, app.state.server)
        app.include_router(router)
    return app


def model_entry(stream: CameraStream) -> dict[str, Any]:
    owner, budget = mask_credentials(stream.settings.model or "demo"), stream.session.text_budget
    owner = FilePath(owner).name if FilePath(owner).exists() else owner
    longest = stream.session.max_question_tokens + budget.answer
    return {"id": stream.name, "object": "model", "created": 0, "owned_by": owner, "max_model_len": longest}


def add_openai(router: APIRouter, server: Server) -> None:
    @router.post("/v1/chat/completions", **COMPLETION)
    async def chat_completions(asked: ChatRequest) -> Response:
        """Ask a question about a stream. `model` is the stream's name; text up to the last `/` is ignored."""
        return await server.ask(asked)

    @router.post("/v1/completions", **COMPLETION)
    async def completions(asked: TextRequest) -> Response:
        """Ask a stream through OpenAI's legacy completions API. The prompt becomes a user message."""
        return await server.ask(asked)

    @router.post("/v1/responses", **COMPLETION)
    async def responses(asked: ResponsesRequest) -> Response:
        """Ask a stream through OpenAI's Responses API. Nothing is stored: send the whole conversation as `input`."""
        return await server.ask(asked)

    @router.get("/v1/models", responses=list_of(answers.Model))
    async def models() -> dict[str, Any]:
        """List the streams as OpenAI models."""
        return {"object": "list", "data": [model_entry(stream) for stream in server.service.streams.values()]}

    @router.get("/v1/models/{name}", responses=content(answers.Model))
    async def model(stream: TheStream) -> dict[str, Any]:
        """Return a stream as an OpenAI model."""
        return model_entry(stream)


def add_streams(router: APIRouter, server: Server) -> None:
    service = server.service

    @router.get("/v1/streams", responses=list_of(answers.Stream, watts=answers.WATTS))
    def list_streams() -> dict[str, Any]:
        """Return every camera and its status. `watts` is the machine's power draw, or null without a power meter."""
        data = [stream.describe() for stream in service.streams.values()]
        return {"object": "list", "data": data, "watts": finite(service.power.watts())}

    @router.get("/v1/policies", responses=list_of(answers.Policy))
    def policies() -> dict[str, Any]:
        """Return the policies that a camera's memory can use."""
        known = [describe(find_policy(name)) for name in dict.fromkeys([*POLICIES, *names("policies")])]
        return {"object": "list", "data": [{"id": one.policy, "object": "policy", "idea": one.idea} for one in known]}

    @router.post("/v1/streams", status_code=201, responses=content(answers.Stream, status=201))
    def add_stream(new: NewStream) -> dict[str, Any]:
        """Add a camera and watch it until it is removed or, without a cluster, until the server restarts."""
        settings = CameraSettings(**new.model_dump(exclude={"id"}, exclude_none=True))
        return service.add(new.id, settings, by_client=True).describe()

    @router.post("/v1/streams/test")
    def test_source(tested: TestedSource) -> dict[str, Any]:
        """Test a source without adding a camera: return its frame size, its frames per second and a JPEG in base64."""
        if not server.testing.acquire(blocking=False):
            raise ApiError(429, "another camera is being tested; try again in a moment", "rate_limit_exceeded")
        try:
            return service.test(CameraSettings(**tested.model_dump(exclude_none=True)))
        finally:
            server.testing.release()

    @router.get("/v1/streams/{name}", responses=content(answers.Stream))
    async def one_stream(stream: TheStream) -> dict[str, Any]:
        """Return a camera and its status."""
        return stream.describe()

    @router.patch("/v1/streams/{name}", responses=content(answers.Stream))
    def change_stream(stream: TheStream, change: StreamChange) -> dict[str, Any]:
        """Pause or resume a camera, or change its policy or budget. A paused camera can still be asked.

        Changing the policy or the budget empties the memory. Without a cluster, a change applies until the server restarts.
        """
        if change.policy is not None or change.budget is not None:
            stream = service.switch(stream.name, change.policy, change.budget)
        if change.state is not None:
            (stream.pause if change.state == "paused" else stream.resume)()
        return stream.describe()

    @router.delete("/v1/streams/{name}", status_code=204)
    def remove_stream(stream: TheStream) -> None:
        """Stop watching a camera, but keep its snapshots."""
        service.remove(stream.name)

    @router.get("/v1/streams/{name}/frame.jpg", **PICTURE)
    def frame(stream: TheStream) -> Response:
        """Return the newest watched frame as a JPEG."""
        return as_picture(stream.jpeg(), "no frame has been watched yet")

    @router.get("/v1/streams/{name}/thumbnails/{number}.jpg", **PICTURE)
    def thumbnail(stream: TheStream, number: Annotated[int, Path(ge=0, lt=1 << 62)]) -> Response:
        """Return the thumbnail of a frame that is still in memory."""
        return as_picture(stream.observer.thumbnails.jpeg(number), "this frame is no longer in memory")

    @router.get("/v1/streams/{name}/mjpeg", response_class=Response, responses=content(MJPEG))
    async def mjpeg(stream: TheStream, fps: Annotated[float, Query(gt=0, le=30)] = 5.0) -> Response:
        """Stream frames as they are watched, at most `fps` per second."""

        async def parts() -> AsyncIterator[bytes]:
            last: object = None
            while not server.closing.is_set() and service.streams.get(stream.name) is stream:
                frame = stream.loop.frame
                if frame is not None and frame is not last:
                    last, picture = frame, await run_in_threadpool(stream.jpeg)
                    if picture is not None:
                        head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
                        yield head.encode() + picture + b"\r\n"
                await asyncio.sleep(max(POLL_S, 1 / fps))

        headers = {"x-accel-buffering": "no", "cache-control": "no-store"}  # makes nginx forward each part immediately
        return StreamingResponse(parts(), media_type=f"{MJPEG}; boundary=frame", headers=headers)

    @router.get("/v1/streams/{name}/memory")
    def memory(stream: TheStream) -> dict[str, Any]:
        """Return each frame in memory: its time, its thumbnail, and the fraction of its tokens that are kept, in total and
        per group of layers. `patches` has a hexadecimal digit per token: the fraction of heads that keep the token, in
        fifteenths."""
        return stream.memory()

    @router.get("/v1/streams/{name}/events", response_class=Response, responses=content("text/event-stream"))
    async def stream_events(stream: TheStream) -> Response:
        """Stream server-sent events: answer, state, stats, notice, watch, journal. Clients that read too slowly are dropped."""

        async def listen() -> AsyncIterator[dict[str, str]]:
            queue = stream.events.listen()
            try:
                yield {"event": "state", "data": json.dumps({"state": stream.state, "problem": stream.problem})}
                while (event := await queue.get()) is not None:
                    yield {"event": event[0], "data": json.dumps(event[1])}
            finally:
                stream.events.leave(queue)

        return EventSourceResponse(listen(), ping=15)

    @router.post("/v1/forget", responses=content(answers.Forgotten))
    def forget(what: Forget) -> dict[str, Any]:
        """Permanently delete what was seen in a period: cache rows, snapshots, thumbnails, events and journal lines."""
        if what.stream is not None and what.stream not in service.removed():
            server.stream(what.stream)
        return {"object": "forget", "streams": service.forget(what.stream, what.span())}

    @router.post("/v1/reload", responses=content(answers.Reloaded))
    def reload() -> dict[str, Any]:
        """Reload the configuration, as on SIGHUP, and reopen changed cameras. The reply's `done` lists the changes."""
        if server.load is None:
            raise ApiError(400, "this server has no configuration to reload", "invalid_value")
        return {"object": "reload", "done": service.reload(server.load())}


def add_events(router: APIRouter, server: Server) -> None:
    service = server.service

    @router.get("/v1/journal", responses=list_of(answers.Line))
    def journal(asked: Annotated[JournalQuery, Query()]) -> dict[str, Any]:
        """Return journal lines, newest first."""
        return {"object": "list", "data": [line.json() for line in service.lines(**dict(asked))]}

    @router.get("/v1/events", responses=list_of(answers.Event))
    def watch_events(asked: Annotated[EventQuery, Query()]) -> dict[str, Any]:
        """Return the openings and closings of watches, newest first."""
        return {"object": "list", "data": [each.json() for each in service.delivery.store.query(**dict(asked))]}

    @router.get("/v1/digest", responses=list_of(answers.Opening, answers.Line, since=answers.SINCE, until=answers.UNTIL))
    def digest(asked: Annotated[DigestQuery, Query()]) -> dict[str, Any]:
        """Return the openings of watches (`opening`) and the journal lines (`line`) in a period, with evidence, oldest first.

        If there are more than `limit` entries, only the newest entries are returned.
        """
        span = {"since": asked.since or 0.0, "until": time.time() if asked.until is None else asked.until}
        found = service.digest(**span, camera=asked.camera, search=asked.search)
        return {"object": "digest", **{name: wall_clock(at) for name, at in span.items()}, "data": found[-asked.limit :]}

    @router.get("/v1/events/{event}/{place}.jpg", **PICTURE)
    def event_picture(
        event: Annotated[str, Path(pattern="^[0-9a-f]{32}$")], place: Annotated[int, Path(ge=0, lt=1 << 15)]
    ) -> Response:
        """Return one picture of an event's evidence. `place` is the picture's index in the evidence, from 0."""
        return as_picture(service.delivery.store.picture(event, place), "picture not found; it may have been deleted")


def add_watches(router: APIRouter, server: Server) -> None:
    watches = server.service.watches

    @router.get("/v1/watches", responses=list_of(answers.WatchState))
    def list_watches() -> dict[str, Any]:
        """Return every watch, with its state on each of its cameras."""
        return {"object": "list", "data": [watches.describe(name) for name in watches.watches]}

    @router.post("/v1/watches", status_code=201, responses=content(answers.WatchState, status=201))
    def add_watch(watch: Watch) -> dict[str, Any]:
        """Add a watch, which repeats a question until it is removed or, without a cluster, until the server restarts."""
        watches.add(watch)
        return watches.describe(watch.name)

    @router.get("/v1/watches/{name}", responses=content(answers.WatchState))
    def one_watch(name: WatchName) -> dict[str, Any]:
        """Return a watch, with its state on each of its cameras."""
        return watches.describe(name)

    @router.patch("/v1/watches/{name}", responses=content(answers.WatchState))
    def change_watch(name: WatchName, change: WatchChange) -> dict[str, Any]:
        """Pause or resume a watch, on one camera or on all cameras. Pausing closes an open watch."""
        if change.camera is not None:
            server.stream(change.camera, "camera")
        watches.pause(name, change.state == "paused", change.camera)
        return watches.describe(name)

    @router.delete("/v1/watches/{name}", status_code=204)
    def remove_watch(name: WatchName) -> None:
        """Delete a watch, after closing it if it is open."""
        watches.remove(name)


def add_health(router: APIRouter, server: Server) -> None:
    @router.get("/health", responses=content(answers.Health))
    @router.get("/health/live", responses=content(answers.Health))
    async def live() -> dict[str, str]:
        """Return 200 as long as the process can answer."""
        return {"status": "ok"}

    @router.get("/health/ready", responses=content(answers.Health))
    async def ready() -> dict[str, str]:
        """Return 200 once every stream that is not paused has watched a frame, and 503 until then."""
        streams = server.service.streams.values()
        waiting = [stream for stream in streams if not (stream.paused or stream.session.stats.frames)]
        if waiting:
            raise ApiError(503, f"{len(waiting)} of {len(streams)} streams have not watched a frame yet", "not_ready")
        return {"status": "ok"}


def add_rest(router: APIRouter, server: Server) -> None:
    @router.get("/metrics", response_class=Response, responses=content("text/plain"))
    def metrics() -> Response:
        """Return metrics in Prometheus text format."""
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> HTMLResponse:
        text, prefix = PAGE.joinpath("index.html").read_text("utf-8"), named_prefix(request.headers)
        base = f'<base href="{escape(prefix)}/">' if prefix else ""  # keeps links right if the page's address lacks its last /
        return HTMLResponse(text.replace("<head>", f"<head>{base}", 1))

    @router.get("/static/{name}", include_in_schema=False)
    async def static(name: Literal["app.js", "style.css"]) -> FileResponse:
        return FileResponse(str(PAGE.joinpath(name)))


def as_picture(jpeg: bytes | None, otherwise: str) -> Response:
    if jpeg is None:
        raise ApiError(404, otherwise, "not_found")
    return Response(jpeg, media_type="image/jpeg", headers={"cache-control": "no-store"})


async def close_listeners(server: Server) -> None:
    """End streamed responses and cancel running answers."""
    server.closing.set()
    for stream in server.service.streams.values():
        stream.session.cancel()
        with suppress(RuntimeError):
            stream.events.close()
