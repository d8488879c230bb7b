"""``/v1/events``, its pictures and the figures of delivery, over a service without cameras."""

import json
import re
import time
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator
from served import eventually

from edgevlm.apps.journal import Journal, Line
from edgevlm.apps.schemas import schemas
from edgevlm.apps.serve import client as reading
from edgevlm.apps.serve.config import CameraSettings, check_config
from edgevlm.apps.serve.http import make_app
from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import UserError

testclient = pytest.importorskip("fastapi.testclient")
NOW = time.time()
SEEN = {"time": None, "frame": 3, "last_frame": 3, "time_s": 1.5, "until_s": 1.5, "weight": 0.5, "box": [0, 0, 1, 1]}
EVENT = WatchEvent("door", "parcel", "open", NOW - 7200, 0.97, NOW - 7200, (SEEN,), "is there a parcel?")
RED = "is there a red square now?"
EXEC = {"kind": "exec", "command": "true", "name": "program"}


@pytest.fixture
def service(tmp_path):
    service = Service(check_config({"state": str(tmp_path), "sinks": [EXEC]}, "test"), lambda line: None)
    service.config = service.config.model_copy(update={"cameras": {}})
    service.open()
    yield service
    service.close()


@pytest.fixture
def client(service):
    service.delivery.record(EVENT, [b"\xff\xd8 jpeg"])
    service.delivery.record(replace(EVENT, state="close", time=NOW - 600))
    service.delivery.record(replace(EVENT, camera="yard", watch="dog", question="a dog?", opened=NOW, time=NOW))
    return testclient.TestClient(make_app(service))


@pytest.mark.parametrize(
    ("query", "watches"),
    [
        ("", ["dog", "parcel", "parcel"]),
        ("limit=1", ["dog"]),
        ("since=1h", ["dog", "parcel"]),
        ("until=1h&camera=door", ["parcel"]),
        ("text=A DOG", ["dog"]),
        ("watch=parcel&since=3h&until=1s", ["parcel", "parcel"]),
        ("camera=nowhere", []),
    ],
)
def test_events_are_found_newest_first(client, query, watches):
    assert [event["watch"] for event in client.get(f"/v1/events?{query}").json()["data"]] == watches


def test_a_reload_changes_sinks_and_says_what_is_wrong(service):
    config = service.config
    other = check_config({"state": config.state, "sinks": [{"kind": "exec", "command": "false"}]}, "test")
    wrong = check_config({"state": config.state, "sinks": [{"kind": "mqtt", "url": "mqtt://h", "topic": "x"}]}, "test")
    for each, line in ((other, "sinks: reopened"), (wrong, "sinks.mqtt: topic: unknown option")):
        (done,) = service.reload(each.model_copy(update={"cameras": {}}))
        assert done.startswith(line)
    assert list(service.delivery.sinks) == ["exec"]


def strict(schema):
    """A schema that allows no fields but its own."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: strict(each) for name, each in schema.items()}
    return {**inner, "additionalProperties": False} if "properties" in schema else inner


def test_answers_are_as_the_description_says(client, service, tmp_path):
    Journal(tmp_path).close()
    service.journal.add(Line("demo", NOW - 60, "a parcel"))
    stream = service.add("demo", CameraSettings(source="demo", fps=20.0))
    service.watches.add(Watch(name="demo", question=RED))
    eventually(lambda: stream.last is not None and stream.session.stats.frames)
    asked = {
        ("post", "/v1/streams"): {"id": "more", "source": "demo"}, ("patch", "/v1/streams/demo"): {"state": "paused"},
        ("post", "/v1/watches"): {"name": "red", "question": RED}, ("patch", "/v1/watches/demo"): {"state": "paused"},
        ("post", "/v1/forget"): {"stream": "more", "all": True, "confirm": True},
    }  # fmt: skip
    checked = []
    for path, operations in client.app.openapi()["paths"].items():
        for method, operation in operations.items():
            described = [each for status, each in operation["responses"].items() if status in ("200", "201")]
            schema = described[0]["content"].get("application/json", {}).get("schema", {}) if described else {}
            where = path.replace("{name}", "demo")
            body = asked.get((method, where))
            if "$ref" in schema and (method == "get" or body is not None):
                answer = client.request(method, where, json=body).json()
                Draft202012Validator({**schema, "components": strict(client.app.openapi()["components"])}).validate(answer)
                checked.append((method, path, len(answer.get("data", "x"))))
    assert (len(checked), [path for _, path, count in checked if not count]) == (18, [])


def test_edgevlm_digest_reads_it_from_a_server(client, service, capsys, tmp_path, monkeypatch):
    Journal(tmp_path).close()
    service.journal.add(Line("door", NOW - 60, "a van stands there"))
    monkeypatch.setattr(reading.httpx, "Client", lambda **_: testclient.TestClient(client.app))
    url = "http://testserver"
    for since, as_json, search in (("3h", False, {}), ("3h", True, {}), ("3h", False, {"search": "elephant"})):
        reading.show_digest({"since": since, **search}, url, None, as_json)
    with pytest.raises(UserError, match="'x' is not a time"):
        reading.show_digest({"since": "x"}, url, None, False)
    out, err = capsys.readouterr()
    *words, parcel, line, dog = out.splitlines()
    assert re.match("nothing happened since .*: no watch was open and no line was written", err)
    assert re.fullmatch(r"[\w ]*\d\d:\d\d:\d\d \(\d+ \w+ ago\)  door  is there a parcel\?  for 110 min \(0.97\)", words[0])
    assert words[1] == f"  {url}/v1/events/{EVENT.id}/0.jpg"
    assert words[2].endswith("door  a van stands there")
    assert words[3].endswith("yard  a dog?  still open (0.97)")
    for kind, each in (("opening", parcel), ("line", line), ("opening", dog)):
        Draft202012Validator(schemas()[kind]).validate(json.loads(each))
