"""Sinks and what they speak to: a receiver on loopback, programs, apprise."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.sinks import SinkSettings, Webhook, open_sink, open_sinks
from edgevlm.errors import UserError

standardwebhooks = pytest.importorskip("standardwebhooks")
NOW = time.time()
EVENT = WatchEvent("door", "parcel", "open", NOW, 0.97, NOW, question="is there a parcel?")
EXAMPLES = Path(__file__).parents[3] / "examples"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Receiver(ThreadingHTTPServer):
    """Keeps events, under 204 those whose signature is right; answers what ``does`` says: a status, or hang."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.got, self.does, self.released = [], [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/hook"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        does = self.server.does.pop(0) if self.server.does else 204
        if does == "hang":
            self.server.released.wait(120)
            return
        if does == 204:
            standardwebhooks.Webhook(SECRET).verify(body, dict(self.headers))
        if does in (200, 204):
            self.server.got.append(json.loads(body))
        self.send_response(does)
        if does == 302:
            self.send_header("location", self.server.url)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def receiver():
    server = Receiver()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def test_a_webhook_is_signed_and_refusals_hangs_and_redirects_are_failures(receiver, monkeypatch):
    monkeypatch.setenv("EDGEVLM_WEBHOOK_SECRET", SECRET)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not there, and not asked for a receiver in the house
    Webhook(receiver.url).send(EVENT, [])
    assert receiver.got.pop()["id"] == EVENT.id
    sink, hasty = Webhook(receiver.url, SECRET, timeout=120), Webhook(receiver.url, SECRET, timeout=0.3)
    sink.send(EVENT, [])
    assert receiver.got == [json.loads(EVENT.line())]
    for each, does, said in (
        (sink, 500, "returned 500"),
        (sink, 302, "redirects are not followed"),
        (hasty, "hang", "timed out"),
    ):
        receiver.does.append(does)
        with pytest.raises(UserError, match=said):
            each.send(EVENT, [])
    sink.close()
    hasty.close()
    assert len(receiver.got) == 1


def test_secrets_of_an_address_are_not_told():
    sink = Webhook("http://ann:hunter2@127.0.0.1:9/services/T0K3N")
    with pytest.raises(UserError, match=r"^http://127\.0\.0\.1:9 cannot be reached") as raised:
        sink.send(EVENT, [])
    assert "hunter2" not in str(raised.value)
    assert "T0K3N" not in str(raised.value)


def test_a_program_gets_the_event_on_its_stdin_without_a_shell(tmp_path, capfd):
    out = tmp_path / "out"
    code = "import sys; print('seen'); open(sys.argv[1], 'a').write(sys.stdin.read() + sys.argv[2])"
    open_sink("exec", {"command": f'{sys.executable} -c "{code}" {out} $HOME;ls'}).send(EVENT, [])
    line, _, rest = out.read_text().partition("\n")
    assert (line, rest) == (EVENT.line(), "$HOME;ls")
    assert capfd.readouterr() == ("", "seen\n")


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise SystemExit(3)", "exited with 3"), ("import time; time.sleep(30)", "timed out after 0.5 s"), ("", None)],
)
def test_a_program_that_fails_or_hangs_is_a_failure(code, said):
    sink = open_sink("exec", {"command": f'{sys.executable} -c "{code}"', "timeout": 0.5 if "sleep" in code else 120})
    big = replace(EVENT, evidence=[{"text": "x" * 100_000}])  # more than a pipe holds: it need not be read
    if said is None:
        sink.send(big, [])
    else:
        with pytest.raises(UserError, match=said):
            sink.send(big, [])


def test_apprise_sends_words_and_a_picture(receiver):
    pytest.importorskip("apprise")
    receiver.does += [500, 200]
    sink = open_sink("apprise", {"url": receiver.url.replace("http://", "json://")})
    with pytest.raises(UserError, match="did not accept"):
        sink.send(EVENT, [b"jpeg"])
    sink.send(replace(EVENT, state="close", time=NOW + 300), [b"jpeg"])
    (got,) = receiver.got
    assert got["title"] == "door: is there a parcel?"
    assert got["message"].endswith("after 5 min.")
    assert got["attachments"][0]["mimetype"] == "image/jpeg"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "webhok", "url": "http://x"}, "unknown sink 'webhok'; did you mean 'webhook'?"),
        ({"kind": "webhook"}, "sinks.webhook: url: is missing"),
        ({"kind": "webhook", "url": "http://x", "secrt": "y"}, "secrt: unknown option; did you mean 'secret'?"),
        ({"kind": "webhook", "url": "http://x", "secret": "y"}, "secret: must not be in the file itself; use env:NAME"),
        ({"kind": "webhook", "url": "env:EDGEVLM_NOT_SET"}, "environment variable EDGEVLM_NOT_SET is not set"),
        ({"kind": "exec", "command": "/no/such/program x"}, "program not found; give its full path"),
        ({"kind": "apprise", "url": "nosuch://secret"}, "nosuch:// is not supported"),
        ({"kind": "mqtt", "url": "ssl://user:secret@host:8883"}, "ssl://***@host:8883: invalid URL; use one like"),
        ({"kind": "mqtt", "url": "mqtt://host/a+b"}, "invalid topic"),
    ],
)
def test_wrong_settings_are_one_line(settings, said):
    with pytest.raises(UserError) as raised:
        open_sinks([SinkSettings(**settings)])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_sink_of_a_users_file_is_one_class_with_options(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEVLM_TEST_LOG", str(tmp_path / "log"))
    kind = f"{EXAMPLES / 'my_sink.py'}:LogFile"
    sinks = open_sinks([SinkSettings(kind=kind, path="env:EDGEVLM_TEST_LOG"), SinkSettings(kind="stdout")])
    assert list(sinks) == ["sink", "stdout"]
    sinks["sink"].send(EVENT, [])
    assert (tmp_path / "log").read_text() == "door: is there a parcel? open\n"
    with pytest.raises(UserError, match="words: Input should be a valid boolean"):
        open_sinks([SinkSettings(kind=kind, path="x", words="maybe")])


def test_the_base_class_needs_no_extra():
    code = "import sys; sys.modules.update(httpx=None, standardwebhooks=None); from edgevlm.extend import *; print(Sink)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "Sink" in done.stdout, done.stderr
