"""Pictures and videos in questions: seen by their question alone, and nothing is fetched, opened or decoded that may not be."""

import base64
import http.server
import io
import json
import os
import socket
import struct
import threading
import zlib
from contextlib import suppress

import pytest
from served import NOW, serving

from edgevlm.apps.serve import media
from edgevlm.apps.serve.config import ServerSettings
from edgevlm.apps.sources.demo import DemoSource
from edgevlm.errors import UserError

av = pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("fastapi")


def seen(seed):
    """A frame of another world, and how many objects it shows."""
    world = DemoSource(2.0, seed)
    frame = [world.read() for _ in range(10)][-1]
    return frame.image, frame.scene.truth(NOW)


def encoded(image, kind="PNG"):
    written = io.BytesIO()
    Image.fromarray(image).save(written, kind, lossless=True)
    return written.getvalue()


def inline(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def png_header(width, height):
    """A PNG that claims a size and holds a few bytes."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IDAT" + zlib.compress(b"\0" * 100_000)
    chunks = b"".join(struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (head, body))
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """A folder with a video of a world that stands still, a link out of it, and a fifo."""
    folder = tmp_path_factory.mktemp("videos")
    image, truth = seen(3)
    with av.open(str(folder / "seen.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", 10)
        stream.width = stream.height = 256
        stream.bit_rate = 4_000_000
        large = image.repeat(256 // len(image), 0).repeat(256 // len(image), 1)
        for _ in range(20):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(large, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(folder / "empty.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", 10)
        stream.width = stream.height = 16
        container.start_encoding()
    (folder / "link.mp4").symlink_to("/etc/passwd")
    (folder / "out").symlink_to("/etc")
    (folder / "text.mp4").write_text("no video")
    (folder / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\n/etc/passwd\n")
    os.mkfifo(folder / "fifo.mp4")
    return folder, truth


class Pictures(http.server.BaseHTTPRequestHandler):
    """A host of a picture, a redirect to it, something endless, and something slow."""

    picture = encoded(seen(2)[0])

    def do_GET(self):
        self.send_response(302 if self.path == "/moved" else 200)
        if self.path == "/moved":
            self.send_header("Location", "/picture.png")
        self.end_headers()
        with suppress(ConnectionError):
            for _ in range(3000 if self.path == "/endless" else 0):
                self.wfile.write(b"\0" * 65_536)
            self.wfile.write(self.picture)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory, videos, host):
    folder = tmp_path_factory.mktemp("media")
    (folder / "edgevlm.toml").write_text(
        f'[server]\nmedia_hosts = ["{host}", "localhost:{host.partition(":")[2]}"]\n'
        f'media_folders = ["{videos[0]}"]\n[cameras.demo]\n'
    )
    with serving(folder / "served", folder / "edgevlm.toml") as started:
        started.watched("demo", 2)
        started.request("PATCH", "/v1/streams/demo", {"state": "paused"})
        yield started


def shows(url, kind="image_url"):
    return {"type": kind, kind: {"url": url}}


def ask(server, *parts, **settings):
    said = [{"role": "user", "content": [*parts, {"type": "text", "text": NOW}]}]
    return server.client.chat.completions.create(model="demo", messages=said, **settings)


def test_a_picture_is_seen_by_its_question_alone(server):
    own = ask(server)
    for seed, kind in ((1, "PNG"), (2, "WEBP"), (4, "GIF")):
        image, truth = seen(seed)
        answer = ask(server, shows(inline(encoded(image, kind))))
        assert answer.choices[0].message.content.strip() == truth
        assert answer.usage.prompt_tokens >= own.usage.prompt_tokens + 16
        assert "evidence" in own.model_extra["edgevlm"]
        assert "evidence" not in answer.model_extra["edgevlm"], "nobody knows what it was read from"
        assert ask(server).choices[0].message.content == own.choices[0].message.content
    chunks = ask(
        server, shows(inline(encoded(image))), stream=True, extra_body={"structured_outputs": {"choice": ["0", "1", "2", "3"]}}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == truth
    assert ask(server, shows(inline(encoded(image))), stop=truth).choices[0].message.content.strip() == ""


def test_a_conversation_shows_its_newest_pictures(server):
    old, (new, truth) = inline(encoded(seen(1)[0])), seen(5)
    said = [{"role": "user", "content": [shows(old)] * 6 + [{"type": "text", "text": NOW}]},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": [shows(inline(encoded(new))), {"type": "text", "text": NOW}]}]  # fmt: skip
    answer = server.client.chat.completions.create(model="demo", messages=said)
    assert answer.choices[0].message.content.strip() == truth


def test_a_picture_of_an_allowed_host_and_a_video_of_an_allowed_folder(server, host, videos):
    assert ask(server, shows(f"http://{host}/picture.png")).choices[0].message.content.strip() == seen(2)[1]
    for kind in ("video_url", "input_video"):
        answer = ask(server, shows(f"file://{videos[0]}/seen.mp4", kind))
        assert answer.choices[0].message.content.strip() == videos[1]


def folded(data, every=76, end="\r\n"):
    text = base64.b64encode(data).decode()
    return end.join(text[at : at + every] for at in range(0, len(text), every))


def test_base64_is_taken_as_clients_write_it(server):
    image, truth = seen(1)
    data = encoded(image)
    head, text = "data:image/png;base64,", base64.b64encode(data).decode()
    safe = text.replace("+", "-").replace("/", "_")
    assert safe != text
    for url in (
        head + folded(data), head + folded(data, end="\n"), f"{head} {text}\n", head + safe.rstrip("="),
        head + text.replace("+", "%2B").replace("/", "%2F"), head.replace(";", "; ").upper() + text, text,
    ):  # fmt: skip
        assert ask(server, shows(url)).choices[0].message.content.strip() == truth


def test_a_video_is_sent_in_the_question(server, videos):
    data = (videos[0] / "seen.mp4").read_bytes()
    text = base64.b64encode(data).decode()
    url, given = f"data:video/mp4;base64,{text}", {"data": text, "format": "mp4"}
    for part in (shows(url, "video_url"), shows(url, "input_video"), {"type": "input_video", "input_video": given}):
        assert ask(server, part).choices[0].message.content.strip() == videos[1]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (shows("data:image/png;base64,%%%"), "base64"), (shows("data:text/plain,x"), "base64"),
        (shows(inline(b"\x89PNG\r\n\x1a\n")), "not a readable image"), (shows(inline(b"<svg/>")), "not a readable image"),
        (shows(inline(png_header(30_000, 30_000))), "pixels"), (shows(inline(png_header(1, 1 << 20))), "pixels"),
        (shows(inline(png_header(0, 5))), "not a readable image"),
        (shows(inline(encoded(seen(1)[0])[:200])), "not a readable image"),
        (shows("file:///etc/passwd"), "data:"), (shows(""), "data:"),
        (shows("http://example.org/x.png"), "media_hosts"), (shows("http://127.0.0.1:1/x.png"), "media_hosts"),
        (shows("http://u:p@HOST/picture.png"), "credentials"), (shows("http://HOST@example.org/"), "credentials"),
        (shows("http://[::1/"), "not a valid URL"), (shows("http://HOST:99999999/"), "not a valid URL"),
        (shows("http://localhost:PORT/picture.png"), "private"), (shows("http://HOST/moved"), "redirects"),
        (shows("http://HOST/endless"), "bytes"), (shows("http://HOST/a b"), "spaces"),
        (shows("http://HOST/picture.png", "video_url"), "file:"), (shows("file:///etc/passwd", "video_url"), "media_folders"),
        (shows("file://FOLDER/../videos0/seen.mp4", "video_url"), "media_folders"),
        (shows("file://FOLDER/%2e%2e/x.mp4", "video_url"), "media_folders"),
        (shows("file://FOLDER", "video_url"), "media_folders"),
        (shows("file://FOLDER/link.mp4", "video_url"), "media_folders"),
        (shows("file://FOLDER/out/passwd", "video_url"), "media_folders"),
        (shows("file://FOLDER/fifo.mp4", "video_url"), "media_folders"),
        (shows("file://FOLDER/%00", "video_url"), "media_folders"),
        (shows("file://example.org/seen.mp4", "video_url"), "media_folders"),
        (shows("file://FOLDER/text.mp4", "video_url"), "not a readable video"),
        (shows("file://FOLDER/list.m3u8", "video_url"), "not a readable video"),
        (shows("data:video/mp4;base64,AAAA", "video_url"), "not a readable video"),
        (shows("data:video/mp4,AAAA", "input_video"), "data:video"),
        (shows("file://FOLDER/empty.mp4", "video_url"), "contains no video"),
    ],
)  # fmt: skip
def test_what_may_not_be_shown_is_a_400_that_names_it(server, host, videos, part, says):
    text = json.dumps(part).replace("HOST", host).replace("PORT", host.partition(":")[2]).replace("FOLDER", str(videos[0]))
    body = {"model": "demo", "messages": [{"role": "user", "content": [{"type": "text", "text": NOW}, json.loads(text)]}]}
    status, _, answer = server.request("POST", "/v1/chat/completions", body)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, f"messages.0.content.1.{part['type']}")
    assert says in error["message"]


def test_names_that_change_their_address_lead_to_the_one_that_was_checked(monkeypatch):
    public, connected = ("93.184.216.34", 80), []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", public)])
    monkeypatch.setattr(
        socket, "create_connection", lambda address, *_, **__: connected.append(address) or pytest.fail("opened")
    )
    with pytest.raises(BaseException):  # noqa: B017, PT011
        media.read_picture("http://camera.example/x.png", ServerSettings(media_hosts=["camera.example"]))
    assert connected == [public]


@pytest.mark.parametrize("address", ["192.168.0.1", "169.254.169.254", "fe80::1%eth0", "::ffff:127.0.0.1", "64:ff9b::7f00:1"])
def test_a_name_that_leads_to_a_private_address_is_refused(monkeypatch, address):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 80))])
    with pytest.raises(UserError, match="private"):
        media.read_picture("http://camera.example/x.png", ServerSettings(media_hosts=["camera.example"]))
