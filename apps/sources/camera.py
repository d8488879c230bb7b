"""Live cameras through OpenCV: an index, /dev/videoN, or a stream URL."""

from __future__ import annotations

import time
from pathlib import Path

from edgevlm.apps.sources.base import Frame, Sampler, Source, State, mask_credentials
from edgevlm.apps.sources.capture import load_cv2, open_capture
from edgevlm.errors import SourceError
from edgevlm.runtime.paths import look


class CameraSource(Source):
    """Reads as fast as the camera delivers; wrap it in :class:`~edgevlm.apps.sources.newest.NewestFrame`.

    Times are seconds since the first read, by the monotonic clock.
    """

    live = True

    def __init__(self, target: str, fps: float | None) -> None:
        self.name = mask_credentials(target)
        self._cv2 = load_cv2()
        network = "://" in target
        if not network:
            _check_device(target)
        self._capture = open_capture(int(target) if target.isdigit() else target, network=network)
        if not self._capture.isOpened():
            raise SourceError(f"camera {self.name}: cannot be opened; is it connected, free, and the address right?")
        self._sampler = Sampler(fps)
        self._started: float | None = None

    def read(self) -> Frame | None:
        if self._started is None:
            self._started = time.monotonic()
        while self.state is not State.ENDED:
            self.state = State.RUNNING
            if not self._capture.grab():
                self.close()
                break
            time_s = time.monotonic() - self._started
            if self._sampler.wants(time_s):
                decoded, image = self._capture.retrieve()
                if decoded:
                    return Frame(self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB), time_s)
        return None

    def close(self) -> None:
        super().close()
        self._capture.release()


def _check_device(target: str) -> None:
    """One line for a camera that is not there, before a backend tries every driver it knows."""
    device = Path(f"/dev/video{target}" if target.isdigit() else target)
    if look(device) != "nothing":
        return
    present = ", ".join(sorted(str(path) for path in Path("/dev").glob("video*"))) or "none"
    raise SourceError(
        f"camera {target}: there is no {device} (cameras here: {present}); "
        "connect one, or try --camera demo, --camera rtsp://..., or --video FILE"
    )
