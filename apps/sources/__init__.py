"""The registry of sources: one file and one line each."""

from __future__ import annotations

import math
from collections.abc import Callable

from edgevlm.apps.sources.base import Frame, Source, State, mask_credentials
from edgevlm.errors import SourceError

__all__ = ["DEFAULT_FPS", "Frame", "Source", "State", "mask_credentials", "open_source"]

DEFAULT_FPS = 2.0


def open_source(camera: str | None, video: str | None, *, fps: float, realtime: bool, seed: int = 0) -> Source:
    """Open ``--camera`` or ``--video``; the demo when neither is given. Raises SourceError, one line.

    A recorded source waits for its reader unless ``realtime``; a live one never does.
    """
    from edgevlm.apps.sources.newest import NewestFrame

    if camera is not None and video is not None:
        raise SourceError("give --camera or --video, not both")
    if not 0 < fps < math.inf:
        raise SourceError(f"--fps {fps:g}: give a rate above 0")
    kind, target = ("video", video) if video is not None else _kind_of(camera or "demo")
    source = SOURCES[kind](str(target), fps, seed)
    if source.live or realtime:
        return NewestFrame(source, paced=not source.live)
    return source


def _demo(target: str, fps: float, seed: int) -> Source:
    from edgevlm.apps.sources.demo import DemoSource

    return DemoSource(fps, seed)


def _video(target: str, fps: float, seed: int) -> Source:
    from edgevlm.apps.sources.video import VideoSource

    return VideoSource(target, fps)


def _camera(target: str, fps: float, seed: int) -> Source:
    from edgevlm.apps.sources.camera import CameraSource

    return CameraSource(target, fps)


SOURCES: dict[str, Callable[[str, float, int], Source]] = {"demo": _demo, "video": _video, "camera": _camera}


def _kind_of(camera: str) -> tuple[str, str]:
    if camera == "demo":
        return "demo", camera
    if camera.isdigit() or camera.startswith("/dev/") or "://" in camera:
        return "camera", camera
    raise SourceError(
        f"--camera {mask_credentials(camera)}: give demo, an index like 0, /dev/videoN or a URL; for a file use --video"
    )
