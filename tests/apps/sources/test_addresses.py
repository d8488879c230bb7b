"""Sloppy answers of cameras, and the error messages of failures."""

import http.server
import io
import socket
import threading
import time

import numpy as np
import pytest
from PIL import Image

from edgevlm.apps.sources import SourceError, SourceOptions, State, open_source
from edgevlm.apps.sources.network import connect

QUICK = SourceOptions(fps=50, open_timeout_s=5, read_timeout_s=5, rule="block")


def picture(level, kind="JPEG"):
    written = io.BytesIO()
    noise = np.random.default_rng(0).integers(-30, 30, (48, 64, 3))
    Image.fromarray((level + noise).astype(np.uint8)).save(written, kind)
    return written.getvalue()


JPEGS, PNGS = ([picture(level, kind) for level in range(40, 240, 40)] for kind in ("JPEG", "PNG"))


@pytest.fixture
def served():
    """Serve what a function of a request's handler answers; return the address."""
    servers = []

    def serve(answer):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                answer(self)

            def log_message(self, *_): ...

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/live"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def answering(body, kind="multipart/x-mixed-replace; boundary=frame", **headers):
    def answer(handler):
        handler.send_response(200)
        for name, value in {"Content-Type": kind, **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def levels(url):
    connection, found = connect(url, QUICK), []
    while (grabbed := connection.grab()) is not None:
        if grabbed.decoded and not grabbed.corrupt:
            found.append(round(connection.retrieve().mean(), -1))
    connection.close()
    return found, connection.problem


def head(data, end=b"\r\n", boundary=b"--frame", length=True, kind=b"image/jpeg"):
    lines = [boundary, b"Content-Type: " + kind, *([b"Content-Length: %d" % len(data)] if length else []), b"", data]
    return end.join(lines) + end


@pytest.mark.parametrize(
    "body",
    [
        b"".join(head(data, b"\n") for data in JPEGS),
        b"".join(head(data, b"\n", length=False) for data in JPEGS),
        b"".join(head(data, boundary=b"--another") for data in JPEGS),
        b"".join(b"--frame\r\n" + head(data) for data in JPEGS),  # Foscam
        b"".join(head(data)[9:] + b"--frame\r\n" for data in JPEGS),  # the boundary follows: ESP32, Tasmota
        b"".join(head(data, kind=b"image/png") for data in PNGS),
        b"".join(head(data, length=False) for data in JPEGS) + head(JPEGS[0])[:-20],  # the last one is cut short
        b"".join(head(data).replace(b": %d" % len(data), b": 7") for data in JPEGS),
    ],
    ids=["LF", "LF, no length", "another boundary", "boundary twice", "boundary last", "PNG", "no length", "wrong length"],
)
def test_sloppy_motion_jpeg_is_taken(served, body):
    assert levels(served(answering(body)))[0] == [40, 80, 120, 160, 200]


def test_a_picture_that_the_next_one_interrupts_is_left_out(served):
    body = b"".join(head(data[: -200 if place == 2 else None]) for place, data in enumerate(JPEGS))
    assert levels(served(answering(body)))[0] == [40, 80, 160, 200]


def test_parts_that_are_no_pictures_are_named(served):
    found, problem = levels(served(answering(head(bytes(100), kind=b"video/x-h264") * 3)))
    assert (found, problem) == ([], "no JPEG or PNG picture in the response; the camera sends video/x-h264")


@pytest.mark.parametrize("tagged", [True, False])
def test_a_still_address_is_asked_for_at_fps_and_a_new_picture_is_a_frame(served, tagged):
    asked = []

    def answer(handler):
        asked.append((time.monotonic(), handler.headers["If-None-Match"], handler.headers["If-Modified-Since"]))
        number = len(asked) // 6  # each picture is there for six requests
        if tagged and asked[-1][1] == f'"{number}"':
            handler.send_response(304)
            handler.end_headers()
            return
        headers = {"ETag": f'"{number}"', "Last_Modified": "Fri, 27 Nov 2026 10:00:00 GMT"} if tagged else {}
        answering(JPEGS[number % 5], "image/jpeg", Content_Length=len(JPEGS[number % 5]), **headers)(handler)

    source = open_source(served(answer), None, SourceOptions(fps=20, rule="block", stall_timeout_s=60, read_timeout_s=60))
    frames = [source.read() for _ in range(4)]
    state, problem, drops = source.state, source.problem, dict(source.drops)
    source.close()
    shown = [int(round(frame.image.mean(), -1)) for frame in frames]
    assert shown in ([40, 80, 120, 160], [80, 120, 160, 200]), "the first one may be old when the first frame is read"
    assert (state, problem, drops) == (State.RUNNING, None, {})
    assert np.diff([at for at, *_ in asked]).min() > 0.04, "no more often than --fps"
    assert all(since == ("Fri, 27 Nov 2026 10:00:00 GMT" if tagged else None) for _, _, since in asked[1:])


def says(url, options=QUICK):
    with pytest.raises(SourceError) as caught:
        open_source(url, None, options)
    return str(caught.value).partition(": ")[2]


def talking(line):
    """A port that answers whatever comes with a line, once."""
    server = socket.create_server(("127.0.0.1", 0))

    def talk():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(line)

    threading.Thread(target=talk, daemon=True).start()
    return server


def test_failures_are_told_in_the_words_of_a_cameras_owner(served):
    page = served(answering(b"<!DOCTYPE html><title>Log in</title>", "text/html"))
    assert says(page).startswith("the address returned a web page, not video (perhaps a login form)")
    untyped = served(answering(b"\n<html><body>Log in", "application/octet-stream"))
    assert says(untyped).startswith("the address returned a web page")
    assert "does not send a supported video" in says(served(answering(b"12:00:01 up 3 days" * 99, "text/plain")))
    for scheme in ("rtsp", "http", "rtmp", "tcp"):
        assert says(f"{scheme}://no-such-camera.invalid/live").startswith(
            ("host no-such-camera.invalid not found", "no name server answers for no-such-camera.invalid")
        )
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    for scheme in ("rtsp", "http", "tcp"):
        assert f"127.0.0.1:{free} refused the connection" in says(f"{scheme}://127.0.0.1:{free}/live")
    for line in (b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 2000, b""):
        with talking(line) as server:
            port = server.getsockname()[1]
            assert f"127.0.0.1:{port} is not an RTSP server" in says(f"rtsp://127.0.0.1:{port}/live")


@pytest.mark.parametrize("password", ["a/b", "a#b", "a?b", "a/b#c?d", "12/34"])
def test_an_address_with_a_raw_password_says_what_to_do(password):
    told = says(f"rtsp://admin.invalid:{password}@192.0.2.1:554/live")
    assert "percent-encode / # ? in the password" in told
    assert password not in told
