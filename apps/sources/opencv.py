"""OpenCV without its own messages, which would hide ours: pictures, and whatever its VideoCapture opens."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from edgevlm.apps.sources.base import Connection, Grabbed, Image
from edgevlm.errors import UserError
from edgevlm.packages import install
from edgevlm.runtime.preprocess import MOST_EDGE, MOST_PIXELS

CONTAINERS = (  # FFmpeg's names; none of them names other files to read, as concat, hls, dash and image2 do
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,live_flv,asf,ogg,mxf,nut,wtv,rm,dv,gif,apng,ivf,obu,av1,"
    "h264,hevc,vvc,vc1,m4v,mjpeg,mpjpeg,yuv4mpegpipe,dhav"
)
SETTINGS = {
    "OPENCV_FFMPEG_LOGLEVEL": "-8",
    "OPENCV_LOG_LEVEL": "SILENT",
    "OPENCV_IO_MAX_IMAGE_PIXELS": str(MOST_PIXELS),
    "OPENCV_FFMPEG_CAPTURE_OPTIONS": f"protocol_whitelist;file|format_whitelist;{CONTAINERS}",
}


def load_cv2() -> Any:
    """Import OpenCV, silent and limited to CONTAINERS and MOST_PIXELS. Raises UserError where it is not installed."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import cv2
    except ModuleNotFoundError:
        raise UserError(f"reading cameras and video files needs OpenCV: {install('cpu')}, or a Jetson's own build") from None
    except ImportError as error:  # opencv-python without libGL
        how = "pip install --force-reinstall opencv-python-headless, which needs no libGL"
        raise UserError(f"OpenCV is installed and cannot be loaded ({error}); {how}") from None
    return cv2


class Capture(Connection):
    """A video file or a Video4Linux device, by OpenCV's VideoCapture, which takes the arguments."""

    def __init__(self, *arguments: Any) -> None:
        self._cv2 = load_cv2()
        str(arguments[0]).encode()  # OpenCV ends the process for what is not Unicode
        self._capture = self._cv2.VideoCapture(*arguments)

    @property
    def is_open(self) -> bool:
        return bool(self._capture.isOpened())

    def property(self, name: str) -> float:
        """Return the property ``cv2.CAP_PROP_<name>``, 0 where there is none."""
        return float(self._capture.get(getattr(self._cv2, f"CAP_PROP_{name}")))

    def grab(self) -> Grabbed | None:
        return Grabbed(self.property("POS_MSEC") / 1e3 or None) if self._capture.grab() else None

    def retrieve(self) -> Image | None:
        decoded, image = self._capture.retrieve()
        return np.asarray(self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB)) if decoded else None

    def close(self) -> None:
        self._capture.release()


def decode_picture(data: bytes) -> Image | None:
    """Decode a picture of any kind that OpenCV reads to uint8 RGB ``[H, W, 3]``, turned as its EXIF says.

    None where it is damaged or has more than MOST_PIXELS, or MOST_EDGE along an edge.
    """
    cv2 = load_cv2()
    if not data or _jpeg_pixels(data) > MOST_PIXELS:
        return None
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:  # its header says more pixels than are allowed
        return None
    if image is None or max(image.shape) > MOST_EDGE or image.shape[0] * image.shape[1] > MOST_PIXELS:  # OpenCV came first
        return None
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB, image))


def _jpeg_pixels(data: bytes) -> int:
    """Read a JPEG header's size, 0 where there is none: OpenCV has no limit in a program that imported it before us."""
    at = 2
    while data[:2] == b"\xff\xd8" and at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 5 : at + 7], "big") * int.from_bytes(data[at + 7 : at + 9], "big")
        at += 1 if marker == 0xFF else 2 + length
    return 0
