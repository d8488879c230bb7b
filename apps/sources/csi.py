"""Sensors on a Jetson's CSI port, ``csi://0``: the platform's image signal processor, through nvarguscamerasrc."""

from __future__ import annotations

import re

from edgevlm.apps.sources.base import SourceOptions
from edgevlm.errors import SourceError

ELEMENT = "nvarguscamerasrc"
SIZE, FPS = (1920, 1080), 30.0  # unless asked for: every Jetson sensor has this mode


def pipeline(target: str, options: SourceOptions) -> str:
    """The pipeline of ``csi://N``, N a sensor's number. Raises SourceError for what is none.

    Pictures are scaled and turned into BGRx by the platform's converter (nvvidconv), and leave its memory once.
    """
    if not (match := re.fullmatch(r"csi://(\d{1,2})/?", target)):
        raise SourceError(f"{target}: give a sensor's number, like csi://0")
    (width, height), fps = options.size or SIZE, options.camera_fps or FPS
    return (
        f"{ELEMENT} sensor-id={match[1]} ! "
        f"video/x-raw(memory:NVMM),width={width},height={height},framerate={round(fps)}/1,format=NV12 ! "
        "nvvidconv ! video/x-raw,format=BGRx"
    )
