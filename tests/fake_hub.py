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
        self.answer: Callable[[str, str, dict[str, str]], tuple[int, dict[str, str], Any] | None] = lambda *_: None
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


def handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    """Requests to ``hub``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            path = unquote(urlsplit(self.path).path)
            body = self.rfile.read(int(headers.get("content-length", 0)))
            hub.requests.append((self.command, path, headers))
            if (answer := hub.answer(self.command, path, headers)) is not None:
                self.reply(answer[0], answer[1], answer[2])
            elif path.startswith("/cdn/"):
                self.send_file(hub.blobs[path.removeprefix("/cdn/")], {"ETag": f'"{path[5:]}"'})
            elif self.command in ("POST", "PUT"):
                self.write(path, body)
            elif path.startswith("/api/models/"):
                repo, _, revision = path.removeprefix("/api/models/").partition("/revision/")
                self.found(repo, revision or "main", lambda commit: self.reply(200, {}, hub.info(repo, commit)))
            else:
                repo, _, rest = path.strip("/").partition("/resolve/")
                revision, _, name = rest.partition("/")
                self.found(repo, revision, lambda commit: self.resolve(commit, name))

        do_GET = do_HEAD = do_POST = do_PUT = handle_request

        def found(self, repo: str, revision: str, then: Callable[[str], None]) -> None:
            if new := hub.renamed.get(repo):
                self.reply(307, {"Location": hub.url + self.path.replace(repo, new)}, {})
            elif repo not in hub.repos:
                self.reply(404, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"})
            elif revision not in hub.repos[repo]:
                self.reply(404, {"X-Error-Code": "RevisionNotFound"}, {"error": f"Invalid rev id: {revision}"})
            else:
                then(hub.repos[repo][revision])

        def resolve(self, commit: str, name: str) -> None:
            about = {"X-Repo-Commit": commit}
            if name not in hub.commits[commit]:
                return self.reply(404, about | {"X-Error-Code": "EntryNotFound"}, {"error": "Entry not found"})
            data = hub.commits[commit][name]
            about["X-Linked-Etag"] = about["ETag"] = f'"{hub.digest(data)}"'
            if len(data) < LARGE:
                return self.send_file(data, about)
            return self.reply(
                302, about | {"X-Linked-Size": str(len(data)), "Location": f"{hub.cdn}/cdn/{hub.digest(data)}"}, {}
            )

        def send_file(self, data: bytes, headers: dict[str, str]) -> None:
            begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
            self.send_response(206 if begin else 200)
            for name, value in headers.items():
                self.send_header(name, value)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - begin))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.cuts and "/cdn/" in self.path and begin + hub.cuts[-1] < len(data):
                self.wfile.write(data[begin : begin + hub.cuts.pop()])
                self.close_connection = True
            else:
                self.wfile.write(data[begin:])

        def write(self, path: str, body: bytes) -> None:
            """Creating a repository, then uploading: which files are LFS's, where these go, and the commit."""
            if self.headers.get("Authorization") is None and not path.startswith("/lfs/"):
                self.reply(401, {}, {"error": "Invalid username or password."})
            elif path == "/api/repos/create":
                asked = json.loads(body)
                repo = f"{asked['organization']}/{asked['name']}"
                hub.repos.setdefault(repo, {})
                hub.private[repo] = asked.get("visibility") == "private" or asked.get("private") is True
                self.reply(200, {}, {"url": f"{hub.url}/{repo}"})
            elif path == "/api/validate-yaml":
                self.reply(200, {}, {"errors": [], "warnings": []})
            elif "/preupload/" in path:
                modes = [
                    {"path": file["path"], "uploadMode": "lfs" if file["size"] >= LARGE else "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self.reply(200, {}, {"files": modes})
            elif path.endswith("/info/lfs/objects/batch"):
                objects = [
                    {**each, "actions": {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}}}
                    for each in json.loads(body)["objects"]
                ]
                self.reply(200, {}, {"transfer": "basic", "objects": objects})
            elif path.startswith("/lfs/"):
                hub.blobs[path.removeprefix("/lfs/")] = body
                self.reply(200, {}, {})
            else:
                repo, _, revision = path.removeprefix("/api/models/").partition("/commit/")
                lines = [json.loads(line) for line in body.splitlines()]
                files = {
                    each["value"]["path"]: base64.b64decode(each["value"]["content"]) for each in lines if each["key"] == "file"
                } | {each["value"]["path"]: hub.blobs[each["value"]["oid"]] for each in lines if each["key"] == "lfsFile"}
                commit = hub.add(repo, files, revision)
                self.reply(200, {}, {"commitUrl": f"{hub.url}/{repo}/commit/{commit}", "commitOid": commit, "success": True})

        def reply(self, status: int, headers: dict[str, str], value: Any) -> None:
            data = b"" if self.command == "HEAD" else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)

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
