"""The routes of a server for a whole cluster: what another node watches is asked there."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx
from pydantic import ValidationError
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
from edgevlm.apps.serve.errors import error_body
from edgevlm.apps.serve.http import Forget, NewStream, StreamChange, WatchChange
from edgevlm.apps.serve.responses import ResponsesRequest
from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import FieldError, UserError, nearest

FROM = "x-edgevlm-node"  # the node that a request was forwarded by: it is not forwarded again
PASSED = ("authorization", "content-type", "accept", "range")
CONNECT_S, LIST_S, READ_S = 3.0, 5.0, 600.0  # that another node may take: to connect, for its part of a list, between bytes
FORGET_S = 60.0  # that another node may take to forget: it writes its cameras' snapshots
MERGED = ("/v1/models", "/v1/events", "/v1/digest", "/v1/journal", "/v1/watches")  # lists of which each node has a part
LATE_S = 6.0  # after which a node that is not heard of is told of
OPENING_S = 20.0  # that a camera which was added may take to be given to a node


class Noted(Strict):
    """What one node asks another: to forget what the head's note of this number says."""

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
        except FieldError as error:
            response = problem(400, str(error), "invalid_value", error.field)
        except UserError as error:
            response = problem(400, mask_credentials(str(error)), "invalid_value")
        except HeadAway as error:
            response = problem(503, f"the cluster's head does not answer ({error}); try again in a moment", "not_ready")
        if response is not None:
            await response(scope, receive, send)
        else:
            await self._app(scope, replayed(request), send)

    async def _answer(self, request: Request) -> Response | None:
        """None: by the node's own application."""
        parts, method = request.url.path.split("/")[2:], request.method
        is_first = FROM not in request.headers
        if parts == ["nodes"] and method == "GET":
            return JSONResponse(self._nodes(await self._heard()))
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
        if not is_first and parts == ["forget"] and method == "POST":
            with suppress(ValidationError):
                noted = Noted.model_validate_json(await request.body())
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

    async def _heard(self) -> dict[str, float]:
        return await run_in_threadpool(self._agent.heard)

    def _nodes(self, heard: Mapping[str, float]) -> dict[str, Any]:
        """Nodes as the head knew them at its last answer."""
        view, away = self._agent.view, {"leaving": False}
        cameras = Counter(each["node"] for each in view["cameras"].values())
        nodes = {**dict.fromkeys(view["nodes_forgot"], away), **view["nodes"]}
        data = [
            {
                "id": name, "object": "node", "cameras": cameras[name], "heard_s": heard.get(name),
                "leaving": node["leaving"],
            }
            for name, node in nodes.items()
        ]  # fmt: skip
        return {"object": "list", "data": data}

    async def _remove_node(self, name: str) -> Response:
        """One that is away, for good."""
        if name not in (known := self._agent.view["nodes_forgot"]):
            return problem(404, f"there is no node {name!r}; {nearest(name, known)}", "not_found", "name")
        await run_in_threadpool(self._agent.call, "remove_node", name)
        with suppress(HeadAway, UserError):  # it is removed
            await run_in_threadpool(self._agent.ask)
        return Response(status_code=204)

    def _others(self) -> dict[str, str]:
        """Addresses of the other nodes."""
        return {name: node["url"] for name, node in self._agent.view["nodes"].items() if name != self._agent.name}

    async def _streams(self, request: Request, is_first: bool) -> dict[str, Any]:
        agent = self._agent
        data = [{**stream.describe(), **agent.describe(name)} for name, stream in self._service.streams.items()]
        watts = await run_in_threadpool(self._service.power.watts)
        if is_first:
            for answer in await self._of_others(request):
                data += answer.get("data", [])
            known = {each["id"]: each for each in data if self._is_newest(each)}
            heard = await self._heard() if agent.view["cameras"].keys() - known else {}
            data = [known.get(name) or self._told_of(name, heard) for name in agent.view["cameras"]]
        return {"object": "list", "data": data, "watts": watts}

    def _is_newest(self, described: Mapping[str, Any]) -> bool:
        known = self._agent.view["cameras"].get(described["id"])
        return known is not None and described["epoch"] == known["epoch"]

    def _told_of(self, name: str, heard: Mapping[str, float]) -> dict[str, Any]:
        """A camera of which its node does not tell."""
        known, here = self._agent.view["cameras"][name], self._agent.problems.get(name)
        where = known["node"]
        heard_s = heard.get(where, 0.0)
        late = f"its node {where} was last heard of {heard_s:.0f} s ago" if heard_s > LATE_S else "it is being opened"
        late = late if heard else "the head does not answer"
        why = known["problem"] or here or late
        return {
            "id": name, "object": "stream", "source": mask_credentials(known["settings"]["source"]),
            "model": mask_credentials(known["model"]), "fps": known["fps"],
            "state": "failed" if known["problem"] or here else "starting", "problem": why,
            "node": where, "epoch": known["epoch"],
        }  # fmt: skip

    async def _add(self, request: Request) -> Response:
        try:
            new = NewStream.model_validate_json(await request.body())
        except ValidationError:
            return await self._locally(request)  # it says what is wrong
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
        return JSONResponse(self._told_of(new.id, await self._heard()), 201)

    async def _of_camera(self, request: Request, name: str, is_first: bool) -> Response | None:
        """By the node that watches it."""
        agent, known = self._agent, self._agent.view["cameras"].get(name)
        if known is None:
            return problem(404, f"there is no stream {name!r}; {nearest(name, agent.view['cameras'])}", "not_found", "name")
        if request.method == "DELETE" and request.url.path == f"/v1/streams/{name}":
            await run_in_threadpool(agent.call, "remove", name)
            await run_in_threadpool(agent.ask)
            return Response(status_code=204)
        if name in self._service.streams and agent.may_watch(name):
            if request.method == "PATCH" and request.url.path == f"/v1/streams/{name}":
                return await self._change(request, name)
            if request.method == "GET" and request.url.path == f"/v1/streams/{name}":
                return self._described(name)
            return None
        url = self._others().get(known["node"] or "")
        if url is None or not is_first:
            if request.method == "GET" and request.url.path == f"/v1/streams/{name}":
                return JSONResponse(self._told_of(name, await self._heard()))
            why = known["problem"] or "it moves to another node"
            return problem(503, f"{name} is not watched now: {why}; ask again in a moment", "not_ready", "name")
        return await self._forwarded(request, url, known["node"])

    def _described(self, name: str) -> Response:
        return JSONResponse({**self._service.stream(name).describe(), **self._agent.describe(name)})

    async def _change(self, request: Request, name: str) -> Response | None:
        """Here, and wherever the camera moves."""
        try:
            change = StreamChange.model_validate_json(await request.body())
        except ValidationError:
            return None
        if change.policy is not None or change.budget is not None:
            await run_in_threadpool(self._agent.switch, name, change.policy, change.budget)
        if change.state is not None:
            await run_in_threadpool(self._agent.pause, name, change.state == "paused")
        return self._described(name)

    async def _asked_about(self, request: Request, parts: list[str]) -> str | None:
        """The stream that a question is about; None where the node's own application says what is wrong with it."""
        body = await request.body()
        try:
            asked = (
                ChatRequest.model_validate_json(body)
                if parts[0] == "chat"
                else ResponsesRequest.model_validate_json(body).as_chat()
            )
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
            answer = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            return problem(503, f"node {node} does not answer ({type(error).__name__}); ask again in a moment", "not_ready")

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            except httpx.HTTPError:
                return  # the node went away: so does this answer
            finally:
                await answer.aclose()

        headers = {
            key: value for key, value in answer.headers.items() if key in ("content-type", "content-length", "retry-after")
        }
        return StreamingResponse(pieces(), answer.status_code, headers)

    async def _of_others(self, request: Request, body: bytes | None = None, seconds: float = LIST_S) -> list[dict[str, Any]]:
        """What the other nodes answer; nothing of those that do not."""
        patience = httpx.Timeout(seconds, connect=CONNECT_S)

        async def one(url: str) -> dict[str, Any]:
            try:
                asked = self._client.request(
                    request.method, self._url(url, request), headers=self._headers(request), content=body, timeout=patience
                )
                answer = await asked
                found = answer.json() if answer.status_code < 300 and answer.content else {}
                return found if isinstance(found, dict) else {}
            except (httpx.HTTPError, ValueError):
                return {}

        return list(await asyncio.gather(*map(one, self._others().values())))

    async def _locally(self, request: Request) -> Response:
        """The node's own application's answer, whole."""
        url, headers = self._url("http://localhost", request), self._headers(request)
        answer = await self._here.request(request.method, url, headers=headers, content=await request.body())
        return Response(
            answer.content, answer.status_code, {"content-type": answer.headers.get("content-type", "application/json")}
        )

    async def _merged(self, request: Request) -> Response:
        """One list of all nodes' parts, in the order that each has."""
        own = await self._locally(request)
        path, parts = request.url.path, await self._of_others(request)
        if own.status_code != 200:
            return own
        merged = json.loads(bytes(own.body))
        if path.startswith("/v1/watches/"):
            return JSONResponse({**merged, "cameras": [each for of in (merged, *parts) for each in of.get("cameras", [])]})
        rows: dict[str, dict[str, Any]] = {}
        for row in [*merged["data"], *(row for part in parts for row in part.get("data", []))]:
            key = row["id"] if "id" in row and "event" not in row else json.dumps(row, sort_keys=True)
            key = row["id"] if row.get("event") == "watch" else key
            if path == "/v1/watches" and key in rows:
                rows[key]["cameras"] += row["cameras"]
            else:
                rows.setdefault(key, row)
        data = list(rows.values())
        if path in ("/v1/events", "/v1/journal", "/v1/digest"):
            limit = int(request.query_params.get("limit", 1000 if path == "/v1/digest" else 100))
            data.sort(key=lambda row: row.get("time") or row.get("opened") or "", reverse=path != "/v1/digest")
            data = data[-limit:] if path == "/v1/digest" else data[:limit]
        return JSONResponse({**merged, "data": data})

    async def _watches(self, request: Request, parts: list[str]) -> Response:
        """On all nodes."""
        if request.method == "POST" and not parts:
            with suppress(ValidationError):
                watch = Watch.model_validate_json(await request.body())
                await run_in_threadpool(self._agent.add_watch, watch)
                return JSONResponse(self._service.watches.describe(watch.name), 201)
        elif request.method == "DELETE" and len(parts) == 1 and parts[0] in self._service.watches.watches:
            await run_in_threadpool(self._agent.remove_watch, parts[0])
            return Response(status_code=204)
        elif request.method == "PATCH" and len(parts) == 1 and parts[0] in self._service.watches.watches:
            with suppress(ValidationError):
                change, cameras = WatchChange.model_validate_json(await request.body()), self._agent.view["cameras"]
                if change.camera is not None and change.camera not in cameras:
                    there = nearest(change.camera, cameras)
                    return problem(404, f"there is no stream {change.camera!r}; {there}", "not_found", "camera")
                await run_in_threadpool(self._agent.pause_watch, parts[0], change.state == "paused", change.camera)
                told = [self._service.watches.describe(parts[0]), *await self._of_others(request, await request.body())]
                return JSONResponse({**told[0], "cameras": [each for of in told for each in of.get("cameras", [])]})
        return await self._locally(request)

    async def _forget(self, request: Request) -> Response:
        """On all nodes; ``waiting`` are nodes that are away, and cameras that are watched nowhere now: they do so later."""
        agent = self._agent
        try:
            what = Forget.model_validate_json(await request.body())
        except ValidationError:
            return await self._locally(request)
        known = [*agent.view["cameras"], *agent.view["removed"]]
        if what.stream is not None and what.stream not in known:
            return problem(404, f"there is no stream {what.stream!r}; {nearest(what.stream, known)}", "not_found", "stream")
        number = await run_in_threadpool(agent.forget, what.stream, what.span())
        done: dict[str, Forgotten] = {}
        await run_in_threadpool(agent.follow_notes, number)
        parts = await self._of_others(request, Noted(note=number).model_dump_json().encode(), FORGET_S)
        for part in parts:
            add_counts(done, part.get("streams", {}))
        here, waiting = await run_in_threadpool(agent.forget_shared, number)
        add_counts(done, here)
        for refused in (agent.notes.refused.get(number), *(part.get("refused") for part in parts)):
            if refused is not None:
                return problem(400, refused, "invalid_value")
        return JSONResponse({"object": "forget", "streams": done, "waiting": waiting})

    async def _anywhere(self, request: Request) -> Response:
        """Here, or at the first node that has it."""
        answer = await self._locally(request)
        for node, url in self._others().items():
            if answer.status_code != 404:
                break
            other = await self._forwarded(request, url, node)
            if other.status_code == 200:
                return other
        return answer

    def _url(self, base: str, request: Request) -> str:
        query = request.url.query
        return f"{base}{quote(request.url.path)}" + (f"?{query}" if query else "")

    def _headers(self, request: Request) -> dict[str, str]:
        return {name: request.headers[name] for name in PASSED if name in request.headers} | {FROM: self._agent.name}


def problem(status: int, message: str, code: str, param: str | None = None) -> Response:
    """An error in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse(error_body(message, code, param, kind), status, {"retry-after": "2"} if status == 503 else None)


def replayed(request: Request) -> Callable[[], Awaitable[Any]]:
    """What brings the request's body again, where it has been read."""
    body: bytes | None = getattr(request, "_body", None)
    if body is None:
        return request.receive
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if sent:
            return await request.receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
