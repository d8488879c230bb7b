"""Load OpenCV, turn off its messages, and open devices with its VideoCapture."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from edgevlm.apps.sources.base import Connection, Grabbed, Image
from edgevlm.errors import UserError
from edgevlm.packages import install

SETTINGS = {"OPENCV_FFMPEG_LOGLEVEL": "-8", "OPENCV_LOG_LEVEL": "SILENT"}


def load_cv2() -> Any:
    """Import OpenCV and turn off its messages. Raises UserError if OpenCV is not installed."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import cv2
    except ModuleNotFoundError:
        raise UserError(f"reading USB cameras requires OpenCV; {install('cpu')}, or use the Jetson's own build") from None
    except ImportError as error:  # opencv-python fails to import without libGL
        how = "pip install --force-reinstall opencv-python-headless, which needs no libGL"
        raise UserError(f"OpenCV is installed but cannot be loaded ({error}); {how}") from None
    return cv2


class Capture(Connection):
    """Opens a Video4Linux device with OpenCV's VideoCapture. ``arguments``: VideoCapture's arguments."""

    def __init__(self, *arguments: Any) -> None:
        self._cv2 = load_cv2()
        str(arguments[0]).encode()  # OpenCV aborts the process if the text is not valid Unicode
        self._capture = self._cv2.VideoCapture(*arguments)

    @property
    def is_open(self) -> bool:
        return bool(self._capture.isOpened())

    def property(self, name: str) -> float:
        """Return the value of an OpenCV property, named without ``CAP_PROP_``, or 0 if the property does not exist."""
        return float(self._capture.get(getattr(self._cv2, f"CAP_PROP_{name}")))

    def grab(self) -> Grabbed | None:
        return Grabbed(self.property("POS_MSEC") / 1e3 or None) if self._capture.grab() else None

    def retrieve(self) -> Image | None:
        decoded, image = self._capture.retrieve()
        return np.asarray(self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB)) if decoded else None

    def close(self) -> None:
        self._capture.release()
