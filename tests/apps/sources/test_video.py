"""Odd files of real phones, recorders and browsers, beside what ffmpeg makes of them; skipped without its program."""

import shutil
import socket
import subprocess
import threading
import time
from functools import partial
from random import Random

import av
import numpy as np
import pytest

from edgevlm.apps.sources import SourceError, SourceOptions, State, open_source
from edgevlm.apps.sources.recordings import VideoSource
from edgevlm.apps.sources.video import open_video, spread

needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="there is no ffmpeg")
PICTURES = "testsrc2=s=96x64:r=10:d="
X264 = ("-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p")


def ffmpeg(*arguments):
    done = subprocess.run(
        ["ffmpeg", "-hide_banner", "-loglevel", "error", "-y", *map(str, arguments)], capture_output=True, check=True
    )
    return done.stdout


def made(path, *arguments, seconds=3, pictures=PICTURES, codec=X264):
    ffmpeg("-f", "lavfi", "-i", f"{pictures}{seconds}", *codec, *arguments, path)
    return path


def shown(path, *filters):
    """The pictures that ffmpeg shows, of the size that ours have."""
    source = VideoSource(path, None)
    height, width = next(iter(source)).image.shape[:2]
    source.close()
    raw = ffmpeg("-i", path, *filters, "-vsync", "0", "-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def check(path, *filters, within=0.0):
    """Every picture, in order, is ffmpeg's; return the frames."""
    source = VideoSource(path, None)
    frames, wanted = list(source), shown(path, *filters)
    assert len(frames) == len(wanted)
    assert frames[0].time_s == 0
    for frame, image in zip(frames, wanted, strict=True):
        assert np.abs(frame.image.astype(int) - image).mean() <= within
    assert not source.dropped
    return frames


@needs_ffmpeg
def test_a_clip_cut_without_encoding_has_the_pictures_that_are_shown(tmp_path):
    whole = made(tmp_path / "up.mp4", seconds=6)
    ffmpeg("-ss", "2.35", "-i", whole, "-c", "copy", tmp_path / "cut.mp4")
    with av.open(str(tmp_path / "cut.mp4")) as container:
        assert container.streams.video[0].frames == 60, "what the container claims"
    assert len(check(tmp_path / "cut.mp4")) == 36


@needs_ffmpeg
@pytest.mark.parametrize("matrix", [
    *((a, 0, 0, d) for a in (1, -1) for d in (1, -1)), *((0, b, c, 0) for b in (1, -1) for c in (1, -1)),
])  # fmt: skip
def test_phones_pictures_are_upright(tmp_path, matrix):
    """In each of eight orientations; mirrored ones are of cameras on the front."""
    path = made(tmp_path / "turned.mp4", seconds=0.5)
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 44  # a, b, u, c, d
    for place, value in zip((0, 1, 3, 4), matrix, strict=True):
        data[at + 4 * place : at + 4 * place + 4] = (value << 16).to_bytes(4, "big", signed=True)
    path.write_bytes(data)
    assert check(path)[0].image.shape[:2] == ((64, 96) if matrix[0] else (96, 64))


@needs_ffmpeg
def test_a_browsers_recording_without_a_duration_and_a_segment_that_starts_late(tmp_path):
    vp8 = ("-c:v", "libvpx", "-deadline", "realtime", "-cpu-used", "8")
    paths = [
        made(tmp_path / "live.webm", "-f", "webm", "-live", "1", codec=vp8),
        made(tmp_path / "offset.ts", "-output_ts_offset", "5000", "-f", "mpegts"),
    ]
    for path in paths:
        assert check(path)[-1].time_s == pytest.approx(2.9)
        images, wanted = spread(partial(open_video, path), 3, 60), shown(path)
        assert [int(np.abs(wanted.astype(int) - image).mean((1, 2, 3)).argmin()) for image in images] == [5, 15, 25]


@needs_ffmpeg
def test_pixels_are_square_and_lines_woven_no_longer(tmp_path):
    path = made(tmp_path / "sar.mp4", "-vf", "setsar=3/2", seconds=0.5)
    assert check(path, "-vf", "scale=iw*sar:ih", within=8)[0].image.shape == (64, 144, 3)
    woven = made(
        tmp_path / "woven.mp4", "-vf", "interlace=lowpass=off", "-x264opts", "interlaced=1", pictures="testsrc2=s=96x64:r=20:d="
    )
    check(woven, "-vf", "yadif=deint=interlaced")


def written(path, title):
    with av.open(str(path), "w") as container:
        container.metadata["title"] = title
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 64
        for packet in [*stream.encode(av.VideoFrame(64, 64, "yuv420p")), *stream.encode()]:
            container.mux(packet)
    return path.read_bytes()


def test_a_title_in_latin_1_is_no_damage_and_an_unknown_codec_is_one_line(tmp_path):
    path = tmp_path / "clip.avi"
    data = written(path, "Kueche")
    path.write_bytes(data.replace(b"Kueche", "Küchen".encode("latin-1")))
    assert len(list(VideoSource(path, None))) == 1
    path.write_bytes(data.replace(b"FMP4", b"ZZZZ"))
    with pytest.raises(SourceError, match="contains no video, only streams of unknown codecs"):
        VideoSource(path, None)


@needs_ffmpeg
def test_cover_art_is_not_the_video_and_alone_is_none(tmp_path):
    clip = made(tmp_path / "clip.mp4")
    ffmpeg("-i", clip, "-frames:v", "1", tmp_path / "cover.png")
    art = ("-map", "1", "-map", "0", "-c", "copy", "-disposition:v:0", "attached_pic")
    ffmpeg("-i", clip, "-i", tmp_path / "cover.png", *art, tmp_path / "art.mp4")
    assert len(list(VideoSource(tmp_path / "art.mp4", None))) == 30
    sound = ("-f", "lavfi", "-i", "sine=d=1", "-i", tmp_path / "cover.png", "-map", "0", "-map", "1", "-c:v", "copy")
    ffmpeg(*sound, "-disposition:v", "attached_pic", tmp_path / "song.m4a")
    with pytest.raises(SourceError, match="no video in it, only cover art"):
        VideoSource(tmp_path / "song.m4a", None)


@needs_ffmpeg
@pytest.mark.parametrize("seconds", [1, 3, 70])
def test_joined_segments_are_watched_whole_in_order_at_fps(tmp_path, seconds):
    """A recorder's segments that each start at 0 again, one after the other in a file."""
    segment = made(tmp_path / "segment.ts", "-f", "mpegts", seconds=seconds)
    (tmp_path / "joined.ts").write_bytes(segment.read_bytes() * 3)
    source = open_source(None, str(tmp_path / "joined.ts"), SourceOptions(fps=2))
    times = [frame.time_s for frame in source]
    assert (len(times), source.state, source.dropped) == (6 * seconds, State.ENDED, 0)
    assert np.diff(times) == pytest.approx(0.5, abs=0.11)


@needs_ffmpeg
def test_33_bits_of_stamps_wrap_in_the_middle(tmp_path):
    path = made(tmp_path / "wraps.ts", "-output_ts_offset", str(2**33 / 90_000 - 2.9), "-f", "mpegts", seconds=4)
    frames = check(path)
    assert np.diff([frame.time_s for frame in frames]) == pytest.approx(0.1)


@needs_ffmpeg
@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_after_lost_packets_no_smeared_picture_is_watched(tmp_path, codec):
    """A transport stream without some of its packets; what is watched is in the whole one."""
    encoder = ("-c:v", codec, "-preset", "ultrafast", "-pix_fmt", "yuv420p", "-g", "25")
    path = made(tmp_path / "whole.ts", "-f", "mpegts", seconds=20, codec=encoder)
    whole, data = shown(path).astype(int), path.read_bytes()
    random = Random(2)
    packets = [data[at : at + 188] for at in range(0, len(data), 188)]
    lossy = b"".join(packet for place, packet in enumerate(packets) if place < 20 or random.random() > 0.003)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(lossy), daemon=True).start()
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        source = open_source(url, None, SourceOptions(fps=1e9, rule="block", open_timeout_s=60, read_timeout_s=60))
        frames = []
        reader = threading.Thread(target=lambda: frames.extend(source))
        reader.start()
        deadline = time.monotonic() + 120
        while source.state is not State.RECONNECTING and time.monotonic() < deadline:
            time.sleep(0.05)
        source.close()
        reader.join()
        drops = source.drops
    smeared = [np.abs(whole - frame.image).max((1, 2, 3)).min() > 8 for frame in frames]
    assert not any(smeared)
    assert len(frames) > 30
    assert drops["corrupt"]


@needs_ffmpeg
def test_pictures_of_another_size_in_the_middle_are_watched_too(tmp_path):
    """As a camera whose resolution is changed while it is recorded; and a recording of sound alone has no pictures."""
    small = made(tmp_path / "small.ts", "-f", "mpegts")
    large = made(tmp_path / "large.ts", "-f", "mpegts", pictures="testsrc2=s=192x128:r=10:d=")
    (tmp_path / "both.ts").write_bytes(small.read_bytes() + large.read_bytes())
    shapes = [frame.image.shape[:2] for frame in VideoSource(tmp_path / "both.ts", 2)]
    assert shapes == [(64, 96)] * 6 + [(128, 192)] * 6
    ffmpeg("-f", "lavfi", "-i", "sine=d=1", tmp_path / "song.m4a")
    with pytest.raises(SourceError, match=r"song\.m4a: contains no video$"):
        VideoSource(tmp_path / "song.m4a", None)
