"""``edgevlm serve`` attacked: what it is sent, how slowly, how much of it. The stream goes on, and errors are OpenAI's."""

import http.client
import json
import subprocess
import sys

import pytest
from served import KEY, NOW, WAIT_S, serving

pytest.importorskip("fastapi")

PROBLEM = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    with serving(folder / "served", "--key-file", folder / "key", key=KEY) as server:
        server.watched("demo", 1)
        yield server
        errors = (folder / "served" / "stderr").read_text()
        assert "Traceback" not in errors
        assert KEY not in errors


def test_answers_are_what_openapi_says(server, tmp_path):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", f"{server.url}/openapi.json",
        "-H", f"Authorization: Bearer {KEY}", "--phases", "fuzzing", "--max-examples", "5", "--seed", "1", "--no-color",
        "--exclude-path-regex", "mjpeg|events|ready|test", "--exclude-checks", "positive_data_acceptance",
    ]  # fmt: skip
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=tmp_path)
    assert told.returncode == 0, told.stdout


VALUES = [
    "null", "true", "-1", "1e400", "NaN", "1" + 400 * "0", "1" + 5000 * "0", '""', r'"\ud800"', '"' + 100_000 * "x" + '"',
    "[null]", '{"a": 1}', 900 * "[" + 900 * "]", '"1"', "9223372036854775808",
]  # fmt: skip
BODIES = {  # by route: what is right
    ("POST", "/v1/chat/completions"): {"model": "demo", "messages": [{"role": "user", "content": NOW}]},
    ("POST", "/v1/streams"): {"id": "odd", "source": "demo"},
    ("PATCH", "/v1/streams/demo"): {"state": "running"},
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
                server.request("DELETE", f"/v1/streams/{answer['id']}")
            elif response.status != 200:
                refused += 1
                error = answer["error"]
                assert 400 <= response.status < 500, (field, value[:100], error)
                assert error.keys() == PROBLEM
                named = "JSON" if error["code"] == "invalid_json" else field
                assert named in error["message"] or named == error["param"], (value[:100], error)
    link.close()
    assert refused > 10


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
