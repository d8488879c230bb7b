"""``edgevlm serve`` attacked: what it is sent, how slowly, how much of it. The stream goes on, and errors are OpenAI's."""

import http.client
import http.server
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from served import KEY, NOW, WAIT_S, Served, eventually, serving
from typer.testing import CliRunner

from edgevlm.cli import app

pytest.importorskip("fastapi")

SECRET = "hunter2-and-more"
PROBLEM = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with guarded(tmp_path_factory.mktemp("hostile")) as server:
        yield server


@contextmanager
def guarded(folder):
    """A server with a key, which ends without a traceback."""
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    with serving(folder / "served", "--key-file", folder / "key", key=KEY) as server:
        server.watched("demo", 1)
        yield server
        errors = (folder / "served" / "stderr").read_text()
        assert "Traceback" not in errors
        assert KEY not in errors


def test_answers_are_what_openapi_says(tmp_path):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    with guarded(tmp_path) as server:  # of its own: what is there may be removed
        command = [
            sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run",
            f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {KEY}",
            "--phases", "fuzzing", "--max-examples", "5", "--seed", "1", "--no-color",
            "--exclude-path-regex", "mjpeg|events|ready|test", "--exclude-checks", "positive_data_acceptance",
        ]  # fmt: skip
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, cwd=tmp_path)
    assert told.returncode == 0, told.stdout


def test_idle_connections_leave_files_for_cameras(tmp_path):
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        server = Served(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    links = [socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) for _ in range(160)]
    assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 128
    frames = server.get("/v1/streams/demo")["frames_watched"]
    assert server.watched("demo", frames + 3)["state"] == "running"
    for link in links:
        link.close()
    server.end()
    assert (tmp_path / "stderr").read_text() == ""


VALUES = [
    "null", "true", "-1", "1e400", "NaN", "1" + 400 * "0", "1" + 5000 * "0", '""', r'"\ud800"', '"' + 100_000 * "x" + '"',
    "[null]", '{"a": 1}', 900 * "[" + 900 * "]", '"1"', "9223372036854775808",
]  # fmt: skip
RED = "is there a red square now?"
BODIES = {  # by route: what is right
    ("POST", "/v1/chat/completions"): {"model": "demo", "messages": [{"role": "user", "content": NOW}]},
    ("POST", "/v1/responses"): {"model": "demo", "input": NOW},
    ("POST", "/v1/streams"): {"id": "odd", "source": "demo"},
    ("PATCH", "/v1/streams/demo"): {"state": "running"},
    ("POST", "/v1/streams/test"): {"source": "demo"},
    ("POST", "/v1/watches"): {"name": "odd", "question": RED},
    ("PATCH", "/v1/watches/demo"): {"state": "running"},
    ("POST", "/v1/forget"): {"stream": "demo", "since": "1s", "confirm": True},
}


def fields(server, method, path):
    """The fields of a route's body, as its description names them."""
    openapi = server.get("/openapi.json")
    operation = openapi["paths"][path.replace("demo", "{name}")][method.lower()]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return openapi["components"]["schemas"][name]["properties"]


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_a_wrong_value_of_any_field_is_a_4xx_that_names_it(server, method, path):
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    refused = 0
    if path == "/v1/watches/demo":
        assert server.request("POST", "/v1/watches", {"name": "demo", "question": RED})[0] == 201
    for field in fields(server, method, path):
        right = {name: json.dumps(value) for name, value in BODIES[method, path].items()}
        for value in VALUES:
            pairs = [f'"{name}": {text}' for name, text in {**right, field: value}.items()]
            link.request(method, path, "{" + ", ".join(pairs) + "}", headers)
            response = link.getresponse()
            if response.headers.get_content_type() != "application/json":
                link.close()  # it streams the answer
                continue
            answer = json.loads(response.read())
            if response.status == 201:
                server.request("DELETE", f"{path}/{answer['id']}")
            elif response.status != 200:
                refused += 1
                error = answer["error"]
                assert 400 <= response.status < 500, (field, value[:100], error)
                assert error.keys() == PROBLEM
                named = "JSON" if error["code"] == "invalid_json" else field
                assert named in error["message"] or named == error["param"], (value[:100], error)
    link.close()
    assert refused > 10


QUERIES = ["", "%ff%fe", "%00", "-1", "nan", "1e400", "%0d%0aX:1", "1" + 400 * "0", 5000 * "x", "%F0%9F%98%80"]


def test_a_wrong_query_is_a_4xx_that_names_it(server):
    refused = 0
    for path, operations in server.get("/openapi.json")["paths"].items():
        for parameter in operations.get("get", {}).get("parameters", ()):
            for value in QUERIES if parameter["in"] == "query" else ():
                status, _, body = server.request("GET", f"{path.replace('{name}', 'demo')}?{parameter['name']}={value}")
                assert status == 200 or 400 <= status < 500, (path, parameter["name"], value, body)
                if status != 200:
                    refused += 1
                    error = json.loads(body)["error"]
                    assert parameter["name"] in (error["param"], *error["message"].split(": ")), (path, value, error)
    assert refused > 60


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "%2e%2e%2f%2e%2e%2fetc", "a%00b", "%ff%fe", "%0d%0aX:1", 300 * "x", 20_000 * "x"]
)
def test_odd_names_are_not_found(server, name):
    for method, path in (
        ("GET", "/v1/streams/{}"), ("DELETE", "/v1/streams/{}"), ("GET", "/v1/streams/{}/memory"),
        ("GET", "/v1/streams/{}/events"), ("GET", "/v1/streams/demo/thumbnails/{}.jpg"),
        ("GET", "/v1/streams/demo/mjpeg?fps={}"), ("GET", "/static/{}"),
    ):  # fmt: skip
        status, _, body = server.request(method, path.format(name))
        assert status in (400, 404), (path, status, body)
        assert json.loads(body)["error"].keys() == PROBLEM


