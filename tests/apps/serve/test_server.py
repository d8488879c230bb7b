"""``edgevlm serve`` as its clients see it: a real process, real sockets, the official OpenAI client."""

import base64
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime

import pytest
from cameras import MjpegCamera
from served import NOW, WAIT_S, eventually, serving
from typed import edgevlm

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")
parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("demo") / "served") as server:
        server.watched("demo", 4)
        yield server


def test_the_openai_client_asks_unchanged(demo):
    messages = [{"role": "user", "content": NOW}]
    whole = demo.client.chat.completions.create(model="demo", messages=messages)
    assert whole.choices[0].message.content.strip().isdecimal()
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens > whole.usage.prompt_tokens_details.cached_tokens
    assert whole.model_extra["edgevlm"]["stream"] == "demo"
    chunks = list(
        demo.client.chat.completions.create(
            model="any/demo", messages=messages, stream=True, stream_options={"include_usage": True}, max_tokens=4096, seed=1
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip().isdecimal()
    assert chunks[-1].usage.completion_tokens >= 1
    assert [model.id for model in demo.client.models.list()] == ["demo"]
    assert demo.client.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b"null", b'"x"', b"NaN"],
)
def test_what_is_not_json_is_a_400(demo, body):
    status, _, answer = demo.request("POST", "/v1/chat/completions", body)
    assert status == 400
    assert json.loads(answer)["error"]["message"]


def test_a_body_that_is_too_large_is_refused_before_it_is_read(demo):
    with socket.create_connection(("127.0.0.1", demo.port), WAIT_S) as link:
        link.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with suppress(ConnectionError):  # it does not read on
            for _ in range(300):
                link.sendall(chunk)
        with suppress(ConnectionError):
            assert link.recv(100)[:12] in (b"HTTP/1.1 413", b"")
    assert demo.get("/health/live") == {"status": "ok"}


@pytest.mark.parametrize(
    "source",
    ["/etc/passwd", "FILE:///etc/passwd", "filesrc location=/etc/passwd ! decodebin", "http://a ! filesink location=/tmp/x",
     "/dev/video0", "csi://0", "concat:/a|/b://", "-", "./x.py:Y", "demo\n", "env:HOME", "http://127.0.0.1:1/x", "rtsp://[::1]/x",
     "rtsp://user:secret@localhost/1", "http://169.254.169.254/latest", "http://[", "http://a:99999999/"],
)  # fmt: skip
def test_clients_add_no_files_no_programs_and_nothing_of_this_machine(demo, source):
    status, _, body = demo.request("POST", "/v1/streams", {"id": "third", "source": source})
    assert (status, json.loads(body)["error"]["param"]) == (400, "source")
    assert b":secret" not in body


def test_a_camera_has_its_login_beside_its_address(tmp_path, monkeypatch):
    """Take a login with characters that a URL cannot hold, from the file and from a client, and never show it."""
    password = "a/b#c?d@e:f%"
    camera = MjpegCamera(1000)
    camera.password = password
    monkeypatch.setenv("CAMERAS_PASSWORD", password)
    (tmp_path / "edgevlm.toml").write_text(
        f'[server]\nsource_hosts = ["127.0.0.1"]\n[cameras.one]\nsource = "{camera.url}"\nusername = "u"\n'
        'password = "env:CAMERAS_PASSWORD"\n'
    )
    with camera, serving(tmp_path / "served", tmp_path / "edgevlm.toml") as server:
        server.watched("one", 2)
        login = {"source": camera.url, "username": "u", "password": password}
        seen = json.loads(server.request("POST", "/v1/streams/test", login)[2])
        assert (seen["width"], seen["height"]) == (64, 48)
        status, _, body = server.request("POST", "/v1/streams", {"id": "two", **login})
        assert status == 201, body
        server.watched("two", 2)
        told = body + server.request("GET", "/v1/streams")[2]
        assert camera.url.encode() in told
        assert b"a/b" not in told
        assert b"a%2Fb" not in told
        for wrong in ({"source": "demo"}, {"source": camera.url, "password": "file:/etc/passwd"}):
            status, _, body = server.request("POST", "/v1/streams", {"id": "three", "username": "u", **wrong})
            assert (status, json.loads(body)["error"]["param"]) == (400, "source")


