"""Which kind of source a ``--camera`` or ``--video`` names."""

from __future__ import annotations

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.sources.gstreamer import is_pipeline
from edgevlm.errors import SourceError
from edgevlm.runtime.paths import look

RECORDED = ("video", "folder", "stdin")  # kinds that come to an end


def kind_of(camera: str | None, video: str | None) -> tuple[str, str]:
    """The kind, a name in SOURCES, and what to open; the demo where neither is given. Raises SourceError for what is none."""
    if video is not None:
        if video == "-":
            return "stdin", video
        return ("folder" if look(video) == "folder" else "video"), video
    if camera in (None, "demo"):
        return "demo", "demo"
    assert camera is not None
    if camera == "-":
        return "stdin", camera
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
        "URL, a GStreamer pipeline with ' ! ' in it, - for stdin, or a folder of pictures; for a file use --video"
    )
