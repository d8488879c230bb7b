"""Open built-in sources of frames, and sources from installed packages and users' files.

A package adds a source with an entry point in the group ``edgevlm.sources``. The entry point names a generator function, or a
:class:`Source` class that takes the target and :class:`SourceOptions`. ``--camera name`` or ``name://rest`` opens a package's
source. ``./file.py:Name[:rest]`` opens a source that a file defines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources.base import Connection, Frame, Source, SourceOptions, State
from edgevlm.apps.sources.gstreamer import is_pipeline
from edgevlm.apps.sources.plugin import open_plugin
from edgevlm.errors import SourceError
from edgevlm.runtime.files import look
from edgevlm.runtime.plugins import is_file, load_class, names, split_options

__all__ = [
    "Frame", "Source", "SourceOptions", "State", "check_source", "comes_to_an_end", "kind_of", "open_source",
]  # fmt: skip

RECORDED = ("video", "folder", "stdin")  # kinds of recording, which end
OWN = (*RECORDED, "csi", "demo", "gstreamer", "network", "usb")


def open_source(camera: str | None = None, video: str | None = None, options: SourceOptions | None = None) -> Source:
    """Open ``--camera`` or ``--video``, or the demo if neither is given. Raises SourceError with a one-line message.

    A recorded source waits for its reader unless ``options.realtime`` is set. A live source never waits.
    """
    from edgevlm.apps.sources.live import ReadAhead

    options = options or SourceOptions()
    kind, target = check_source(camera, video)
    source = _open(kind, target, options) if kind in OWN else open_plugin(kind, target, options)
    if source.live:
        return source
    if options.rule == "drop-oldest" and not options.realtime:
        source.close()
        raise SourceError("--rule drop-oldest: not supported for recordings without --realtime; add --realtime")
    if options.realtime:
        return ReadAhead(source, paced=True, speed=options.speed, rule=options.rule or "drop-oldest")
    return ReadAhead(source)


def check_source(camera: str | None, video: str | None) -> tuple[str, str]:
    """Return a source's kind and target. Raises SourceError for problems that can be found without opening the source."""
    if camera is not None and video is not None:
        raise SourceError("give --camera or --video, not both")
    kind, target = kind_of(camera, video)
    if kind == "video":
        from edgevlm.apps.sources.recordings import check_readable

        check_readable(Path(target))
    return kind, target


def _open(kind: str, target: str, options: SourceOptions) -> Source:
    from edgevlm.apps.sources import devices, gstreamer, live, network, recordings

    if kind == "video":
        return recordings.VideoSource(target, options.fps)
    if kind == "folder":
        return recordings.FolderSource(target, options.fps, options.camera_fps)
    if kind == "stdin":
        return recordings.StdinSource(options.fps, options.camera_fps)
    if kind == "demo":
        from edgevlm.apps.sources.demo import DemoSource

        return DemoSource(options.fps, options.seed)
    opened: dict[str, Callable[[str, SourceOptions], Connection]] = {"network": network.connect}
    if kind == "usb":
        opened["usb"] = partial(devices.UsbConnection, links=devices.lasting_links(target))
    what = gstreamer.csi_pipeline(target, options) if kind == "csi" else target
    return live.LiveSource(mask_credentials(target), partial(opened.get(kind, gstreamer.GstPipeline), what, options), options)


def kind_of(camera: str | None, video: str | None) -> tuple[str, str]:
    """Return a source's kind and target. The kind is in :data:`OWN`, or is a package's name or ``file.py:Class``.

    Raises SourceError for an invalid source.
    """
    given = video if video is not None else "demo" if camera is None else camera
    if given == "-":
        return "stdin", given
    if video is None:
        if given == "demo":
            return "demo", given
        if is_file(given):
            return split_options(given)
        scheme, found, rest = given.partition("://")
        if scheme not in OWN and scheme in names("sources"):
            return scheme, rest
        if given.isdigit() or given.startswith("/dev/"):
            return "usb", given
        if is_pipeline(given):
            return "gstreamer", given
        if found:
            return "csi" if scheme == "csi" else "network", given
    kind = look(given)
    if kind == "nothing" and video is None:
        _, named, source = given.partition("=")
        if named and (source == "demo" or "://" in source or look(source) != "nothing"):
            camera = mask_credentials(source)
            raise SourceError(
                f"--camera {mask_credentials(given)}: only edgevlm serve supports NAME=SOURCE; use --camera {camera}"
            )
        raise SourceError(
            f"--camera {mask_credentials(given)}: not found; give demo, an index like 0, /dev/videoN, csi://0, a "
            "URL, a GStreamer pipeline with ' ! ' in it, - for stdin, a video file, a folder of pictures, or ./file.py:Name"
            + "".join(f", {name}://" for name in names("sources"))
        )
    return ("folder" if kind == "folder" else "video"), given


def comes_to_an_end(camera: str | None, video: str | None) -> bool:
    """Return whether a source is a recording. The demo and cameras never end."""
    kind, _ = kind_of(camera, video)
    return kind in RECORDED if kind in OWN else not getattr(load_class("sources", kind), "live", False)
