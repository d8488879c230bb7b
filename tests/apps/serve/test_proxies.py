"""The doors of ``edgevlm serve``: keys as clients send them, other sites' pages, prefixes, and the guide's proxies, run."""

import base64
import http.client
import io
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from served import KEY, NOW, WAIT_S, eventually, serving

pytest.importorskip("fastapi")
av = pytest.importorskip("av")
image = pytest.importorskip("PIL.Image")

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "serving.md"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": NOW}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    (folder / "key").write_text(KEY)
    (folder / "edgevlm.toml").write_text('[server]\nhosts = ["box.lan"]\nroot_path = "/own"\n')
    with serving(folder / "served", folder / "edgevlm.toml", "--camera", "demo", "--key-file", folder / "key") as server:
        eventually(lambda: server.request("GET", "/health/ready")[0] == 200)
        yield server


def basic(text):
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"bearer {KEY}"}, 200),
        ({"authorization": basic(f"x:{KEY}")}, 200),
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": KEY, "authorization": basic("user-of-a:proxy")}, 200),
        ({"authorization": basic(f"{KEY}:x")}, 401),
        ({"authorization": "Basic \u00e9"}, 401),
        ({"authorization": "Basic"}, 401),
        ({"x-api-key": "none"}, 401),
        ({}, 401),
    ],
)
def test_a_key_is_taken_as_clients_send_it(server, headers, status):
    found, answer, _ = server.request("GET", "/v1/models", headers=headers)
    assert found == status
    is_page = "x-api-key" in headers  # a challenge would have the browser ask for a name and a password
    assert (answer["www-authenticate"] or "").startswith("Basic" if not is_page else "Bearer") == (status == 401)


