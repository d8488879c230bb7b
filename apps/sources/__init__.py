"""Sources of frames: edgevlm's own kinds, those of other packages, and classes in a user's file.

Each is an entry point of the group ``edgevlm.sources``: called with what to open and :class:`SourceOptions`, it returns a
:class:`Source`. A package's kind ``name`` is opened by ``--camera name`` or ``name://rest``, a file's by ``./file.py:Class``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources.base import Connection, Frame, Source, SourceOptions, State
from edgevlm.apps.sources.gstreamer import is_pipeline
from edgevlm.errors import SourceError
from edgevlm.runtime.files import look
from edgevlm.runtime.plugins import is_file, load_class, names, split_options

__all__ = [
    "Frame", "Source", "SourceOptions", "State", "check_source", "comes_to_an_end", "kind_of", "open_source",
]  # fmt: skip

OWN = ("csi", "demo", "folder", "gstreamer", "network", "stdin", "usb", "video")
RECORDED = ("video", "folder", "stdin")  # those of them that come to an end


def open_source(camera: str | None = None, video: str | None = None, options: SourceOptions | None = None) -> Source:
    """Open ``--camera`` or ``--video``; the demo when neither is given. Raises SourceError, one line.

    A recorded source waits for its reader unless ``options.realtime``; a live one never does.
    """
    options = options or SourceOptions()
    check_source(camera, video)
    kind, target = kind_of(camera, video)
    source: Source = load_class("sources", kind)(target, options)
    if source.live:
        return source
    if options.rule == "drop-oldest" and not options.realtime:
        source.close()
        raise SourceError("--rule drop-oldest: a recorded source waits for its reader; add --realtime")
    from edgevlm.apps.sources.buffer import ReadAhead

    if options.realtime:
        return ReadAhead(source, paced=True, speed=options.speed, rule=options.rule or "drop-oldest")
    return ReadAhead(source)


def check_source(camera: str | None, video: str | None) -> None:
    """Raise SourceError if it is invalid, as far as this shows without opening it."""
    if camera is not None and video is not None:
        raise SourceError("give --camera or --video, not both")
    kind, target = kind_of(camera, video)
    if kind == "video":
        from edgevlm.apps.sources.video import check_readable

        check_readable(Path(target))


def open_demo(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.demo import DemoSource

    return DemoSource(options.fps, options.seed)


def open_video(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.video import VideoSource

    return VideoSource(target, options.fps)


def open_folder(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.folder import FolderSource

    return FolderSource(target, options.fps, options.camera_fps)


def open_stdin(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.stdin import StdinSource

    return StdinSource(options.fps, options.camera_fps)


def open_usb(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.devices import UsbConnection

    return _live(target, lambda: UsbConnection(target, options), options)


def open_csi(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.gstreamer import connect, csi_pipeline

    pipeline = csi_pipeline(target, options)
    return _live(target, lambda: connect(pipeline, options), options)


def open_gstreamer(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.gstreamer import connect

    return _live(target, lambda: connect(target, options), options)


def open_network(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.network import connect

    return _live(target, lambda: connect(target, options), options)


def _live(target: str, connect: Callable[[], Connection], options: SourceOptions) -> Source:
    from edgevlm.apps.sources.live import LiveSource

    return LiveSource(mask_credentials(target), connect, options)


def kind_of(camera: str | None, video: str | None) -> tuple[str, str]:
    """Return the kind (a name of the group ``edgevlm.sources`` or ``file.py:Class``) and what to open; the demo by default.

    Raises SourceError if it is invalid.
    """
    if video is not None:
        if video == "-":
            return "stdin", video
        return ("folder" if look(video) == "folder" else "video"), video
    if camera in (None, "demo"):
        return "demo", "demo"
    assert camera is not None
    if camera == "-":
        return "stdin", camera
    if is_file(camera):
        return split_options(camera)
    if (name := camera.partition("://")[0]) in names("sources") and name not in OWN:
        return name, camera.partition("://")[2]
    if camera.isdigit() or camera.startswith("/dev/"):
        return "usb", camera
    if is_pipeline(camera):
        return "gstreamer", camera
    if camera.startswith("csi://"):
        return "csi", camera
    if "://" in camera:
        return "network", camera
    if (found := look(camera)) != "nothing":
        return ("folder" if found == "folder" else "video"), camera
    raise SourceError(
        f"--camera {mask_credentials(camera)}: there is nothing there; give demo, an index like 0, /dev/videoN, csi://0, a "
        "URL, a GStreamer pipeline with ' ! ' in it, - for stdin, a video file, or a folder of pictures"
    )


def comes_to_an_end(camera: str | None, video: str | None) -> bool:
    """Return whether a source is a recording; the demo and cameras never end."""
    kind, _ = kind_of(camera, video)
    return kind in RECORDED if kind in OWN else not getattr(load_class("sources", kind), "live", False)
