"""The Hugging Face hub's protocol on loopback: repositories of plain files, and faults on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Reply = tuple[int, dict[str, str], Any]  # status, headers, and an object for JSON or the bytes of a file
LARGE = 2000  # bytes; files as large are LFS's: known by SHA-256, and served from another path


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class FakeHub:
    """``repos``: name -> revision -> commit; ``commits``: files by name. What came in is in ``requests``.

    ``cuts``: bytes after which transfers of large files are cut, the last one first; a shorter one is not. ``answer``: called
    with a request, it may answer in the hub's place with status, headers and an object.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, str]] = {}
        self.commits: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.renamed: dict[str, str] = {}
        self.private: dict[str, bool] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.cuts: list[int] = []
        self.answer: Callable[[str, str, dict[str, str]], Reply | None] = lambda *_: None
        self.cdn = self.url = ""

    def add(self, repo: str, files: Path | dict[str, bytes], *revisions: str) -> str:
        """A commit of these files, which ``main`` and the revisions name; returns it."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir()}
        commit = hashlib.sha1(json.dumps({name: self.digest(data) for name, data in files.items()}).encode()).hexdigest()
        self.commits[commit] = files
        self.repos.setdefault(repo, {}).update(dict.fromkeys(("main", commit, *revisions), commit))
        self.blobs.update({self.digest(data): data for data in files.values()})
        return commit

    @staticmethod
    def digest(data: bytes) -> str:
        """SHA-256 of large files, git's hash of others."""
        return hashlib.sha256(data).hexdigest() if len(data) >= LARGE else git_hash(data)

    def info(self, repo: str, commit: str) -> dict[str, Any]:
        siblings = []
        for name, data in self.commits[commit].items():
            lfs = {"sha256": self.digest(data), "size": len(data), "pointerSize": 130} if len(data) >= LARGE else None
            siblings.append({"rfilename": name, "size": len(data), "blobId": git_hash(data), **({"lfs": lfs} if lfs else {})})
        return {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}

    def fetched(self) -> list[str]:
        """The names of the files of which bytes were asked for."""
        return [path.rpartition("/")[2] for kind, path, _ in self.requests if kind == "GET" and "/resolve/" in path]

    def respond(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if path.startswith("/cdn/"):
            return 200, {"ETag": f'"{path[5:]}"'}, self.blobs[path[5:]]
        if method in ("POST", "PUT"):
            if "authorization" in headers or path.startswith("/lfs/"):
                return 200, {}, self.write(path, body)
            return 401, {}, {"error": "Invalid username or password."}
        is_file = "/resolve/" in path
        repo, _, rest = path.removeprefix("/api/models/").strip("/").partition("/resolve/" if is_file else "/revision/")
        revision, _, name = rest.partition("/") if is_file else (rest or "main", "", "")
        if new := self.renamed.get(repo):
            return 307, {"Location": self.url + path.replace(repo, new)}, {}
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"}
        if (commit := self.repos[repo].get(revision)) is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, {"error": f"Invalid rev id: {revision}"}
        if not is_file:
            return 200, {}, self.info(repo, commit)
        if (data := self.commits[commit].get(name)) is None:
            return 404, {"X-Repo-Commit": commit, "X-Error-Code": "EntryNotFound"}, {"error": "Entry not found"}
        digest = self.digest(data)
        about = {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "X-Linked-Etag": f'"{digest}"'}
        if len(data) < LARGE:
            return 200, about, data
        return 302, about | {"X-Linked-Size": str(len(data)), "Location": f"{self.cdn}/cdn/{digest}"}, {}

    def write(self, path: str, body: bytes) -> dict[str, Any]:
        """Creating a repository, then uploading: which files are LFS's, where these go, and the commit."""
        if path.startswith("/lfs/"):
            self.blobs[path.removeprefix("/lfs/")] = body
            return {}
        lines = [json.loads(line) for line in body.splitlines()]
        if path == "/api/repos/create":
            (asked,) = lines
            repo = f"{asked['organization']}/{asked['name']}"
            self.repos.setdefault(repo, {})
            self.private[repo] = asked.get("visibility") == "private" or asked.get("private") is True
            return {"url": f"{self.url}/{repo}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            modes = [(file["path"], "lfs" if file["size"] >= LARGE else "regular") for file in lines[0]["files"]]
            return {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = lines[0]["objects"]
            to = [{**each, "actions": {"upload": {"href": f"{self.url}/lfs/{each['oid']}"}}} for each in objects]
            return {"transfer": "basic", "objects": to}
        repo, _, revision = path.removeprefix("/api/models/").partition("/commit/")
        files = {}
        for value in (each["value"] for each in lines if each["key"] in ("file", "lfsFile")):
            files[value["path"]] = self.blobs[value["oid"]] if "oid" in value else base64.b64decode(value["content"])
        commit = self.add(repo, files, revision)
        return {"commitUrl": f"{self.url}/{repo}/commit/{commit}", "commitOid": commit, "success": True}


def handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    """Requests to ``hub``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers.get("content-length", 0)))
            hub.requests.append((self.command, path, headers))
            status, about, value = hub.answer(self.command, path, headers) or hub.respond(self.command, path, headers, body)
            data, begin = value if isinstance(value, bytes) else json.dumps(value).encode(), 0
            if isinstance(value, bytes) and "range" in headers:
                status, begin = 206, int(headers["range"].removeprefix("bytes=").rstrip("-"))
                about["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self.send_response(status)
            for name, text in {"Content-Length": str(len(data) - begin), **about}.items():
                self.send_header(name, text)
            self.end_headers()
            end = len(data)
            if hub.cuts and path.startswith("/cdn/") and self.command == "GET" and begin + hub.cuts[-1] < end:
                end, self.close_connection = begin + hub.cuts.pop(), True
            if self.command != "HEAD":
                self.wfile.write(data[begin:end])

        do_GET = do_HEAD = do_POST = do_PUT = handle_request

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """The address of a server that answers for ``hub``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def endpoint_of(url: str, cache: Path, monkeypatch: Any, **settings: str) -> dict[str, str]:
    """Make ``url`` the hub and ``cache`` its cache, in this process; returns the variables that do so in another."""
    from huggingface_hub import constants

    variables = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", **settings}
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    return variables