def test_slow_and_large_requests_do_not_disturb_the_stream(server):
    process = psutil.Process(server.process.pid)
    before, frames = (process.num_fds(), process.num_threads()), server.watched("demo", 1)["stats"]["frames"]
    head = f"POST /v1/streams HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode()
    held = []
    for number in range(200):
        held.append(socket.create_connection(("127.0.0.1", server.port), WAIT_S))
        held[-1].sendall(head + (b"Content-Length: 9\r\n\r\n{" if number % 2 else b""))
    large = socket.create_connection(("127.0.0.1", server.port), WAIT_S)
    large.sendall(head + b"Content-Length: 100000000\r\n\r\n")
    assert large.recv(100).startswith(b"HTTP/1.1 413")
    server.watched("demo", frames + 4)
    for link in (*held, large):
        link.close()
    eventually(lambda: process.num_fds() <= before[0] + 4)
    assert process.num_threads() <= before[1] + 8


def test_no_secret_is_told(tmp_path):
    (tmp_path / "key").write_text(f"{SECRET}-key")
    (tmp_path / "edgevlm.toml").write_text(
        f"""[server]
key = "file:{tmp_path / "key"}"
source_hosts = ["127.0.0.1"]
[cameras.demo]
[cameras.one]
source = "env:CAMERA_ONE"
[cameras.two]
source = "http://admin:{SECRET}@127.0.0.1:9/mjpeg?token={SECRET}&user-pw={SECRET}"
"""
    )
    cameras = {"CAMERA_ONE": f"rtsp://admin:{SECRET}@127.0.0.1:9/1"}
    told = []
    with serving(tmp_path / "served", tmp_path / "edgevlm.toml", key=f"{SECRET}-key", environment=cameras) as server:
        server.watched("demo", 2)
        listener = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        listener.request("GET", "/v1/streams/two/events", headers={"authorization": f"Bearer {SECRET}-key"})
        told.append(listener.getresponse().readline())
        for source in (
            f"rtsp://a:{SECRET}@127.0.0.1:9/1",
            f"http://a:{SECRET}@[::1]/",
            f"rtsp://a:{SECRET}@x.invalid/{SECRET}@/",
        ):
            told += [server.request("POST", "/v1/streams", {"id": "new", "source": source})[2],
                     server.request("POST", "/v1/streams/test", {"source": source})[2]]  # fmt: skip
        messages = [{"role": "user", "content": NOW}]
        told += [
            server.request("POST", "/v1/chat/completions", {"model": name, "messages": messages})[2] for name in ("demo", "new")
        ]
        told += [server.request("GET", "/v1/streams", headers={"authorization": f"Bearer {SECRET}"})[2]]
        paths = "/ /metrics /openapi.json /health/ready /v1/streams /v1/models /v1/streams/two/memory"
        told += [server.request("GET", path)[2] for path in paths.split()]
        told.append(Path(f"/proc/{server.process.pid}/cmdline").read_bytes())
        (tmp_path / "edgevlm.toml").write_text(
            f'[cameras.x]\nsource = "rtsp://a:{SECRET}@[/"\n[cameras.y]\nsuorce = "{SECRET}"\n'
        )
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "did you mean 'source'?" in (tmp_path / "served" / "stderr").read_text())
        listener.close()
        assert server.end() == 0
    told += [path.read_bytes() for path in (tmp_path / "served").rglob("*") if path.is_file()]
    assert len(told) > 20
    assert [text[:300] for text in told if SECRET.encode() in text] == []


CONTROL = "\x1b]0;owned\x07\x9b2J\r\u202e"
AT = "2026-11-22T16:30:05.123Z"
WRITTEN = {  # by others, on a server
    "/v1/journal": {"data": [{"camera": CONTROL, "time": AT, "text": CONTROL}]},
    "/v1/digest": {"since": AT, "data": [{"event": "line", "camera": CONTROL, "time": AT, "text": CONTROL, "evidence": []}]},
    "/v1/chat/completions": {"choices": [{"delta": {"content": CONTROL}}]},
    "/v1/forget": {"streams": {CONTROL: {CONTROL: 1}}},
}


class Writer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(WRITTEN[self.path.partition("?")[0]])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {body}\n\ndata: [DONE]\n\n".encode() if "chat" in self.path else body.encode())

    do_POST = do_GET


@pytest.mark.parametrize("command", [["journal"], ["digest"], ["ask", "who?"], ["forget", "--all", "--yes"]])
def test_what_others_wrote_does_not_control_a_terminal(command):
    with http.server.HTTPServer(("127.0.0.1", 0), Writer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        told = CliRunner().invoke(app, [*command, "--url", f"http://127.0.0.1:{server.server_port}"], catch_exceptions=False)
        server.shutdown()
    assert "owned" in told.stdout
    assert "".join(filter(str.isprintable, told.output)) == told.output.replace("\n", "")


def test_what_a_client_named_does_not_control_the_log(server):
    status, _, body = server.request("POST", "/v1/streams", {"id": "sly", "source": "rtsp://192.0.2.1:9/\x1b]0;owned\x07"})
    assert status == 201, body
    log = Path(server.errors.name)
    eventually(lambda: "sly: " in log.read_text())
    server.request("DELETE", "/v1/streams/sly")
    assert "".join(filter(str.isprintable, log.read_text())) == log.read_text().replace("\n", "")