def test_frames_and_the_memory_are_shown(demo):
    status, headers, jpeg = demo.request("GET", "/v1/streams/demo/frame.jpg")
    assert (status, headers["content-type"], jpeg[:2]) == (200, "image/jpeg", b"\xff\xd8")
    memory = eventually(lambda: (held := demo.get("/v1/streams/demo/memory"))["frames"] and held)
    rows, columns = memory["grid"]
    assert all(len(frame["patches"]) == rows * columns for frame in memory["frames"])
    assert any(set(frame["patches"]) != {"0"} for frame in memory["frames"])
    shown = next(frame for frame in memory["frames"] if frame["thumbnail_url"])
    assert demo.request("GET", shown["thumbnail_url"])[2][:2] == b"\xff\xd8"
    connection = http.client.HTTPConnection("127.0.0.1", demo.port, timeout=WAIT_S)
    connection.request("GET", "/v1/streams/demo/mjpeg")
    response = connection.getresponse()
    assert [response.readline().strip() for _ in range(2)] == [b"--frame", b"Content-Type: image/jpeg"]
    connection.close()


def test_prometheus_reads_the_metrics(demo):
    demo.client.chat.completions.create(model="demo", messages=[{"role": "user", "content": NOW}])
    status, _, text = demo.request("GET", "/metrics")
    families = {family.name: family for family in parser.text_string_to_metric_families(text.decode())}
    assert status == 200
    assert {"edgevlm_num_requests_running", "edgevlm_num_requests_waiting", "edgevlm_kv_cache_usage_ratio",
            "edgevlm_time_to_first_token_seconds", "edgevlm_camera_fps", "edgevlm_camera_skipped_fps",
            "edgevlm_camera_reconnects"} <= families.keys()  # fmt: skip
    count = [each for each in families["edgevlm_time_to_first_token_seconds"].samples if each.name.endswith("_count")]
    assert count[0].value >= 1


def test_cameras_come_and_go(demo, tmp_path):
    status, _, body = demo.request("POST", "/v1/streams", {"id": "second", "source": "demo", "fps": 4})
    assert status == 201, body
    demo.watched("second", 2)
    assert demo.request("POST", "/v1/streams", {"id": "second", "source": "demo"})[0] == 400
    assert demo.request("POST", "/v1/streams", {"id": "a\nb", "source": "demo"})[0] == 400
    assert demo.request("POST", "/v1/streams", {"id": "third", "source": str(tmp_path / "no")})[0] == 400
    assert demo.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": NOW}]})[0] == 404
    assert json.loads(demo.request("PATCH", "/v1/streams/second", {"state": "paused"})[2])["state"] == "paused"
    frames = demo.get("/v1/streams/second")["stats"]["frames"]
    assert demo.client.chat.completions.create(model="second", messages=[{"role": "user", "content": NOW}])
    assert demo.request("PATCH", "/v1/streams/second", {"state": "running"})[0] == 200
    demo.watched("second", frames + 2)
    assert demo.request("DELETE", "/v1/streams/second")[0] == 204
    assert [each["id"] for each in demo.get("/v1/streams")["data"]] == ["demo"]


def test_a_source_is_tested_and_nothing_is_added(demo):
    status, _, body = demo.request("POST", "/v1/streams/test", {"source": "demo"})
    seen = json.loads(body)
    assert (status, seen["width"], seen["height"]) == (200, 56, 56)
    assert seen["fps"] > 0
    assert base64.b64decode(seen["jpeg"])[:2] == b"\xff\xd8"
    status, _, body = demo.request("POST", "/v1/streams/test", {"source": "rtsp://user:secret@127.0.0.1:1/live"})
    assert status == 400
    assert b"secret" not in body
    assert len(demo.get("/v1/streams")["data"]) == 1


def test_another_policy_begins_a_new_memory_and_a_wrong_one_changes_nothing(tmp_path):
    folder = tmp_path / "served"
    with serving(folder, "--fps", "8", speed=4) as server:
        server.watched("demo", 6)
        path = "/v1/streams/demo"
        for change, named in [({"policy": "./evil.py:X"}, "policy"), ({"budget": "lots"}, "budget"), ({"budget": 1}, "budget")]:
            status, _, body = server.request("PATCH", path, change)
            assert status == 400, body
            assert named in json.loads(body)["error"]["message"]
        assert server.watched("demo", 7)["policy"] == "infinipot-v", "nothing was lost"
        status, _, body = server.request("PATCH", path, {"policy": "last-seen", "budget": 512})
        assert (status, json.loads(body)["policy"], json.loads(body)["budget"]) == (200, "last-seen", 512)
        assert json.loads(body)["frames_watched"] < 7
        assert json.loads(server.request("POST", "/v1/reload")[2])["done"] == [], "what is configured is the same"
        assert server.request("PATCH", path, {"state": "paused"})[0] == 200
        changed = json.loads(server.request("PATCH", path, {"budget": 256})[2])
        assert (changed["state"], changed["budget"], changed["frames_watched"]) == ("paused", 256, 0)
        assert server.request("GET", "/health/ready")[0] == 200
        assert server.end() == 0
    with serving(folder, "--fps", "8", speed=4) as server:
        assert server.watched("demo", 7)["policy"] == "infinipot-v", "a restart goes on with what is configured"


