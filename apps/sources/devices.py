"""The cameras of this machine: what /dev and /sys show, and why one cannot be used."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgevlm.apps.sources.v4l2 import Described, Ioctl, describe

ROOT = Path("/")
CSI_DRIVER = "tegra-video"  # of a Jetson's sensors: their pictures come through nvarguscamerasrc

Look = Callable[[Path], "str | None"]


@dataclass(frozen=True, slots=True)
class Device:
    """A Video4Linux node. ``links``: names of it that stay when it is plugged in elsewhere."""

    path: Path
    name: str
    bus: str
    links: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Probed:
    """A device that was asked. ``problem``: why no picture comes from it, one line; None where one does."""

    device: Device
    described: Described | None
    problem: str | None


def devices(root: Path = ROOT) -> list[Device]:
    """Every /dev/videoN, in the order of N; ``root`` stands for / and may be another folder."""
    found = [path for path in (root / "dev").glob("video*") if re.fullmatch(r"video\d+", path.name)]
    links: dict[Path, list[Path]] = {}
    for kind in ("by-id", "by-path"):
        for link in sorted((root / "dev" / "v4l" / kind).glob("*")):
            links.setdefault(link.resolve(), []).append(link)
    return [
        Device(path, *_system(root, path.name), tuple(links.get(path.resolve(), ())))
        for path in sorted(found, key=lambda path: int(path.name[5:]))
    ]


def _system(root: Path, node: str) -> tuple[str, str]:
    """Name and bus of a node by /sys: usb, or platform for what is soldered on."""
    entry = root / "sys" / "class" / "video4linux" / node
    try:
        name = (entry / "name").read_text(errors="replace").strip()
    except OSError:
        name = node
    place = str((entry / "device").resolve())
    return name, "usb" if "/usb" in place else "pci" if "/pci" in place else "platform"


def probe(device: Device, root: Path = ROOT, ioctl: Ioctl = fcntl.ioctl, see: Look | None = None) -> Probed:
    """Ask a device what it is, and look through it: ``see`` returns why it gives no picture, None when it gives one."""
    try:
        described = describe(device.path, ioctl)
    except OSError as error:
        return Probed(device, None, _reason(error, device, root))
    if not described.captures:
        return Probed(device, described, "captures no pictures (metadata, or an encoder or decoder of the platform)")
    problem = see(device.path) if see is not None and described.driver != CSI_DRIVER else None
    if problem is not None and (busy := _in_use(device, root)):
        problem = busy
    return Probed(device, described, problem)


def _reason(error: OSError, device: Device, root: Path) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "may not be opened: add yourself to its group (sudo usermod -aG video $USER) and log in again"
    if error.errno == errno.EBUSY:
        return _in_use(device, root) or "is in use by another program; end that one"
    if error.errno in (errno.ENODEV, errno.ENXIO):
        return "was unplugged, or its driver gave up; plug it in again (dmesg says more)"
    if error.errno in (errno.ENOTTY, errno.EINVAL):
        return "is no Video4Linux device"
    return f"cannot be opened ({error.strerror or error})"


def _in_use(device: Device, root: Path) -> str | None:
    """Which program holds the device open, as far as this user may see."""
    for number, name in _holders(device.path, root):
        return f"is in use by {name} (process {number}); end that one"
    return None


def _holders(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    for process in (root / "proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            if any(os.readlink(descriptor) == str(path) for descriptor in (process / "fd").iterdir()):
                yield int(process.name), (process / "comm").read_text(errors="replace").strip()
        except OSError:
            continue
