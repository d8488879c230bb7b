"""Opening and reading through OpenCV, quietly: what it prints on its own would hide our one line."""

from __future__ import annotations

import os
from typing import Any

from edgevlm.errors import UserError


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