def test_edgevlm_ask_asks_it(demo, tmp_path):
    assert edgevlm("ask", NOW, "--url", demo.url).stdout.strip().isdecimal()
    command = [sys.executable, "-m", "edgevlm", "ask", "--json", "--url", demo.url]
    piped = subprocess.run(command, input=f"{NOW}\n\n{NOW}\n", capture_output=True, text=True, check=True)
    assert [json.loads(line)["question"] for line in piped.stdout.splitlines()] == [NOW, NOW]
    wrong = edgevlm("ask", NOW, "--url", demo.url, "--stream", "dmeo")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "did you mean 'demo'?" in wrong.stderr
    (tmp_path / "key").write_text("correct-horse\nbattery")
    for more in (["--url", "http://127.0.0.1:9"], ["--url", "http://[::1"], ["--key-file", tmp_path / "key"]):
        refused = edgevlm("ask", NOW, "--url", demo.url, *more)
        assert (refused.returncode, refused.stderr.count("\n"), "horse" in refused.stderr) == (2, 1, False)
    said = subprocess.run(command, input=b"caf\xe9?\n", capture_output=True, check=False)
    assert (said.returncode, json.loads(said.stdout)["question"]) == (0, "caf\ufffd?")


def test_a_killed_server_goes_on_with_the_same_memory(tmp_path):
    config = tmp_path / "edgevlm.toml"
    config.write_text("state_every = 0.2\n[cameras.demo]\nfps = 8\n")
    with serving(tmp_path / "served", config, speed=4) as server:
        snapshots = tmp_path / "served" / "state" / "edgevlm" / "serve" / "demo"
        server.watched("demo", 5)
        before = {*snapshots.glob("*.snapshot")}
        eventually(lambda: {*snapshots.glob("*.snapshot")} - before)
        server.end(signal.SIGKILL)
    with serving(tmp_path / "served", config) as server:
        assert server.watched("demo", 1)["stats"]["frames"] > 1
        told = eventually(lambda: (held := server.get("/v1/streams/demo/memory"))["frames"] and held)
        assert told["frames"][0]["frame"] == 0
        status, _, jpeg = server.request("GET", told["frames"][0]["thumbnail_url"])
        assert (status, jpeg[:2]) == (200, b"\xff\xd8"), "its picture was kept too"
        assert server.end() == 0


def test_who_listens_is_told_of_the_end(tmp_path):
    with serving(tmp_path / "served") as server:
        server.watched("demo", 1)
        lines = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S) for _ in range(4)]
        for line in lines:
            line.request("GET", "/v1/streams/demo/events")
        listeners = [line.getresponse() for line in lines]
        server.process.send_signal(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1)  # so that all that looks for the end from time to time does once it goes on
        assert server.end(signal.SIGCONT) == 0
        assert all(b"event: state" in listener.read() for listener in listeners), "to the last chunk"
    assert "ASGI" not in (tmp_path / "served" / "stderr").read_text()


def test_sighup_applies_what_changed_and_leaves_the_rest_alone(tmp_path):
    config = tmp_path / "edgevlm.toml"
    config.write_text("[cameras.one]\n[cameras.two]\n")
    with serving(tmp_path / "served", config) as server:
        frames = server.watched("one", 2)["stats"]["frames"]
        config.write_text("[cameras.one]\n[cameras.bad]\npolicy = 'lsat-seen'\n[cameras.three]\n")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: [each["id"] for each in server.get("/v1/streams")["data"]] == ["one", "three"])
        assert server.watched("one", 1)["stats"]["frames"] >= frames
        config.write_text("[cameras.one]\nfsp = 2\n")
        server.process.send_signal(signal.SIGHUP)
        for name in ("last-seen", "fps"):
            eventually(lambda name=name: f"did you mean '{name}'?" in (tmp_path / "served" / "stderr").read_text())
        assert server.get("/health/live") == {"status": "ok"}
        assert server.end() == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[cameras.a]\nsuorce = 'demo'", "cameras.a.suorce: unknown key; did you mean 'source'?"),
        ("[server]\nkey = 'env:NOT_SET_ANYWHERE'\n", "line 2: server.key: env:NOT_SET_ANYWHERE: environment variable"),
        ("[[watches]]\nquestion = 'is there a red square?'\ncameras = ['door']", "camera 'door' not found"),
        ("[server]\nprot = 1\n[journal]\nprompt = '''\n[...]'''\n", "line 2: server.prot: unknown key; did you mean 'port'?"),
        ("port = 1", "line 1: port: unknown key; it belongs in [server]"),
        ("[[", "not valid TOML"),
    ],
)
def test_a_wrong_configuration_is_one_line(tmp_path, text, says):
    path = tmp_path / "edgevlm.toml"
    path.write_text(text)
    told = edgevlm("config", "check", path)
    assert (told.returncode, told.stderr.count("\n"), told.stdout) == (2, 1, "")
    assert says in told.stderr


