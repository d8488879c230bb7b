"""Answer HTTP requests in a cluster. The node that watches a camera answers requests about the camera."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from edgevlm.apps.cluster.agent import NodeAgent
from edgevlm.apps.cluster.director import Fields
from edgevlm.apps.cluster.head import HeadAway
from edgevlm.apps.cluster.notes import add_counts
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.forget import Forgotten
from edgevlm.apps.names import id_of
from edgevlm.apps.serve.chat import ChatRequest, Strict, TextRequest
from edgevlm.apps.serve.config import CameraSettings
from edgevlm.apps.serve.errors import ApiError, respond
from edgevlm.apps.serve.http import Forget, NewStream, StreamChange, WatchChange
from edgevlm.apps.serve.responses import ResponsesRequest
from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import UserError, nearest

FROM = "x-edgevlm-node"  # header that marks a forwarded request, so that no node forwards it again
PASSED = ("authorization", "content-type", "accept", "range")
CONNECT_S, LIST_S, READ_S = 3.0, 5.0, 600.0  # timeouts for a node to accept a connection, send a list, send the next bytes
FORGET_S = 60.0
HERE = "http://here"  # base URL for requests to this node's own application
LATE_S = 6.0
OPENING_S = 20.0  # longest wait for an added camera to get a node
M = TypeVar("M", bound=BaseModel)


class Noted(Strict):
    """The body of ``POST /v1/forget`` from another node: the forget request's number."""

    note: int


