"""Recordings behind a URL: played at their own speed, and they end."""

import functools
import http.server
import os
import threading

import numpy as np
import pytest

from edgevlm.apps.sources import SourceError, SourceOptions, State, open_source
from edgevlm.apps.sources.network import connect

av = pytest.importorskip("av")
FRAMES, RATE = 30, 20


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_): ...


@pytest.fixture
def address(tmp_path):
    """Of a folder on loopback with a recording as ``clip.mp4`` and as ``clip.m3u8`` with its segments."""
    for name, kind, options in (("clip.mp4", "mp4", {"movflags": "faststart"}), ("clip.m3u8", "hls", {"hls_time": "0.5"})):
        with av.open(str(tmp_path / name), "w", format=kind, options=options) as container:
            stream = container.add_stream("libx264", rate=RATE)
            stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 48, "yuv420p", RATE // 2
            for index in range(FRAMES):
                picture = np.full((48, 64, 3), 8 * index, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
    (tmp_path / "page.html").write_text("<p>no video</p>")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["clip.mp4", "clip.m3u8"])
def test_a_recording_is_played_at_its_own_speed_and_ends(address, name):
    source = open_source(f"{address}/{name}", None, SourceOptions(fps=1000, rule="block"))
    frames = list(source)
    assert source.state is State.ENDED
    assert source.reconnects == 0
    assert len(frames) >= FRAMES - 3
    assert frames[-1].time_s - frames[0].time_s > 0.5 * (len(frames) - 1) / RATE, "faster than it was recorded"
    levels = [frame.image.mean() for frame in frames]
    assert (np.diff(levels) > 0).all(), "each picture once and in order"
    source.close()


def test_a_page_is_no_stream(address):
    with pytest.raises(SourceError, match=r"web page, not video \(perhaps a login form\)"):
        open_source(f"{address}/page.html", None)
    with pytest.raises(SourceError, match="404"):
        open_source(f"{address}/none", None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.txt", "ffconcat version 1.0\nfile clip.mp4\n"),
        ("list.m3u8", "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nclip0.ts\n#EXT-X-ENDLIST\n"),
        (
            "list.sdp",
            "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
        ),
    ],
)
def test_a_file_that_names_others_is_no_video(address, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match="not a readable video"):
        open_source(video=str(tmp_path / name))


def test_a_list_from_the_network_names_no_files(address, tmp_path):
    segment = tmp_path / "clip0.ts"
    assert segment.exists()
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nfile://{segment}\n#EXT-X-ENDLIST\n")
    (tmp_path / "list.txt").write_text(f"ffconcat version 1.0\nfile {address}/clip.mp4\n")
    for url in (f"{address}/list.m3u8", f"{address}/list.txt", f"file://{tmp_path}/clip.mp4"):
        with pytest.raises(SourceError):
            connect(url, SourceOptions(open_timeout_s=3, read_timeout_s=3))


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(SourceError, match="is a device or a pipe"):
            open_source(video=str(path))
