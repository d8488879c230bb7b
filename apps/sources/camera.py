"""Cameras of this machine through OpenCV: an index or /dev/videoN."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import Connection, Grabbed, Source, SourceOptions
from edgevlm.apps.sources.capture import load_cv2, open_capture
from edgevlm.apps.sources.live import LiveSource
from edgevlm.errors import SourceError
from edgevlm.runtime.paths import look


def open_device(target: str, options: SourceOptions) -> Source:
    """A live source for ``0`` or ``/dev/video0``. Raises SourceError, one line, when there is none."""
    load_cv2()
    return LiveSource(target, lambda: DeviceConnection(target), options)


class DeviceConnection(Connection):
    """One opening of a device."""

    def __init__(self, target: str) -> None:
        self._cv2 = load_cv2()
        _check_device(target)
        self._capture = open_capture(int(target) if target.isdigit() else target)
        if not self._capture.isOpened():
            raise SourceError("cannot be opened; is it free?")

    def grab(self) -> Grabbed | None:
        return Grabbed() if self._capture.grab() else None

    def retrieve(self) -> NDArray[np.uint8] | None:
        decoded, image = self._capture.retrieve()
        return np.asarray(self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB)) if decoded else None

    def close(self) -> None:
        self._capture.release()


def _check_device(target: str) -> None:
    """One line for a camera that is not there, before a backend tries every driver it knows."""
    device = Path(f"/dev/video{target}" if target.isdigit() else target)
    if look(device) != "nothing":
        return
    present = ", ".join(sorted(str(path) for path in Path("/dev").glob("video*"))) or "none"
    raise SourceError(
        f"there is no {device} (cameras here: {present}); "
        "connect one, or try --camera demo, --camera rtsp://..., or --video FILE"
    )
