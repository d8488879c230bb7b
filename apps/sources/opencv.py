"""OpenCV without its own messages, which would hide ours."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.packages import install


def load_cv2() -> Any:
    """Import OpenCV with its own logging off; raises UserError when it is not installed."""
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    try:
        import cv2
    except ImportError:
        raise UserError(
            f"reading cameras and video files needs OpenCV: {install('cpu')}, or on a Jetson the platform's own build"
        ) from None
    return cv2


def decode_picture(data: bytes) -> NDArray[np.uint8] | None:
    """A picture of any kind that OpenCV reads, uint8 RGB ``[H, W, 3]``, turned as its EXIF says; None where it is damaged."""
    cv2 = load_cv2()
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    return None if image is None else np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB))
