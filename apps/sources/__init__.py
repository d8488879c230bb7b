"""The registry of sources: one file and one line each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources.base import Frame, Source, SourceOptions, State
from edgevlm.apps.sources.kinds import RECORDED, kind_of
from edgevlm.errors import SourceError

__all__ = [
    "RECORDED", "Frame", "Source", "SourceOptions", "State", "check_source", "kind_of", "open_source",
]  # fmt: skip


def open_source(camera: str | None = None, video: str | None = None, options: SourceOptions | None = None) -> Source:
    """Open ``--camera`` or ``--video``; the demo when neither is given. Raises SourceError, one line.

    A recorded source waits for its reader unless ``options.realtime``; a live one never does.
    """
    options = options or SourceOptions()
    check_source(camera, video)
    kind, target = kind_of(camera, video)
    return _played(SOURCES[kind](str(target), options), options)


def check_source(camera: str | None, video: str | None) -> None:
    """Raise SourceError for what is none, as far as that can be told without opening anything that has a clock."""
    if camera is not None and video is not None:
        raise SourceError("give --camera or --video, not both")
    kind, target = kind_of(camera, video)
    if kind == "video":
        from edgevlm.apps.sources.video import check_readable

        check_readable(Path(target))


def _played(source: Source, options: SourceOptions) -> Source:
    """A recorded source one frame ahead of its reader, or at its own speed, where that is asked for."""
    from edgevlm.apps.sources.buffer import ReadAhead

    if source.live:
        return source
    if options.realtime:
        return ReadAhead(source, paced=True, speed=options.speed, rule=options.rule or "drop-oldest")
    if options.rule == "drop-oldest":
        source.close()
        raise SourceError("--rule drop-oldest: a recorded source waits for its reader; add --realtime")
    return ReadAhead(source)


def _demo(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.demo import DemoSource

    return DemoSource(options.fps, options.seed)


def _video(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.video import VideoSource

    return VideoSource(target, options.fps, options.decode)


def _folder(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.folder import FolderSource

    return FolderSource(target, options.fps, options.camera_fps)


def _stdin(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.stdin import StdinSource

    return StdinSource(options.fps, options.camera_fps)


def _usb(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.live import LiveSource
    from edgevlm.apps.sources.usb import UsbConnection

    return LiveSource(target, lambda: UsbConnection(target, options), options)


def _csi(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.gstreamer import csi_pipeline

    return _gstreamer(csi_pipeline(target, options), options, target)


def _gstreamer(target: str, options: SourceOptions, name: str | None = None) -> Source:
    from edgevlm.apps.sources.gstreamer import connect
    from edgevlm.apps.sources.live import LiveSource

    return LiveSource(name or mask_credentials(target), lambda: connect(target, options), options)


def _network(target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources.network import open_network

    return open_network(target, options)


SOURCES: dict[str, Callable[[str, SourceOptions], Source]] = {
    "demo": _demo,
    "video": _video,
    "folder": _folder,
    "stdin": _stdin,
    "usb": _usb,
    "csi": _csi,
    "gstreamer": _gstreamer,
    "network": _network,
}
