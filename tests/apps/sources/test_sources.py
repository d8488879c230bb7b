"""Sources on real files, against PyAV; and the newest-frame rule."""

import av
import numpy as np
import pytest
from clips import clip
from hypothesis import given
from hypothesis import strategies as st

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources import SourceError, SourceOptions, open_source
from edgevlm.apps.sources.base import FrameSampler, State
from edgevlm.apps.sources.video import JUMP_S, LEAST_S, RecordedClock
from edgevlm.errors import UserError


def test_a_file_gives_the_frames_that_pyav_decodes():
    path, fps = clip("bikes.mp4"), 5.0
    frames = list(open_source(None, str(path), SourceOptions(fps=fps)))
    sampler, wanted = FrameSampler(fps), []
    with av.open(str(path)) as container:
        for decoded in container.decode(video=0):
            if sampler.wants(float(decoded.time)):
                wanted.append((float(decoded.time), decoded.to_ndarray(format="rgb24")))
    assert len(frames) == len(wanted)
    assert np.allclose([frame.time_s for frame in frames], [t for t, _ in wanted], atol=0.002)
    for frame, (_, image) in zip(frames[::5], wanted[::5], strict=True):
        assert frame.image.shape == image.shape
        assert np.abs(frame.image.astype(int) - image).mean() < 3, "colour conversion differs by a level or two"


def test_a_damaged_clip_is_watched_to_its_end(tmp_path):
    """Its first keyframe is broken, and so are pictures here and there."""
    data = bytearray(clip("bikes.mp4").read_bytes())
    with av.open(str(clip("bikes.mp4"))) as container:
        packets = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    for at, size in packets[::40]:
        data[at + size // 2 : at + size // 2 + 100] = bytes(100)
    (tmp_path / "clip.mp4").write_bytes(data)
    source = open_source(None, str(tmp_path / "clip.mp4"), SourceOptions(fps=10))
    times = [frame.time_s for frame in source]
    assert source.state is State.ENDED
    assert times[-1] > 9
    assert len(times) > 80
    assert (np.diff(times) > 0).all()


@pytest.mark.parametrize("content", [b"", b"this is no video\n" * 100, b"\0\0\0 ftypisom\0\0\2\0isomiso2avc1mp41\0\0\0\bfree"])
def test_what_is_no_video_is_one_line(tmp_path, content):
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"clip\.mp4"):
        list(open_source(None, str(path), SourceOptions(fps=2)))


@pytest.mark.parametrize(
    ("camera", "video", "says"),
    [
        (None, "/nowhere/a.mp4", "file not found"),
        (None, "/", "contains no pictures"),
        (None, "x" * 300, "File name too long"),
        ("/dev/" + "x" * 300, None, "File name too long"),
        ("77", None, "/dev/video77 not found"),
        ("/dev/video88", None, "/dev/video88 not found"),
        ("shop.mp4", None, "a video file"),
        ("demo", "a.mp4", "not both"),
    ],
)
def test_what_is_not_there_is_one_line(camera, video, says):
    with pytest.raises(UserError, match=says) as caught:
        open_source(camera, video, SourceOptions(fps=2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("rtsp://admin:s3cret@10.0.0.5/live", "rtsp://***@10.0.0.5/live"),
        ("cannot open http://u:p@h/x?token=abc&fps=5", "cannot open http://***@h/x?token=***&fps=5"),
        ("rtsp://10.0.0.5/live", "rtsp://10.0.0.5/live"),
        ("rtsp://u:p@ss@10.0.0.5/live", "rtsp://***@10.0.0.5/live"),
        ("rtsp://u:p/s?s@10.0.0.5/live is not an address", "rtsp://***@10.0.0.5/live is not an address"),
        ('rtspsrc location=x user-id=joe user-pw="a b" ! fakesink', "rtspsrc location=x user-id=*** user-pw=*** ! fakesink"),
        ("http://h/live?usr=joe&pass=s3cret&w=2", "http://h/live?usr=joe&pass=***&w=2"),
        ("http://h/cgi?loginuse=joe&loginpas=s3cret&psw=s3cret", "http://h/cgi?loginuse=joe&loginpas=***&psw=***"),
        ("rtsp://h/user=joe_password=s3cret_channel=1.sdp", "rtsp://h/user=joe_password=***"),
        ("rtsp://h/user=joe&password=s3cret&channel=1.sdp", "rtsp://h/user=joe&password=***&channel=1.sdp"),
        ("https://h/live?fps=5&apiKey=abc&w=2", "https://h/live?fps=5&apiKey=***&w=2"),
        ("http://h/live?token=***: no answer", "http://h/live?token=***: no answer"),
        ("https:/u:s3cret@h/x: does not exist", "https:/***@h/x: does not exist"),
        ("no login (password=a:b: refused)", "no login (password=***: refused)"),
        ("--policy hermes:tau=1 has keyframe=3", "--policy hermes:tau=1 has keyframe=3"),
    ],
)
def test_credentials_are_masked(text, masked):
    assert mask_credentials(text) == masked


PERIOD = 0.04


@given(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), min_size=1, max_size=60))
def test_whatever_a_recording_says_times_increase_by_no_more_than_is_believed(stamps):
    clock = RecordedClock(PERIOD)
    times = [clock(stamp) for stamp in stamps]
    assert times[0] == 0
    assert (np.diff(times) > 0).all()
    assert (np.diff(times) <= JUMP_S + LEAST_S).all()


@given(st.lists(st.floats(LEAST_S * 1.01, JUMP_S * 0.99), min_size=1, max_size=40))
def test_the_increasing_times_of_a_recording_are_counted_from_its_first_picture(steps):
    stamps = np.cumsum(steps)
    clock = RecordedClock(PERIOD)
    assert np.allclose([clock(stamp) for stamp in stamps], stamps - stamps[0])
