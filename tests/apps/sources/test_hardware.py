"""Who decodes a file: what is asked of OpenCV where the platform offers a decoder, and what is said when it falls back."""

import pytest
from clips import clip

from edgevlm.apps.sources import video
from edgevlm.apps.sources.video import VideoSource


class FakeCapture:
    """Opens as it is told, by the decoder it is told."""

    def __init__(self, calls, opens, decoder):
        self.calls, self.opens, self.decoder = calls, opens, decoder

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return FakeCapture(self.calls, self.opens or len(arguments) == 2, self.decoder)

    def isOpened(self):
        return self.opens

    def get(self, _):
        return float(self.decoder)


@pytest.fixture
def card(tmp_path):
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    (tmp_path / "dev" / "dri" / "renderD128").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("decode", "opens", "decoder", "tries", "says"),
    [
        ("auto", True, 3, 1, "decoded by the graphics card"),
        ("auto", True, 0, 1, "decoded by the CPU: OpenCV's FFmpeg finds no decoder"),
        ("auto", False, 0, 2, ""),
        ("cpu", True, 3, 1, ""),
    ],
)
def test_a_decoder_of_the_platform_is_asked_for(card, monkeypatch, decode, opens, decoder, tries, says):
    cv2, calls = pytest.importorskip("cv2"), []
    monkeypatch.setattr(cv2, "VideoCapture", FakeCapture(calls, opens, decoder))
    capture, mode = video.open_file("a.mp4", decode, card)
    assert capture.isOpened()
    assert mode.startswith(says)
    assert bool(mode) is bool(says)
    assert len(calls) == tries
    asked = ("a.mp4", cv2.CAP_FFMPEG, [cv2.CAP_PROP_HW_ACCELERATION, cv2.VIDEO_ACCELERATION_ANY])
    assert calls[0] == (asked if decode == "auto" else ("a.mp4", cv2.CAP_FFMPEG))


def test_without_a_card_nothing_is_asked_or_said(tmp_path, monkeypatch):
    cv2, calls = pytest.importorskip("cv2"), []
    monkeypatch.setattr(cv2, "VideoCapture", FakeCapture(calls, True, 0))
    assert video.open_file("a.mp4", "auto", tmp_path)[1] == ""
    assert calls == [("a.mp4", cv2.CAP_FFMPEG)]


def test_a_real_file_falls_back_and_says_so(card, monkeypatch):
    monkeypatch.setattr(video.open_file, "__defaults__", (card,))
    source = VideoSource(clip("bikes.mp4"), 2.0)
    assert source.mode.startswith("decoded by the CPU")
    assert source.read().image.shape[2] == 3
