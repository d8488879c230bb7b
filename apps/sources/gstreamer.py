"""GStreamer pipelines, as gst-launch-1.0 takes them, and CSI sensors: through OpenCV where it has GStreamer, else PyGObject."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources.base import Connection, Grabbed, SourceOptions
from edgevlm.apps.sources.opencv import Capture, load_cv2
from edgevlm.errors import SourceError, SourceRefused

SINK = "edgevlm"
NEWEST = f"appsink name={SINK} max-buffers=1 drop=true"  # what is read is new, and nothing waits for a slow reader
RED_AT = {"RGB": (3, 0, 1), "BGR": (3, 2, -1), "RGBx": (4, 0, 1), "RGBA": (4, 0, 1), "BGRx": (4, 2, -1), "BGRA": (4, 2, -1)}


def is_pipeline(text: str) -> bool:
    """Return whether it has an exclamation mark between blanks, as pipelines have and paths and URLs do not."""
    return re.search(r"\s!\s", text) is not None


def with_sink(pipeline: str, pixel_format: str) -> str:
    """Return the pipeline with an appsink at its end; one that ends otherwise gets a conversion and a sink.

    A file plays at its own speed (``sync``); a camera's pictures are not held back.
    """
    if re.search(r"!\s*appsink\b[^!]*$", pipeline):
        return pipeline
    sync = "true" if re.match(r"\s*(multi)?filesrc\b", pipeline) else "false"
    return f"{pipeline.rstrip(' !')} ! videoconvert ! video/x-raw,format={pixel_format} ! {NEWEST} sync={sync}"


def connect(pipeline: str, options: SourceOptions) -> Connection:
    """Open a pipeline by the way there is. Raises SourceError, SourceRefused where neither OpenCV nor PyGObject can."""
    if opencv_problem() is None:
        return OpenCvPipeline(with_sink(pipeline, "BGR"))
    if (problem := pygobject_problem()) is None:
        return GstPipeline(with_sink(pipeline, "RGB"), options)
    raise SourceRefused(f"a GStreamer pipeline needs one of two things: {opencv_problem()}, and {problem}")


def opencv_problem() -> str | None:
    """Return why OpenCV cannot open pipelines; None where it can."""
    cv2 = load_cv2()
    if cv2.videoio_registry.hasBackend(cv2.CAP_GSTREAMER):
        return None
    return "this OpenCV was built without GStreamer, as PyPI's is"


@cache
def pygobject_problem() -> str | None:
    """Return why PyGObject cannot open pipelines; None where it can."""
    try:
        load_gst()
    except ImportError:
        return "PyGObject is not installed (apt install python3-gi gir1.2-gst-plugins-base-1.0, in a venv with system packages)"
    except ValueError as error:
        return f"PyGObject finds no GStreamer ({error}; apt install gir1.2-gst-plugins-base-1.0)"
    return None


@cache
def load_gst() -> Any:
    """Start PyGObject's Gst. Raises ImportError without PyGObject, ValueError without GStreamer's description."""
    import gi

    gi.require_version("Gst", "1.0")
    gi.require_version("GstApp", "1.0")
    from gi.repository import Gst, GstApp

    assert GstApp.AppSink  # loaded for its methods on what the pipeline holds
    Gst.init(None)
    return Gst


def has_element(name: str) -> bool:
    """Return whether PyGObject's GStreamer has an element; False where there is no PyGObject."""
    return pygobject_problem() is None and load_gst().ElementFactory.find(name) is not None


class OpenCvPipeline(Capture):
    """A pipeline inside OpenCV, whose appsink gives BGR. One with a length, a file's, comes to an end."""

    def __init__(self, pipeline: str) -> None:
        super().__init__(pipeline, load_cv2().CAP_GSTREAMER)
        if not self.is_open:
            raise SourceError(f"OpenCV cannot open the pipeline; try it alone: gst-launch-1.0 {mask_credentials(pipeline)!r}")
        self._recorded = self.property("FRAME_COUNT") > 0

    def grab(self) -> Grabbed | None:
        if super().grab() is not None:
            return Grabbed()
        self.finished = self._recorded
        return None


