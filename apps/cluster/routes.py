"""The routes of a server for a whole cluster: other nodes answer for the cameras that they watch."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from edgevlm.apps.cluster.agent import NodeAgent, asked_for
from edgevlm.apps.cluster.head import HeadAway
from edgevlm.apps.cluster.notes import add_counts
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.forget import Forgotten
from edgevlm.apps.serve.chat import ChatRequest, Strict
from edgevlm.apps.serve.config import CameraSettings
from edgevlm.apps.serve.errors import ApiError, respond
from edgevlm.apps.serve.http import Forget, NewStream, StreamChange, WatchChange
from edgevlm.apps.serve.responses import ResponsesRequest
from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import UserError, nearest

FROM = "x-edgevlm-node"  # the node that a request was forwarded by: it is not forwarded again
PASSED = ("authorization", "content-type", "accept", "range")
CONNECT_S, LIST_S, READ_S = 3.0, 5.0, 600.0  # that another node may take: to connect, for its part of a list, between bytes
FORGET_S = 60.0  # that another node may take to forget: it writes its cameras' snapshots
MERGED = ("/v1/models", "/v1/events", "/v1/digest", "/v1/journal", "/v1/watches")  # lists of which each node has a part
LATE_S = 6.0  # since its last question, after which a node counts as late
OPENING_S = 20.0  # that a camera which was added may take to be given to a node
M = TypeVar("M", bound=BaseModel)


class Noted(Strict):
    """The body by which one node asks another to forget what the head's note of this number names."""

    note: int


