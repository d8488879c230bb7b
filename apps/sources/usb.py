"""Cameras that Video4Linux knows, USB ones above all: an index, /dev/videoN, or a name that stays, /dev/v4l/by-id/..."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import Connection, Grabbed, SourceOptions
from edgevlm.apps.sources.devices import ROOT, Device, devices, fourcc, probe
from edgevlm.apps.sources.opencv import load_cv2
from edgevlm.errors import SourceError
from edgevlm.runtime.files import look

OPEN = "cannot be opened; edgevlm cameras lists what is there, and why one cannot be used"


class UsbConnection(Connection):
    """A device open through OpenCV's V4L2 backend, with one buffer, so that what is read is new.

    Size, rate and pixel format are asked of the driver, which takes what is nearest: :attr:`mode` says what it took.
    """

    def __init__(self, target: str, options: SourceOptions, root: Path = ROOT) -> None:
        self._path = device_path(target, root)
        self._cv2: Any = load_cv2()
        self._capture = self._cv2.VideoCapture(str(self._path), self._cv2.CAP_V4L2, _asked(self._cv2, options))
        if not self._capture.isOpened():
            found = probe(Device(self._path, "", ""), root)
            raise SourceError(found.problem or OPEN)
        self.mode = _mode(self._cv2, self._capture, options)

    def grab(self) -> Grabbed | None:
        if not self._capture.grab():
            self.problem = "gives no more pictures; is it still plugged in?"
            return None
        stamp_s = self._capture.get(self._cv2.CAP_PROP_POS_MSEC) / 1e3
        return Grabbed(stamp_s if stamp_s > 0 else None)

    def retrieve(self) -> NDArray[np.uint8] | None:
        decoded, image = self._capture.retrieve()
        return np.asarray(self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB)) if decoded else None

    def close(self) -> None:
        self._capture.release()


def device_path(target: str, root: Path = ROOT) -> Path:
    """The node of an index or path. Raises SourceError, with the cameras there are, where it is not there."""
    path = root / "dev" / f"video{target}" if target.isdigit() else Path(target)
    if look(path) != "nothing":
        return path
    present = ", ".join(str(device.path) for device in devices(root)) or "none"
    raise SourceError(
        f"there is no {path} (cameras here: {present}); connect one, or try --camera demo, --camera rtsp://..., or --video FILE"
    )


def _asked(cv2: Any, options: SourceOptions) -> list[int]:
    """Properties for opening. The pixel format goes first: which sizes and rates there are depends on it."""
    asked = []
    if options.pixel_format:
        asked += [cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*options.pixel_format.ljust(4))]
    if options.size:
        asked += [cv2.CAP_PROP_FRAME_WIDTH, options.size[0], cv2.CAP_PROP_FRAME_HEIGHT, options.size[1]]
    if options.camera_fps:
        asked += [cv2.CAP_PROP_FPS, round(options.camera_fps)]
    return [*asked, cv2.CAP_PROP_BUFFERSIZE, 1]


def _mode(cv2: Any, capture: Any, options: SourceOptions) -> str:
    """What the driver took, and what was asked for where that is something else."""
    width, height = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)), int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    rate, code = capture.get(cv2.CAP_PROP_FPS), fourcc(int(capture.get(cv2.CAP_PROP_FOURCC)) & 0xFFFFFFFF)
    refused = []
    if options.size and options.size != (width, height):
        refused.append(f"{options.size[0]}x{options.size[1]}")
    if options.camera_fps and round(options.camera_fps) != round(rate):
        refused.append(f"{options.camera_fps:g} fps")
    if options.pixel_format and options.pixel_format != code:
        refused.append(options.pixel_format)
    return f"{width}x{height} at {rate:g} fps, {code}" + (f" (asked for {', '.join(refused)})" if refused else "")
