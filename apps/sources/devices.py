"""Find this machine's cameras in /dev and /sys, and connect to a camera."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgevlm.apps.sources.base import Grabbed, SourceOptions
from edgevlm.apps.sources.opencv import Capture, load_cv2
from edgevlm.errors import SourceError
from edgevlm.runtime.files import look

ROOT = Path("/")
REASONS = {
    errno.EACCES: "permission denied; add yourself to its group (sudo usermod -aG video $USER) and log in again",
    errno.EBUSY: "is in use by another program; stop that program",
    errno.ENODEV: "was unplugged, or its driver failed; plug it in again (see dmesg for details)",
}


@dataclass(frozen=True, slots=True)
class Device:
    """A Video4Linux device. ``links``: the device's names under /dev/v4l, which stay the same after a restart."""

    path: Path
    name: str
    bus: str
    links: tuple[Path, ...] = ()

    @property
    def is_sensor(self) -> bool:
        """Return whether this is a Jetson's CSI sensor, whose pictures come through GStreamer."""
        return self.name.startswith("vi-output")


def devices(root: Path = ROOT) -> list[Device]:
    """List this machine's /dev/videoN devices, ordered by N."""
    links: dict[Path, list[Path]] = {}
    for link in sorted((root / "dev" / "v4l").glob("by-*/*")):
        links.setdefault(link.resolve(), []).append(link)
    found = []
    for path in (root / "dev").glob("video*"):
        if not re.fullmatch(r"video\d+", path.name):
            continue
        entry = root / "sys" / "class" / "video4linux" / path.name
        try:
            name = (entry / "name").read_text(errors="replace").strip()
        except OSError:
            name = path.name
        place = str((entry / "device").resolve())
        bus = "usb" if "/usb" in place else "pci" if "/pci" in place else "platform"
        found.append(Device(path, name, bus, tuple(links.get(path.resolve(), ()))))
    return sorted(found, key=lambda device: int(device.path.name[5:]))


def problem_of(path: Path, root: Path = ROOT) -> str | None:
    """Return the reason why a device cannot be opened or gives no pictures, or None if Linux gives no reason."""
    for process in (root / "proc").glob("[0-9]*"):
        try:
            if process.name != str(os.getpid()) and any(os.readlink(each) == str(path) for each in (process / "fd").iterdir()):
                return f"is in use by {(process / 'comm').read_text().strip()} (process {process.name}); stop that process"
        except OSError:
            continue
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    except OSError as error:
        return REASONS.get(error.errno or 0) or f"cannot be opened ({error.strerror})"
    return None


class UsbConnection(Capture):
    """A connection to a USB camera through OpenCV's V4L2 backend. A single buffer is used, so that frames are never old.

    ``target`` (an index, /dev/videoN, or a name such as /dev/v4l/by-id/..) is used if none of ``links`` exists. The driver
    chooses the mode nearest to the requested size, rate and pixel format. :attr:`mode` describes the choice.
    """

    repeats = True

    def __init__(self, target: str, options: SourceOptions, root: Path = ROOT, links: Sequence[Path] = ()) -> None:
        path, cv2 = next((link for link in links if look(link) != "nothing"), None) or device_path(target, root), load_cv2()
        self._node = path.resolve()
        asked = []  # set the pixel format first, because the possible sizes and rates depend on it
        if options.pixel_format:
            asked += [cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*options.pixel_format.ljust(4))]
        if options.size:
            asked += [cv2.CAP_PROP_FRAME_WIDTH, options.size[0], cv2.CAP_PROP_FRAME_HEIGHT, options.size[1]]
        if options.camera_fps:
            asked += [cv2.CAP_PROP_FPS, round(options.camera_fps)]
        super().__init__(str(path), cv2.CAP_V4L2, [*asked, cv2.CAP_PROP_BUFFERSIZE, 1])
        if not self.is_open:
            raise SourceError(problem_of(path, root) or "captures no pictures (a metadata node or a platform codec)")
        width, height, code = (int(self.property(name)) for name in ("FRAME_WIDTH", "FRAME_HEIGHT", "FOURCC"))
        name = (code & 0xFFFFFFFF).to_bytes(4, "little").decode("ascii", "replace").rstrip("\0 ")
        self.mode = f"{width}x{height} at {self.property('FPS'):g} fps, {name}"

    def grab(self) -> Grabbed | None:
        grabbed = super().grab() if self._node.exists() else None  # some drivers repeat the last picture of a lost camera
        if grabbed is None:
            self.problem = "stopped sending pictures; check that it is plugged in"
        return grabbed


def lasting_links(target: str, root: Path = ROOT) -> list[Path]:
    """Return the camera's links that name its USB port, so that they stay valid when the camera is plugged in again."""
    node = (root / "dev" / f"video{target}" if target.isdigit() else Path(target)).resolve()
    return [
        link for device in devices(root) if device.path.resolve() == node for link in device.links if "by-path" in link.parts
    ]


def device_path(target: str, root: Path = ROOT) -> Path:
    """Return the device's path. ``target``: the device's index or path.

    If the device does not exist, raises a SourceError that lists the cameras.
    """
    path = root / "dev" / f"video{target}" if target.isdigit() else Path(target)
    if look(path) == "nothing":
        present = ", ".join(str(device.path) for device in devices(root)) or "none"
        raise SourceError(
            f"{path} not found (available cameras: {present}); connect one, or give --camera demo, a URL, or --video"
        )
    return path