class ClusterRoutes:
    """An ASGI application in front of a node's own."""

    def __init__(self, app: Any, service: Service, agent: NodeAgent) -> None:
        self._app, self._service, self._agent = app, service, agent
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(READ_S, connect=CONNECT_S), trust_env=False)
        self._here = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

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
        """None where the node's own application answers, also what is wrong with a body."""
        parts, method = request.url.path.split("/")[2:], request.method
        is_first = FROM not in request.headers
        if parts == ["nodes"] and method == "GET":
            return JSONResponse(self._nodes(await run_in_threadpool(self._agent.heard)))
        if parts[0] == "nodes" and len(parts) == 2 and method == "DELETE":
            return await self._remove_node(parts[1])
        if parts == ["streams"] and method == "GET":
            return JSONResponse(await self._streams(request, is_first))
        if parts == ["streams"] and method == "POST":
            return await self._add(request)
        if parts[0] in ("streams", "models") and len(parts) > 1 and parts[1] != "test":
            return await self._of_camera(request, parts[1], is_first)
        if parts in (["chat", "completions"], ["responses"]) and method == "POST":
            name = await self._asked_about(request, parts)
            return None if name is None else await self._of_camera(request, name, is_first)
        if not is_first and parts[0] == "watches" and method == "PATCH":
            await run_in_threadpool(self._agent.follow)
        if not is_first and parts == ["forget"] and (noted := await body_of(request, Noted)) is not None:
            streams = await run_in_threadpool(self._agent.follow_notes, noted.note)
            return JSONResponse({"streams": streams, "refused": self._agent.notes.refused.get(noted.note)})
        if not is_first:
            return None
        if method == "GET" and (request.url.path in MERGED or parts[0] == "watches"):
            return await self._merged(request)
        if parts[0] == "watches":
            return await self._watches(request, parts[1:])
        if parts == ["forget"] and method == "POST":
            return await self._forget(request)
        if parts[0] == "events" and method == "GET":
            return await self._anywhere(request)
        return None

    def _nodes(self, heard: Mapping[str, float]) -> dict[str, Any]:
        """List nodes as the head knew them at its last answer."""
        view, away = self._agent.view, {"leaving": False}
        cameras = Counter(each["node"] for each in view["cameras"].values())
        nodes = {**dict.fromkeys(view["nodes_forgot"], away), **view["nodes"]}
        data = [
            {
                "id": name, "object": "node", "cameras": cameras[name], "heard_s": heard.get(name), "leaving": node["leaving"]
            } for name, node in nodes.items()
        ]  # fmt: skip
        return {"object": "list", "data": data}

    async def _remove_node(self, name: str) -> Response:
        """Remove a node that is away, for good."""
        if name not in (known := self._agent.view["nodes_forgot"]):
            not_found(f"there is no node {name!r}; {nearest(name, known)}", "name")
        await run_in_threadpool(self._agent.call, "remove_node", name)
        with suppress(HeadAway, UserError):  # it is removed
            await run_in_threadpool(self._agent.ask)
        return Response(status_code=204)

    def _others(self) -> dict[str, str]:
        """Addresses of the other nodes."""
        return {name: node["url"] for name, node in self._agent.view["nodes"].items() if name != self._agent.name}

    async def _streams(self, request: Request, is_first: bool) -> dict[str, Any]:
        agent, cameras = self._agent, self._agent.view["cameras"]
        data = [self._described(name) for name in list(self._service.streams)]
        watts = await run_in_threadpool(self._service.power.watts)
        if is_first:
            for part in await self._of_others(request):
                data += part.get("data", [])
            newest = [each for each in data if each["epoch"] == cameras.get(each["id"], {"epoch": None})["epoch"]]
            known = {each["id"]: each for each in newest if each["id"] in cameras}
            heard = await run_in_threadpool(agent.heard) if cameras.keys() - known else {}
            data = [known.get(name) or self._unopened(name, heard) for name in cameras]
        return {"object": "list", "data": data, "watts": watts}

    def _described(self, name: str) -> dict[str, Any]:
        return {**self._service.stream(name).describe(), **self._agent.describe(name)}

    def _unopened(self, name: str, heard: Mapping[str, float]) -> dict[str, Any]:
        """Describe a camera that its node does not describe."""
        known, here = self._agent.view["cameras"][name], self._agent.problems.get(name)
        where, late_s = known["node"], heard.get(known["node"], 0.0)
        late = f"its node {where} was last heard of {late_s:.0f} s ago" if late_s > LATE_S else "it is being opened"
        return {
            "id": name, "object": "stream", "source": mask_credentials(known["settings"]["source"]),
            "model": mask_credentials(known["model"]), "fps": known["fps"],
            "state": "failed" if known["problem"] or here else "starting",
            "problem": known["problem"] or here or (late if heard else "the head does not answer"),
            "node": where, "epoch": known["epoch"],
        }  # fmt: skip

    async def _add(self, request: Request) -> Response | None:
        if (new := await body_of(request, NewStream)) is None:
            return None
        agent, service = self._agent, self._service
        settings = CameraSettings(**new.model_dump(exclude={"id"}, exclude_none=True))
        await run_in_threadpool(service.check_client, settings)
        given = asked_for(service.config.camera(settings), agent.name, by_client=True)
        await run_in_threadpool(agent.call, "add", new.id, given)
        end = time.monotonic() + OPENING_S
        while time.monotonic() < end:
            await run_in_threadpool(agent.ask)
            known = agent.view["cameras"].get(new.id)
            if known is not None and (known["node"] or known["problem"]):
                break
            await asyncio.sleep(0.2)
        return JSONResponse(self._unopened(new.id, await run_in_threadpool(agent.heard)), 201)

    async def _of_camera(self, request: Request, name: str, is_first: bool) -> Response | None:
        """Have the node answer that watches the camera."""
        agent, known = self._agent, self._agent.view["cameras"].get(name)
        asked = request.method if request.url.path == f"/v1/streams/{name}" else ""
        if known is None:
            not_found(f"there is no stream {name!r}; {nearest(name, agent.view['cameras'])}", "name")
        if asked == "DELETE":
            await run_in_threadpool(agent.call, "remove", name)
            await run_in_threadpool(agent.ask)
            return Response(status_code=204)
        if name in self._service.streams and agent.may_watch(name):
            if asked == "PATCH":
                return await self._change(request, name)
            return JSONResponse(self._described(name)) if asked == "GET" else None
        url = self._others().get(known["node"] or "")
        if url is not None and is_first:
            return await self._forwarded(request, url, known["node"])
        if asked == "GET":
            return JSONResponse(self._unopened(name, await run_in_threadpool(agent.heard)))
        raise away(
            f"{name} is not watched now: {known['problem'] or 'it moves to another node'}; ask again in a moment", "name"
        )

    async def _change(self, request: Request, name: str) -> Response | None:
        """Change a camera here, and wherever it moves."""
        if (change := await body_of(request, StreamChange)) is None:
            return None
        if change.policy is not None or change.budget is not None:
            await run_in_threadpool(self._agent.switch, name, change.policy, change.budget)
        if change.state is not None:
            await run_in_threadpool(self._agent.pause, name, change.state == "paused")
        return JSONResponse(self._described(name))

    async def _asked_about(self, request: Request, parts: list[str]) -> str | None:
        """The stream that a question is about; None where the node's own application reports what is wrong with it."""
        body = await request.body()
        try:
            is_chat = parts[0] == "chat"
            asked = ChatRequest.model_validate_json(body) if is_chat else ResponsesRequest.model_validate_json(body).as_chat()
            name = asked.stream_name
        except (ValidationError, UserError):
            return None
        cameras = list(self._agent.view["cameras"])
        return name or (cameras[0] if len(cameras) == 1 else None)

    async def _forwarded(self, request: Request, url: str, node: str) -> Response:
        asked = self._client.build_request(
            request.method, self._url(url, request), headers=self._headers(request), content=await request.body()
        )
        try:
            given = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            raise away(f"node {node} does not answer ({type(error).__name__}); ask again in a moment") from None

        async def pieces() -> AsyncIterator[bytes]:
            try:
                with suppress(httpx.HTTPError):  # the node went away: so does this answer
                    async for piece in given.aiter_raw():
                        yield piece
            finally:
                await given.aclose()

        headers = {key: given.headers[key] for key in ("content-type", "content-length", "retry-after") if key in given.headers}
        return StreamingResponse(pieces(), given.status_code, headers)

    async def _of_others(self, request: Request, body: bytes | None = None, seconds: float = LIST_S) -> list[dict[str, Any]]:
        """The answers of the other nodes; an empty one for those that do not answer."""
        options: Any = {
            "headers": self._headers(request),
            "content": body,
            "timeout": httpx.Timeout(seconds, connect=CONNECT_S),
        }

        async def one(url: str) -> dict[str, Any]:
            with suppress(httpx.HTTPError, ValueError):
                given = await self._client.request(request.method, self._url(url, request), **options)
                found = given.json() if given.status_code < 300 and given.content else {}
                return found if isinstance(found, dict) else {}
            return {}

        return list(await asyncio.gather(*map(one, self._others().values())))

    async def _locally(self, request: Request) -> Response:
        """The node's own application's answer, whole."""
        url, headers = self._url("http://localhost", request), self._headers(request)
        given = await self._here.request(request.method, url, headers=headers, content=await request.body())
        kind = given.headers.get("content-type", "application/json")
        return Response(given.content, given.status_code, {"content-type": kind})

    async def _merged(self, request: Request) -> Response:
        """One list of all nodes' parts, in the order that each has."""
        own = await self._locally(request)
        path, parts = request.url.path, await self._of_others(request)
        if own.status_code != 200:
            return own
        merged = json.loads(bytes(own.body))
        if path.startswith("/v1/watches/"):
            return self._joined(merged, parts)
        rows: dict[str, dict[str, Any]] = {}
        for row in [*merged["data"], *(row for part in parts for row in part.get("data", []))]:
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
        return JSONResponse({**merged, "data": data})

    def _joined(self, watch: Mapping[str, Any], parts: list[dict[str, Any]]) -> Response:
        """A watch with the cameras of all nodes."""
        return JSONResponse({**watch, "cameras": [each for part in (watch, *parts) for each in part.get("cameras", [])]})

    async def _watches(self, request: Request, parts: list[str]) -> Response | None:
        """Add, remove or pause a watch on all nodes."""
        agent, watches, method = self._agent, self._service.watches, request.method
        if method == "POST" and not parts and (watch := await body_of(request, Watch)) is not None:
            await run_in_threadpool(agent.add_watch, watch)
            return JSONResponse(watches.describe(watch.name), 201)
        if len(parts) != 1 or parts[0] not in watches.watches:
            return None
        if method == "DELETE":
            await run_in_threadpool(agent.remove_watch, parts[0])
            return Response(status_code=204)
        if method == "PATCH" and (change := await body_of(request, WatchChange)) is not None:
            if change.camera is not None and change.camera not in (cameras := agent.view["cameras"]):
                not_found(f"there is no stream {change.camera!r}; {nearest(change.camera, cameras)}", "camera")
            await run_in_threadpool(agent.pause_watch, parts[0], change.state == "paused", change.camera)
            return self._joined(watches.describe(parts[0]), await self._of_others(request, await request.body()))
        return None

    async def _forget(self, request: Request) -> Response | None:
        """Forget on all nodes; ``waiting`` are nodes that are away and cameras that are watched nowhere now."""
        agent = self._agent
        if (what := await body_of(request, Forget)) is None:
            return None
        known = [*agent.view["cameras"], *agent.view["removed"]]
        if what.stream is not None and what.stream not in known:
            not_found(f"there is no stream {what.stream!r}; {nearest(what.stream, known)}", "stream")
        number = await run_in_threadpool(agent.forget, what.stream, what.span())
        await run_in_threadpool(agent.follow_notes, number)
        parts = await self._of_others(request, Noted(note=number).model_dump_json().encode(), FORGET_S)
        here, waiting = await run_in_threadpool(agent.forget_shared, number)
        done: dict[str, Forgotten] = {}
        for each in (*(part.get("streams", {}) for part in parts), here):
            add_counts(done, each)
        for refused in (agent.notes.refused.get(number), *(part.get("refused") for part in parts)):
            if refused is not None:
                raise UserError(refused)
        return JSONResponse({"object": "forget", "streams": done, "waiting": waiting})

    async def _anywhere(self, request: Request) -> Response:
        """Answer here, or by the first node that has it."""
        own = await self._locally(request)
        for node, url in self._others().items() if own.status_code == 404 else ():
            with suppress(ApiError):
                other = await self._forwarded(request, url, node)
                if other.status_code == 200:
                    return other
        return own

    def _url(self, base: str, request: Request) -> str:
        query = request.url.query
        return f"{base}{quote(request.url.path)}" + (f"?{query}" if query else "")

    def _headers(self, request: Request) -> dict[str, str]:
        return {name: request.headers[name] for name in PASSED if name in request.headers} | {FROM: self._agent.name}


async def body_of(request: Request, model: type[M]) -> M | None:
    """A request's body; None where it is not one of the model."""
    try:
        return model.model_validate_json(await request.body())
    except ValidationError:
        return None


def not_found(message: str, param: str) -> NoReturn:
    raise ApiError(404, message, "not_found", param)


def away(message: str, param: str | None = None) -> ApiError:
    return ApiError(503, message, "not_ready", param, soon=2)


def replayed(request: Request) -> Callable[[], Awaitable[Any]]:
    """Return a ``receive`` that brings the request's body again, where it has been read."""
    left = [request._body] if hasattr(request, "_body") else []

    async def receive() -> Any:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await request.receive()

    return receive