class GstPipeline(Connection):
    """A pipeline of PyGObject's. One that is not live, a file's for one, plays at its own speed and comes to an end.

    Pictures in any order of red, green and blue are taken as GStreamer laid them.
    """

    def __init__(self, pipeline: str, options: SourceOptions) -> None:
        self._gst = load_gst()
        self._timeout = int(options.read_timeout_s * self._gst.SECOND)
        self._sample: Any = None
        try:
            self._pipeline = self._gst.parse_launch(pipeline)
        except Exception as error:  # GLib.Error, which only PyGObject has
            raise SourceRefused(f"no such pipeline ({getattr(error, 'message', error)})") from None
        self._sink = self._find_sink()
        live = self._pipeline.set_state(self._gst.State.PAUSED) == self._gst.StateChangeReturn.NO_PREROLL
        if self._sink.get_name() == SINK:
            self._sink.set_property("sync", not live)
        self._pipeline.set_state(self._gst.State.PLAYING)
        self._sample = self._sink.try_pull_sample(int(options.open_timeout_s * self._gst.SECOND))
        self._ahead = self._sample is not None  # the first picture, pulled to see whether the pipeline runs
        if not self._ahead:
            problem = self._said() or f"no picture within {options.open_timeout_s:g} s"
            self.close()
            raise SourceError(f"the pipeline does not run: {problem}")
        if (layout := self._sample.get_caps().get_structure(0).get_string("format")) not in RED_AT:
            self.close()
            raise SourceRefused(f"the pipeline's appsink gives {layout}; put videoconvert ! video/x-raw,format=RGB before it")

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

    def retrieve(self) -> NDArray[np.uint8] | None:
        caps = self._sample.get_caps().get_structure(0)
        layout, height, width = caps.get_string("format"), caps.get_value("height"), caps.get_value("width")
        buffer = self._sample.get_buffer()
        mapped, data = buffer.map(self._gst.MapFlags.READ)
        if not mapped:
            return None
        try:
            return packed_rgb(data.data, layout, height, width)
        finally:
            buffer.unmap(data)

    def close(self) -> None:
        self._pipeline.set_state(self._gst.State.NULL)

    def _find_sink(self) -> Any:
        sinks = self._pipeline.iterate_sinks()
        while (step := sinks.next())[0] == self._gst.IteratorResult.OK:
            if step[1].get_factory().get_name() == "appsink":
                return step[1]
        raise SourceRefused("the pipeline has no appsink; leave its end off, it is then added")

    def _said(self) -> str | None:
        """Return the first error on the pipeline's bus."""
        message = self._pipeline.get_bus().pop_filtered(self._gst.MessageType.ERROR)
        return mask_credentials(message.parse_error()[0].message) if message is not None else None


def packed_rgb(data: bytes, layout: str, height: int, width: int) -> NDArray[np.uint8]:
    """Return packed pixels, in a layout of RED_AT, as uint8 RGB ``[H, W, 3]``; a view unless rows are padded."""
    channels, red, step = RED_AT[layout]
    pixels = np.frombuffer(data, np.uint8).reshape(height, -1)[:, : width * channels].reshape(height, width, channels)
    return pixels[..., :3] if step == 1 else pixels[..., red::-1]


CSI_ELEMENT = "nvarguscamerasrc"
CSI_SIZE, CSI_FPS = (1920, 1080), 30.0  # unless asked for: every Jetson sensor has this mode


def csi_pipeline(target: str, options: SourceOptions) -> str:
    """Return the pipeline of ``csi://N``, N a sensor's number. Raises SourceError if it is invalid.

    The platform's converter (nvvidconv) scales pictures and turns them into BGRx, so they leave its memory once.
    """
    if not (match := re.fullmatch(r"csi://(\d{1,2})/?", target)):
        raise SourceError(f"{target}: give a sensor's number, like csi://0")
    (width, height), fps = options.size or CSI_SIZE, options.camera_fps or CSI_FPS
    return (
        f"{CSI_ELEMENT} sensor-id={match[1]} ! "
        f"video/x-raw(memory:NVMM),width={width},height={height},framerate={round(fps)}/1,format=NV12 ! "
        "nvvidconv ! video/x-raw,format=BGRx"
    )


JETSON_DECODERS = ("nvhost-nvdec", "v4l2-nvdec", "nvhost-nvdec-ctl")  # nodes under /dev
JETSON_ELEMENT = "nvv4l2decoder"


def jetson_problem(root: Path) -> str | None:
    """Return why no Jetson decodes through GStreamer; None where one does. ``root`` stands for /."""
    if not any((root / "dev" / name).exists() for name in JETSON_DECODERS):
        return "this is no Jetson"
    if opencv_problem() is None or has_element(JETSON_ELEMENT):
        return None
    if pygobject_problem() is None:
        return f"GStreamer has no {JETSON_ELEMENT}: sudo apt install nvidia-l4t-gstreamer"
    return f"{opencv_problem()}, and {pygobject_problem()}"
