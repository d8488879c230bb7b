"""Read CSI sensors and GStreamer pipelines through PyGObject.

A pipeline is written as for gst-launch-1.0, but without the sink.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources.base import Connection, Grabbed, Image, SourceOptions
from edgevlm.errors import SourceError, SourceRefused

END = " ! videoconvert ! video/x-raw,format=RGB ! appsink name=edgevlm max-buffers=1 drop={drop}"
CSI_ELEMENT = "nvarguscamerasrc"
CSI_SIZE, CSI_FPS = (1920, 1080), 30.0  # the default mode, which every Jetson sensor has


def is_pipeline(text: str) -> bool:
    """Return whether the text is a GStreamer pipeline rather than a path or URL."""
    return re.search(r"\s!\s", text) is not None


@cache
def load_gst() -> Any:
    """Import and initialise PyGObject's Gst. Raises SourceRefused if PyGObject or GStreamer is missing."""
    try:
        import gi

        gi.require_version("Gst", "1.0")
        gi.require_version("GstApp", "1.0")
        from gi.repository import Gst, GstApp
    except (ImportError, ValueError) as error:
        need = "apt install python3-gi gir1.2-gst-plugins-base-1.0, in a venv with --system-site-packages"
        raise SourceRefused(f"GStreamer requires PyGObject ({error}); {need}") from None
    assert GstApp.AppSink  # importing GstApp adds methods to the appsink
    Gst.init(None)
    return Gst


def csi_problem() -> str | None:
    """Return the reason why no CSI sensor can be opened, or None if a CSI sensor can be opened."""
    try:
        found = load_gst().ElementFactory.find(CSI_ELEMENT)
    except SourceRefused as error:
        return str(error)
    return None if found is not None else f"GStreamer element {CSI_ELEMENT} not found; sudo apt install nvidia-l4t-gstreamer"


class GstPipeline(Connection):
    """Reads a GStreamer pipeline, after adding a conversion to RGB and an appsink. A file plays at its recorded speed."""

    def __init__(self, pipeline: str, options: SourceOptions, *, newest: bool = True) -> None:
        """Start the pipeline. ``newest``: whether a newer picture replaces an unread picture."""
        self._gst = gst = load_gst()
        self._timeout = int(options.read_timeout_s * gst.SECOND)
        try:
            self._pipeline = gst.parse_launch(pipeline.rstrip(" !") + END.format(drop=str(newest).lower()))
        except Exception as error:  # a GLib.Error, which only PyGObject defines
            raise SourceRefused(f"invalid pipeline ({mask_credentials(str(getattr(error, 'message', error)))})") from None
        self._sink = self._pipeline.get_by_name("edgevlm")
        live = self._pipeline.set_state(gst.State.PAUSED) == gst.StateChangeReturn.NO_PREROLL
        self._sink.set_property("sync", not live)
        self._pipeline.set_state(gst.State.PLAYING)
        self._sample = self._sink.try_pull_sample(int(options.open_timeout_s * gst.SECOND))
        self._ahead = True  # the first picture was pulled to check that the pipeline runs
        if self._sample is None:
            problem = self._said() or f"no picture within {options.open_timeout_s:g} s"
            self.close()
            raise SourceError(f"the pipeline failed to start: {problem}")

    def grab(self) -> Grabbed | None:
        if not self._ahead:
            self._sample = self._sink.try_pull_sample(self._timeout)
        self._ahead = False
        if self._sample is None:
            self.problem = self._said()
            self.finished = self.problem is None and self._sink.is_eos()
            return None
        stamp = self._sample.get_buffer().pts
        return Grabbed(None if stamp == self._gst.CLOCK_TIME_NONE else stamp / self._gst.SECOND)

    def retrieve(self) -> Image | None:
        caps, buffer = self._sample.get_caps().get_structure(0), self._sample.get_buffer()
        height, width = caps.get_value("height"), caps.get_value("width")
        mapped, data = buffer.map(self._gst.MapFlags.READ)
        if not mapped:
            return None
        try:  # rows are padded to four bytes
            rows = np.frombuffer(data.data, np.uint8).reshape(height, -1)
            return rows[:, : 3 * width].reshape(height, width, 3).copy()
        finally:
            buffer.unmap(data)

    def close(self) -> None:
        self._pipeline.set_state(self._gst.State.NULL)

    def _said(self) -> str | None:
        message = self._pipeline.get_bus().pop_filtered(self._gst.MessageType.ERROR)
        return mask_credentials(message.parse_error()[0].message) if message is not None else None


def csi_pipeline(target: str, options: SourceOptions) -> str:
    """Return the pipeline that reads CSI sensor N, for the address ``csi://N``. Raises SourceError if the address is invalid.

    The Jetson's converter (nvvidconv) scales pictures and converts them to BGRx before they reach the CPU's memory.
    """
    if not (match := re.fullmatch(r"csi://(\d{1,2})/?", target)):
        raise SourceError(f"{target}: invalid address; give a sensor number, such as csi://0")
    (width, height), fps = options.size or CSI_SIZE, options.camera_fps or CSI_FPS
    return (
        f"{CSI_ELEMENT} sensor-id={match[1]} ! "
        f"video/x-raw(memory:NVMM),width={width},height={height},framerate={round(fps)}/1,format=NV12 ! "
        "nvvidconv ! video/x-raw,format=BGRx"
    )
