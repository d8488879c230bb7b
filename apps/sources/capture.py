"""Opening and reading through OpenCV, quietly: what it prints on its own would hide our one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgevlm.errors import UserError

if TYPE_CHECKING:
    import cv2

OPEN_TIMEOUT_MS = 10_000
READ_TIMEOUT_MS = 10_000
LOW_LATENCY = "rtsp_transport;tcp|fflags;nobuffer|flags;low_delay|analyzeduration;0|probesize;32"


def load_cv2() -> Any:
    """Import OpenCV with its own logging off; raises UserError when it is not installed."""
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    try:
        import cv2
    except ImportError:
        raise UserError(
            "reading cameras and video files needs OpenCV: pip install 'edgevlm[cpu]', or on a Jetson the platform's own build"
        ) from None
    return cv2


def open_capture(target: int | str, *, network: bool = False) -> cv2.VideoCapture:
    """A capture that may not have opened: ask ``isOpened()``. Network streams get timeouts and low-latency options."""
    cv2 = load_cv2()
    if not network:
        return cv2.VideoCapture(target)
    timeouts = [
        cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, OPEN_TIMEOUT_MS, cv2.CAP_PROP_READ_TIMEOUT_MSEC, READ_TIMEOUT_MS,
    ]  # fmt: skip
    with _options(LOW_LATENCY):
        return cv2.VideoCapture(target, cv2.CAP_FFMPEG, timeouts)


@contextmanager
def _options(text: str) -> Iterator[None]:
    """FFmpeg options for what is opened inside; the environment's own win. A file opened with a probe this short would fail."""
    name = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
    if name in os.environ:
        yield
        return
    os.environ[name] = text
    try:
        yield
    finally:
        del os.environ[name]
