"""OpenCV without its own messages, which would hide ours."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.packages import install
from edgevlm.runtime.preprocess import MOST_PIXELS

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
    """Import OpenCV with its own logging off and limits on what it opens; raises UserError when it is not installed.

    It reads pictures of up to MOST_PIXELS, by their headers, and files of CONTAINERS.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import cv2
    except ImportError:
        raise UserError(
            f"reading cameras and video files needs OpenCV: {install('cpu')}, or on a Jetson the platform's own build"
        ) from None
    return cv2


def decode_picture(data: bytes) -> NDArray[np.uint8] | None:
    """A picture of any kind that OpenCV reads, uint8 RGB ``[H, W, 3]``, turned as its EXIF says.

    None where it is damaged or has more than MOST_PIXELS.
    """
    cv2 = load_cv2()
    if not data or _jpeg_pixels(data) > MOST_PIXELS:
        return None
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:  # its header says more pixels than are allowed
        return None
    if image is None or image.shape[0] * image.shape[1] > MOST_PIXELS:  # loaded before its limit was set
        return None
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB, image))


def _jpeg_pixels(data: bytes) -> int:
    """What a JPEG's header says, 0 where there is none: OpenCV has no limit in a program that imported it before us."""
    at = 2
    while data[:2] == b"\xff\xd8" and at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 5 : at + 7], "big") * int.from_bytes(data[at + 7 : at + 9], "big")
        at += 1 if marker == 0xFF else 2 + length
    return 0