def test_every_fault_of_a_configuration_is_named_with_its_line(tmp_path):
    path = tmp_path / "edgevlm.toml"
    path.write_text('stat = "x"\n\n[cameras."Küche"]\nfsp = 3\n\n[[watches]]\nquestion = "a?"\n[[watches]]\nquestoin = "b?"\n')
    told = edgevlm("config", "check", path).stderr.splitlines()
    assert [re.search("line (\\d+)", line)[1] for line in told] == ["1", "4", "8", "9"], told
    assert "(3 more" in edgevlm("serve", path, "--port", 0).stderr


def test_what_cannot_be_served_is_one_line(tmp_path, demo, monkeypatch):
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: pytest.fail("it is served"))
    (tmp_path / "key").write_text("short")
    for arguments, says in (
        (["--host", "0.0.0.0"], "set a key"),
        (["--key-file", tmp_path / "key"], "8 or more"),
        (["--camera", "-"], "stdin"),
        (["--policy", "lsat-seen"], "last-seen"),
    ):
        told = edgevlm("serve", "--port", 0, "--state", tmp_path / "s", *arguments)
        assert (told.returncode, told.stderr.count("\n")) == (2, 1), told.stderr
        assert says in told.stderr
    (tmp_path / "edgevlm.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    taken = edgevlm("serve", "--state", tmp_path / "s", "--port", demo.port)
    assert (taken.returncode, taken.stderr.count("\n")) == (2, 2)
    assert "edgevlm.toml is ignored" in taken.stderr
    assert f"--port {demo.port}" in taken.stderr


def test_a_window_of_time_in_a_field_in_the_url_and_at_the_command_line(demo):
    demo.watched("demo", 30)

    def answered(content=NOW, **window):
        messages = [{"role": "user", "content": content}]
        return demo.client.chat.completions.create(model="demo", messages=messages, extra_body=window).model_extra["edgevlm"]

    def times(found):
        return [datetime.fromisoformat(each["time"].replace("Z", "+00:00")).timestamp() for each in found["evidence"]]

    part = {"type": "video_url", "video_url": {"url": "edgevlm://demo?since=10s"}}
    for found in (answered(since="10s"), answered([part, {"type": "text", "text": NOW}])):
        assert times(found)
        assert min(times(found)) > time.time() - WAIT_S - 10
        assert all(found["time_s"] - 11 < seen["time_s"] <= seen["until_s"] for seen in found["evidence"])
    early = answered(until=demo.get("/v1/streams/demo")["frame_time"], since="1h")
    assert all(seen["until_s"] <= early["time_s"] for seen in early["evidence"])
    for window, field, what in (
        ({"since": "2h", "until": "1h"}, "since", "the memory holds nothing since .* ago. until .* ago.; it reaches back to "),
        ({"since": "soon"}, "since", "'soon' is not a time; give 10m"),
        ({"until": "2h", "since": "1h"}, "since", "until 2h is before since 1h"),
    ):
        body = {"model": "demo", "messages": [{"role": "user", "content": NOW}], **window}
        status, _, answer = demo.request("POST", "/v1/chat/completions", body)
        assert (status, json.loads(answer)["error"]["param"]) == (400, field)
        assert re.search(what, json.loads(answer)["error"]["message"])
    ask = ["ask", NOW, "--url", demo.url]
    assert json.loads(edgevlm(*ask, "--since", "10s", "--json").stdout)["evidence"]
    empty = edgevlm(*ask, "--since", "2h", "--until", "1h")
    assert (empty.returncode, empty.stdout.strip()) == (2, "")
    assert re.fullmatch(r"edgevlm: \S+ since: the memory holds nothing since .*", empty.stderr.strip())