class ClusterRoutes:
    """An ASGI application that answers or forwards a cluster's requests, and passes all other requests to ``app``."""

    def __init__(self, app: Any, service: Service, agent: NodeAgent) -> None:
        self._app, self._service, self._agent = app, service, agent
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S), trust_env=False, mounts={HERE: httpx.ASGITransport(app)}
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return
        except (ApiError, UserError) as error:
            response = respond(error)
        except HeadAway as error:
            response = respond(away(f"the cluster's head does not answer ({error}); try again in a moment"))
        if response is not None:
            await response(scope, receive, send)
        else:
            await self._app(scope, replayed(request), send)

    async def _answer(self, request: Request) -> Response | None:
        agent, is_first = self._agent, FROM not in request.headers
        match request.method, *request.url.path.split("/")[2:]:
            case "GET", "nodes":
                return JSONResponse(self._nodes(await run_in_threadpool(agent.heard)))
            case "DELETE", "nodes", name:
                check_known(name, agent.view["nodes_forgot"], "node", "name")
                await run_in_threadpool(agent.call, "remove_node", name)
                with suppress(HeadAway, UserError):  # ask only updates this node's view: the head has removed the other node
                    await run_in_threadpool(agent.ask)
                return Response(status_code=204)
            case "GET", "streams":
                return JSONResponse(await self._streams(request, is_first))
            case "POST", "streams":
                return await self._add(request)
            case _, "streams" | "models", name, *_ if name != "test":
                return await self._of_camera(request, name, is_first)
            case ("POST", "chat", "completions") | ("POST", "completions" | "responses"):
                about = await self._asked_about(request)
                return None if about is None else await self._of_camera(request, about, is_first)
            case "PATCH", "watches", name if not is_first:
                await run_in_threadpool(agent.follow)
            case "POST", "forget" if not is_first and (noted := await body_of(request, Noted)) is not None:
                return JSONResponse(await run_in_threadpool(agent.follow_notes, noted.note))
            case _ if not is_first:
                return None
            case "GET", "models" | "events" | "digest" | "journal" | "watches":
                return await self._merged(request)
            case "GET", "watches", name:
                own, *others = await self._asked(request, [HERE, *self._others().values()])
                return joined(own.json(), others) if own.status_code == 200 else copied(own)
            case "GET", "events", *_:  # only the node that recorded an event has its pictures
                found = await self._asked(request, [HERE, *self._others().values()])
                return copied(next((each for each in found if each.status_code == 200), found[0]))
            case method, "watches", *names:
                return await self._watches(request, method, *names)
            case "POST", "forget":
                return await self._forget(request)
        return None

    def _nodes(self, heard: Mapping[str, float]) -> Fields:
        view = self._agent.view
        cameras = Counter(each["node"] for each in view["cameras"].values())
        nodes = {**{name: {"leaving": False} for name in view["nodes_forgot"]}, **view["nodes"]}
        data = [
            {"id": name, "object": "node", "cameras": cameras[name], "heard_s": heard.get(name), "leaving": node["leaving"]}
            for name, node in nodes.items()
        ]
        return {"object": "list", "data": data}

    def _others(self) -> dict[str, str]:
        return {name: node["url"] for name, node in self._agent.view["nodes"].items() if name != self._agent.name}

    async def _streams(self, request: Request, is_first: bool) -> Fields:
        agent, cameras = self._agent, self._agent.view["cameras"]
        data = [agent.describe(name) for name in list(self._service.streams)]
        watts = await run_in_threadpool(self._service.power.watts)
        if is_first:
            for part in await self._asked(request, self._others().values()):
                data += part.json()["data"] if part.status_code == 200 else []
            known = {each["id"]: each for each in data if each["epoch"] == cameras.get(each["id"], {}).get("epoch")}
            heard = await run_in_threadpool(agent.heard) if cameras.keys() - known else {}
            data = [known.get(name) or self._unopened(name, heard) for name in cameras]
        return {"object": "list", "data": data, "watts": watts}

    def _unopened(self, name: str, heard: Mapping[str, float]) -> Fields:
        known, here = self._agent.view["cameras"][name], self._agent.problems.get(name)
        where, late_s = known["node"], heard.get(known["node"], 0.0)
        late = f"its node {where} has not answered for {late_s:.0f} s" if late_s > LATE_S else "the camera is being opened"
        return {
            "id": name, "object": "stream", "name": known["settings"].get("name") or name,
            "source": mask_credentials(known["settings"]["source"]),
            "model": mask_credentials(known["model"]), "fps": known["fps"],
            "state": "failed" if known["problem"] or here else "starting",
            "problem": known["problem"] or here or (late if heard else "the head does not answer"),
            "node": where, "epoch": known["epoch"],
        }  # fmt: skip

    async def _add(self, request: Request) -> Response | None:
        if (new := await body_of(request, NewStream)) is None:
            return None
        agent, end = self._agent, time.monotonic() + OPENING_S
        settings = CameraSettings(**new.model_dump(exclude={"id"}, exclude_none=True))
        await run_in_threadpool(self._service.check_client, settings)
        await run_in_threadpool(agent.call, "add", new.id, agent.asked_for(settings, by_client=True))
        while time.monotonic() < end:
            await run_in_threadpool(agent.ask)
            known = agent.view["cameras"].get(new.id)
            if known is not None and (known["node"] or known["problem"]):
                break
            await asyncio.sleep(0.2)
        return JSONResponse(self._unopened(new.id, await run_in_threadpool(agent.heard)), 201)

    async def _of_camera(self, request: Request, name: str, is_first: bool) -> Response | None:
        agent = self._agent
        check_known(name, agent.view["cameras"], "stream", "name")
        known = agent.view["cameras"][name]
        asked = request.method if request.url.path == f"/v1/streams/{name}" else ""
        if asked == "DELETE":
            await run_in_threadpool(agent.call, "remove", name)
            await run_in_threadpool(agent.ask)
            return Response(status_code=204)
        if name in self._service.streams and agent.may_watch(name):
            if asked == "PATCH":
                if (change := await body_of(request, StreamChange)) is None:
                    return None
                paused = None if change.state is None else change.state == "paused"
                await run_in_threadpool(agent.change, name, change.policy, change.budget, paused)
            return JSONResponse(agent.describe(name)) if asked in ("GET", "PATCH") else None
        url = self._others().get(known["node"] or "")
        if url is not None and is_first:
            return await self._forwarded(request, url, known["node"])
        if asked == "GET":
            return JSONResponse(self._unopened(name, await run_in_threadpool(agent.heard)))
        raise away(
            f"{name} is not being watched: {known['problem'] or 'it is moving to another node'}; try again in a moment", "name"
        )

    async def _asked_about(self, request: Request) -> str | None:
        body, cameras = await request.body(), list(self._agent.view["cameras"])
        shapes: dict[str, type[ResponsesRequest | TextRequest]] = {
            "/v1/completions": TextRequest,
            "/v1/responses": ResponsesRequest,
        }
        shape = shapes.get(request.url.path)
        try:
            asked = ChatRequest.model_validate_json(body) if shape is None else shape.model_validate_json(body).as_chat()
            return id_of(asked.stream_name) if asked.stream_name else (cameras[0] if len(cameras) == 1 else None)
        except (ValidationError, UserError):
            return None

    async def _forwarded(self, request: Request, url: str, node: str) -> Response:
        asked = self._client.build_request(
            request.method, self._url(url, request), headers=self._headers(request), content=await request.body()
        )
        try:
            given = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            raise away(f"node {node} does not answer ({type(error).__name__}); try again in a moment") from None

        async def pieces() -> AsyncIterator[bytes]:
            try:
                with suppress(httpx.HTTPError):  # the other node went away, so this answer ends
                    async for piece in given.aiter_raw():
                        yield piece
            finally:
                await given.aclose()

        headers = {key: given.headers[key] for key in ("content-type", "content-length", "retry-after") if key in given.headers}
        return StreamingResponse(pieces(), given.status_code, headers)

    async def _asked(
        self, request: Request, urls: Collection[str], body: bytes | None = None, seconds: float = LIST_S
    ) -> list[httpx.Response]:
        async def one(url: str) -> httpx.Response | None:
            with suppress(httpx.HTTPError):
                return await self._client.request(
                    request.method, self._url(url, request), headers=self._headers(request), content=body,
                    timeout=httpx.Timeout(seconds, connect=CONNECT_S),
                )  # fmt: skip
            return None

        return [each for each in await asyncio.gather(*map(one, urls)) if each is not None]

    async def _merged(self, request: Request) -> Response:
        own, *others = await self._asked(request, [HERE, *self._others().values()])
        if own.status_code != 200:
            return copied(own)
        path, rows = request.url.path, dict[str, Fields]()
        for row in [row for part in (own, *others) if part.status_code == 200 for row in part.json()["data"]]:
            has_id = row.get("event", "watch") == "watch" and "id" in row
            key = row["id"] if has_id else json.dumps(row, sort_keys=True)
            if path == "/v1/watches" and key in rows:
                rows[key]["cameras"] += row["cameras"]
            else:
                rows.setdefault(key, row)
        data, is_digest = list(rows.values()), path == "/v1/digest"
        if path in ("/v1/events", "/v1/journal", "/v1/digest"):
            limit = int(request.query_params.get("limit", 1000 if is_digest else 100))
            data.sort(key=lambda row: row.get("time") or row.get("opened") or "", reverse=not is_digest)
            data = data[-limit:] if is_digest else data[:limit]
        return JSONResponse({**own.json(), "data": data})

    async def _watches(self, request: Request, method: str, name: str | None = None, *_: str) -> Response | None:
        agent, watches = self._agent, self._service.watches
        if method == "POST" and name is None and (watch := await body_of(request, Watch)) is not None:
            await run_in_threadpool(agent.add_watch, watch)
            return JSONResponse(watches.describe(watch.name), 201)
        if name not in watches.watches:
            return None
        if method == "DELETE":
            await run_in_threadpool(agent.remove_watch, name)
            return Response(status_code=204)
        if method == "PATCH" and (change := await body_of(request, WatchChange)) is not None:
            if change.camera is not None:
                check_known(change.camera, agent.view["cameras"], "stream", "camera")
            await run_in_threadpool(agent.pause_watch, name, change.state == "paused", change.camera)
            return joined(watches.describe(name), await self._asked(request, self._others().values(), await request.body()))
        return None

    async def _forget(self, request: Request) -> Response | None:
        agent = self._agent
        if (what := await body_of(request, Forget)) is None:
            return None
        if what.stream is not None:
            check_known(what.stream, [*agent.view["cameras"], *agent.view["removed"]], "stream", "stream")
        number = await run_in_threadpool(agent.forget, what.stream, what.span())
        note = Noted(note=number).model_dump_json().encode()
        parts = [each.json() for each in await self._asked(request, self._others().values(), note, FORGET_S) if each.is_success]
        here, waiting = await run_in_threadpool(agent.forget_shared, number)
        done: dict[str, Forgotten] = {}
        for part in (*parts, here):
            add_counts(done, part["streams"])
            if part["refused"] is not None:
                raise UserError(part["refused"])
        return JSONResponse({"object": "forget", "streams": done, "waiting": waiting})

    def _url(self, base: str, request: Request) -> str:
        query = request.url.query
        return f"{base}{quote(request.url.path)}" + (f"?{query}" if query else "")

    def _headers(self, request: Request) -> dict[str, str]:
        return {name: request.headers[name] for name in PASSED if name in request.headers} | {FROM: self._agent.name}


def joined(watch: Fields, parts: Collection[httpx.Response]) -> Response:
    others = [each for part in parts if part.status_code == 200 for each in part.json()["cameras"]]
    return JSONResponse({**watch, "cameras": [*watch["cameras"], *others]})


def copied(given: httpx.Response) -> Response:
    return Response(given.content, given.status_code, {"content-type": given.headers.get("content-type", "application/json")})


async def body_of(request: Request, model: type[M]) -> M | None:
    try:
        return model.model_validate_json(await request.body())
    except ValidationError:
        return None


def check_known(name: str, names: Collection[str], what: str, param: str) -> None:
    if name not in names:
        raise ApiError(404, f"{what} {name!r} not found; {nearest(name, names)}", "not_found", param)


def away(message: str, param: str | None = None) -> ApiError:
    return ApiError(503, message, "not_ready", param, soon=2)


def replayed(request: Request) -> Callable[[], Awaitable[Any]]:
    """Return an ASGI ``receive`` function that sends a request's body again after it was read."""
    left = [request._body] if hasattr(request, "_body") else []

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await request.receive()

    return receive