def test_ffmpeg_shows_the_live_picture_by_an_address_with_the_key(server):
    with av.open(f"http://x:{KEY}@127.0.0.1:{server.port}/v1/streams/demo/mjpeg", timeout=WAIT_S) as opened:
        assert next(opened.decode(video=0)).width == 56


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://cam.example:8443", "sec-fetch-site": "same-origin"}, 200),
        ({"host": "localhost", "origin": "https://localhost:8443", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://box.lan"}, 200),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"host": "box.lan", "origin": "https://other.box.lan", "sec-fetch-site": "same-site"}, 403),
        ({"host": "localhost", "origin": "http://localhost:9"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused_and_its_own_behind_a_proxy_are_not(server, headers, status):
    assert server.request("POST", "/v1/chat/completions", CHAT, {"x-api-key": KEY, **headers})[0] == status


@pytest.mark.parametrize("how", ["x-ingress-path", "x-forwarded-prefix", None])
def test_a_prefix_is_taken_off_the_path_and_opens_nothing(server, how):
    prefix = "/own" if how is None else "/static"
    given = {} if how is None else {how: prefix}
    page = server.request("GET", f"{prefix}/", headers=given)[2].decode()
    assert (f'<base href="{prefix}/">' in page) == bool(given)
    for name in re.findall(r'(?:src|href)="(static/.*?)"', page):
        assert server.request("GET", f"{prefix}/{name}", headers=given)[0] == 200
    status, headers, _ = server.request("GET", prefix, headers=given)
    assert (status, headers["location"]) == (308, f".{prefix}/")
    for path in ("/v1/models", f"{prefix}/v1/models", f"{prefix}{prefix}/v1/models"):
        assert server.request("GET", path, headers=given)[0] in (401, 404), path
        found = server.request("GET", path, headers={**given, "x-api-key": KEY})[0]
        assert found == (404 if path.startswith(2 * prefix) else 200), path


@pytest.mark.parametrize("path", ["/v1//chat/completions", "/chat/completions/", "/v1/v1/chat/completions"])
def test_a_base_address_may_end_in_a_slash_and_lack_or_double_v1(server, path):
    assert server.request("POST", path, CHAT, {"x-api-key": KEY})[0] == 200


def test_a_request_without_a_host_is_no_browsers(server):
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as link:
        link.sendall(b"GET /health/ready HTTP/1.0\r\n\r\n")
        assert link.recv(100).startswith(b"HTTP/1.1 200")


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def proxied(name, folder, server):
    """The guide's settings of a proxy, on a free port in front of a server: its address."""
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed")
    port, settings = free_port(), re.search(rf"```{name}\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    certificate = ["-keyout", folder / "box.lan.key", "-out", folder / "box.lan.pem"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, *certificate], check=True, capture_output=True
    )
    both = (folder / "box.lan.pem").read_text() + (folder / "box.lan.key").read_text()
    (folder / "box.lan.both.pem").write_text(both)
    for old, new in (
        ("127.0.0.1:8000", f"127.0.0.1:{server.port}"), ("/etc/ssl", str(folder)), ("listen 443", f"listen 127.0.0.1:{port}"),
        ("bind :443", f"bind 127.0.0.1:{port}"), ("server_name box.lan", "server_name localhost"),
        ("box.lan {", f"https://localhost:{port} {{"),
    ):  # fmt: skip
        settings = settings.replace(old, new)
    if name == "nginx":
        own = [f"{kind}_temp_path {folder / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
        settings = "\n".join(
            [
                "daemon off;",
                "master_process off;",
                f"pid {folder / 'pid'};",
                "events {}",
                "http {",
                "access_log off;",
                *own,
                settings,
                "}",
            ]
        )
        arguments = ["-p", folder, "-e", folder / "errors", "-c"]
    elif name == "caddy":
        settings = f"{{\n admin off\n auto_https disable_redirects\n skip_install_trust\n}}\n{settings}"
        arguments = ["run", "--adapter", "caddyfile", "--config"]
    else:
        arguments = ["-f"]
    (folder / "settings").write_text(settings)
    with (folder / "said").open("w") as said:
        home = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
        process = subprocess.Popen(
            [program, *arguments, folder / "settings"], stdout=said, stderr=said, cwd=folder, env={**os.environ, **home}
        )
    try:
        yield eventually(lambda: answers(port, process, folder / "said") and port)
    finally:
        process.terminate()
        process.wait(WAIT_S)


def answers(port, process, said):
    assert process.poll() is None, said.read_text()
    try:
        return asked(port, "GET", "/health/live")[0] == 200
    except OSError:
        return False


def connected(port):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("localhost", port, timeout=WAIT_S, context=context)


def asked(port, method, path, body=None, headers=()):
    link = connected(port)
    try:
        text = body if body is None else json.dumps(body)
        link.request(method, path, text, {"content-type": "application/json", "x-api-key": KEY, **dict(headers)})
        response = link.getresponse()
        return response.status, response.headers, response.read()
    finally:
        link.close()


@pytest.mark.parametrize("name", ["nginx", "caddy", "haproxy"])
def test_the_guides_proxy_passes_page_pictures_and_streams(server, tmp_path, name):
    noise = io.BytesIO()
    image.fromarray(np.random.default_rng(0).integers(0, 256, (850, 850, 3), np.uint8)).save(noise, "png")
    assert len(noise.getvalue()) > 2_000_000
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(noise.getvalue()).decode()}}
    question = {**CHAT, "messages": [{"role": "user", "content": [shown, {"type": "text", "text": NOW}]}]}
    with proxied(name, tmp_path, server) as port:
        assert asked(port, "GET", "/edgevlm")[1]["location"].rstrip("/").endswith("/edgevlm")
        own = {"origin": f"https://localhost:{port}", "sec-fetch-site": "same-origin"}
        other = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        for prefix in ("", "/edgevlm"):
            status, _, page = asked(port, "GET", f"{prefix}/")
            addresses = re.findall(r'(?:src|href)="(static/.*?)"', page.decode())
            assert (status, len(addresses)) == (200, 2)
            assert {asked(port, "GET", f"{prefix}/{each}")[0] for each in addresses} == {200}
            path = f"{prefix}/v1/chat/completions"
            assert [asked(port, "POST", path, question, each)[0] for each in (own, other)] == [200, 403]
            for live, first in (("mjpeg", b"--frame"), ("events", b"event:")):  # neither ends, so what comes was passed on
                link = connected(port)
                link.request("GET", f"{prefix}/v1/streams/demo/{live}", headers={"x-api-key": KEY})
                response = link.getresponse()
                assert response.status == 200
                assert response.readline().startswith(first)
                link.close()


def test_the_page_works_in_a_frame_below_a_prefix(server, tmp_path):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium")
    with proxied("nginx", tmp_path, server) as port, api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page, said = browser.new_page(ignore_https_errors=True), []
        page.set_default_timeout(WAIT_S * 1000)
        page.on("console", lambda message: said.append(message.text))
        frame = "<iframe src='/edgevlm/'></iframe>"
        page.route("**/ingress", lambda route: route.fulfill(body=frame, content_type="text/html"))
        page.goto(f"https://localhost:{port}/ingress")
        shown = page.frame_locator("iframe")
        shown.locator("#key").fill(KEY)
        shown.locator("#key").press("Enter")
        shown.locator("#question").fill(NOW)
        shown.locator("#question").press("Enter")
        api.expect(shown.locator("#talk li").last).to_contain_text(re.compile(r"\d"), timeout=WAIT_S * 1000)
        shown.locator("#live[src^='blob:']").wait_for()
        assert [text for text in said if "401" not in text] == []
        browser.close()
