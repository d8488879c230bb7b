"""Video from a pipe: planes against the equations of BT.601, whole streams against PyAV, and what is no stream."""

import os
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import yuv

from edgevlm.apps.sources.base import State
from edgevlm.apps.sources.recordings import StdinSource
from edgevlm.errors import SourceError


@contextmanager
def piped(data, *, left_open=False, pieces=None):
    """A descriptor that ``data`` comes out of, in ``pieces`` bytes at a time."""
    out, into = os.pipe()

    def write():
        try:
            for at in range(0, len(data), pieces or len(data) or 1):
                os.write(into, data[at : at + (pieces or len(data))])
        except BrokenPipeError:
            pass
        if not left_open:
            os.close(into)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield out
    finally:
        os.close(out)
        writer.join()
        if left_open:
            os.close(into)


def read_all(data, fps=1000, **options):
    with piped(data, **options) as descriptor:
        source = StdinSource(fps, descriptor=descriptor)
        return list(source), source


def gradients(count, height=48, width=64):
    """Smooth pictures that move: chroma's place inside its block hardly shows."""
    y, x = np.mgrid[:height, :width]
    return [np.stack([x * 3 + 9 * i, y * 4, 255 - 2 * (x + y) + 5 * i], 2).clip(0, 255).astype(np.uint8) for i in range(count)]


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p", "yuv422p", "yuv444p", "yuv411p", "gray"])
def test_a_stream_is_what_pyav_decodes(pix_fmt):
    data, decoded = yuv.encode(gradients(4), pix_fmt)
    frames, _ = read_all(data, pieces=1000)
    assert [round(frame.time_s, 6) for frame in frames] == [0, 0.1, 0.2, 0.3]
    assert all(np.array_equal(frame.image, image) for frame, image in zip(frames, decoded, strict=True))


def test_motion_jpeg_is_what_pyav_decodes():
    data, decoded = yuv.encode(gradients(5), "yuvj420p", "mjpeg", "mjpeg")
    frames, _ = read_all(data, pieces=777)
    assert [round(frame.time_s, 6) for frame in frames] == [0, 0.04, 0.08, 0.12, 0.16], "25 a second unless told"
    for frame, image in zip(frames, decoded, strict=True):
        assert np.abs(frame.image.astype(int) - image).mean() < 2


def jpeg(level, thumbnail=b""):
    """A JPEG file of one gray level; ``thumbnail``: a whole JPEG file in a segment of it."""
    cv2 = pytest.importorskip("cv2")
    noise = np.random.default_rng(level).integers(0, 40, (32, 32, 3))
    data = cv2.imencode(".jpg", (noise + level).astype(np.uint8))[1].tobytes()
    return data[:2] + b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail + data[2:] if thumbnail else data


def test_a_picture_that_cannot_be_decoded_is_counted_and_passed_over():
    bad = jpeg(60).replace(b"\xff\xc0", b"\xff\xc3")
    frames, source = read_all(jpeg(20) + bad + jpeg(20))
    assert [frame.time_s for frame in frames] == [0, 0.08]
    assert source.drops == {"corrupt": 1}


Y4M = yuv.noise_stream(16, 12, 3)


@pytest.mark.parametrize(("data", "drops"), [(Y4M[:-1], {}), (jpeg(20) + jpeg(60)[:-2], {"corrupt": 1})])
def test_a_frame_that_was_cut_short_is_left_out(data, drops):
    frames, source = read_all(data)
    assert (len(frames) > 0, source.drops, source.state) == (True, drops, State.ENDED)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"this is no video\n" * 999, "neither YUV4MPEG2 nor Motion JPEG"),
        (bytes(1 << 20), "neither YUV4MPEG2 nor Motion JPEG"),
        (b"YUV4MPEG2", "is damaged"),
        (b"YUV4MPEG2 " + b"x" * 500, "is damaged"),
        (b"YUV4MPEG2 W16 H-2\n", "is damaged"),
        (b"YUV4MPEG2 W99999999 H12 F25:1\n", "is damaged"),
        (b"YUV4MPEG2 W16000 H16000 F25:1\nFRAME\n", "picture size 16000 x 16000 not supported"),
        (Y4M.replace(b"FRAME", b"FRAMX"), "invalid start of a frame"),
        (Y4M[: Y4M.index(b"FRAME")], "no readable picture found"),
        (jpeg(60).replace(b"\xff\xc0", b"\xff\xc3"), "no readable picture found"),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_what_is_no_stream_or_damaged_from_its_first_frame_is_one_line(data, says):
    with pytest.raises(SourceError, match=says) as caught:
        read_all(data)
    assert "\n" not in str(caught.value)


def test_closing_ends_a_read_that_waits():
    with piped(Y4M, left_open=True) as descriptor:
        source, got = StdinSource(1000, descriptor=descriptor), []
        reader = threading.Thread(target=lambda: got.extend(source))
        reader.start()
        deadline = time.monotonic() + 120
        while len(got) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        source.close()
        reader.join(120)
        assert not reader.is_alive()
        assert len(got) == 3
        assert source.state is State.ENDED
