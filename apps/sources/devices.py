"""The cameras of this machine: what /dev, /sys and Video4Linux say of them, and the connection to one."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgevlm.apps.sources.base import Grabbed, SourceOptions
from edgevlm.apps.sources.opencv import Capture, load_cv2
from edgevlm.errors import SourceError
from edgevlm.runtime.files import look

Ioctl = Callable[[int, int, bytearray], object]

QUERYCAP, ENUM_FMT, ENUM_FRAMESIZES, ENUM_FRAMEINTERVALS = 0x80685600, 0xC0405602, 0xC02C564A, 0xC034564B
CAPABILITY = struct.Struct("16s32s32sIII12x")  # driver, card, bus, version, capabilities, those of this node
FORMAT = struct.Struct("III32sI16x")  # index, type, flags, description, FourCC
FRAME_SIZE = struct.Struct("III6I8x")  # index, FourCC, type, then width and height, or least, greatest and step of each
FRAME_INTERVAL = struct.Struct("IIIIIII16x8x")  # index, FourCC, width, height, type, seconds as a fraction (a range's least)

CAPTURE, CAPTURE_PLANES, PER_NODE = 0x1, 0x1000, 0x80000000  # capability bits
BUFFERS = {CAPTURE: 1, CAPTURE_PLANES: 9}  # buffer type by capability
DISCRETE = 1  # type of a size that is no range
MOST = 64  # entries of any list that are read
ROOT = Path("/")
CSI_DRIVER = "tegra-video"  # of a Jetson's sensors: their pictures come through nvarguscamerasrc

Look = Callable[[Path], "str | None"]


@dataclass(frozen=True, slots=True)
class Mode:
    """A FourCC with a size in pixels (0, 0: any) and its highest rate, frames a second (0: unknown)."""

    fourcc: str
    width: int
    height: int
    fps: float

    def __str__(self) -> str:
        size = f" {self.width}x{self.height}" if self.width else ""
        return f"{self.fourcc}{size}" + (f" at {self.fps:g}" if self.fps else "")


@dataclass(frozen=True, slots=True)
class Described:
    """Driver, name and bus of a device; ``modes`` is empty where it captures no pictures (a node for metadata, an encoder)."""

    driver: str
    card: str
    bus: str
    captures: bool
    modes: tuple[Mode, ...]


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


def describe(path: Path, ioctl: Ioctl = fcntl.ioctl) -> Described:
    """Ask a device. Raises OSError where it cannot be opened or is no Video4Linux device (ENOTTY)."""
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        driver, card, bus, _, all_nodes, node = _ask(ioctl, descriptor, QUERYCAP, CAPABILITY, *(b"",) * 3, 0, 0, 0)
        bits = node if all_nodes & PER_NODE else all_nodes
        kinds = [kind for bit, kind in BUFFERS.items() if bits & bit]
        modes = tuple(mode for kind in kinds for mode in _modes(ioctl, descriptor, kind))
        driver, card, bus = (field.split(b"\0")[0].decode("utf-8", "replace") for field in (driver, card, bus))
        return Described(driver, card, bus, bool(kinds), modes)
    finally:
        os.close(descriptor)


def _modes(ioctl: Ioctl, descriptor: int, kind: int) -> Iterator[Mode]:
    for entry in _entries(ioctl, descriptor, ENUM_FMT, FORMAT, kind, 0, b"", 0):
        code = entry[4]
        sizes = list(_entries(ioctl, descriptor, ENUM_FRAMESIZES, FRAME_SIZE, code, *(0,) * 7))
        for width, height in [(size[3], size[4]) if size[2] == DISCRETE else (size[4], size[7]) for size in sizes] or [(0, 0)]:
            fields = (code, width, height, 0, 0, 0)
            intervals = [each[5:7] for each in _entries(ioctl, descriptor, ENUM_FRAMEINTERVALS, FRAME_INTERVAL, *fields)]
            rates = [denominator / numerator for numerator, denominator in intervals if numerator]
            yield Mode(fourcc(code), width, height, round(max(rates, default=0.0), 2))


def _entries(ioctl: Ioctl, descriptor: int, request: int, layout: struct.Struct, *fields: object) -> Iterator[tuple]:
    """Yield a list of the driver's, entry by entry; none from a driver without that list."""
    for index in range(MOST):
        try:
            yield _ask(ioctl, descriptor, request, layout, index, *fields)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTTY):
                return
            raise


def _ask(ioctl: Ioctl, descriptor: int, request: int, layout: struct.Struct, *fields: object) -> tuple:
    data = bytearray(layout.pack(*fields))
    ioctl(descriptor, request, data)
    return layout.unpack(data)


def fourcc(code: int) -> str:
    """Return the four characters that V4L2 packs into a number."""
    return code.to_bytes(4, "little").decode("ascii", "replace").rstrip("\0 ")


def devices(root: Path = ROOT) -> list[Device]:
    """List every /dev/videoN, in the order of N; ``root`` stands for / and may be another folder."""
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
    """Return name and bus of a node by /sys: usb, pci, or platform for what is soldered on."""
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
    if problem is not None:
        problem = _in_use(device, root) or problem
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
    """Name the program that holds the device open, as far as this user may see."""
    for process in (root / "proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            if any(os.readlink(descriptor) == str(device.path) for descriptor in (process / "fd").iterdir()):
                name = (process / "comm").read_text(errors="replace").strip()
                return f"is in use by {name} (process {process.name}); end that one"
        except OSError:
            continue
    return None


class UsbConnection(Capture):
    """A device open through OpenCV's V4L2 backend, with one buffer, so that what is read is new.

    ``target``: an index, /dev/videoN, or a name that stays, /dev/v4l/by-id/... Size, rate and pixel format are requests; the
    driver takes the nearest, which :attr:`mode` names.
    """

    def __init__(self, target: str, options: SourceOptions, root: Path = ROOT) -> None:
        path, cv2 = device_path(target, root), load_cv2()
        asked = []  # the pixel format first: which sizes and rates there are depends on it
        if options.pixel_format:
            asked += [cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*options.pixel_format.ljust(4))]
        if options.size:
            asked += [cv2.CAP_PROP_FRAME_WIDTH, options.size[0], cv2.CAP_PROP_FRAME_HEIGHT, options.size[1]]
        if options.camera_fps:
            asked += [cv2.CAP_PROP_FPS, round(options.camera_fps)]
        super().__init__(str(path), cv2.CAP_V4L2, [*asked, cv2.CAP_PROP_BUFFERSIZE, 1])
        if not self.is_open:
            problem = probe(Device(path, "", ""), root).problem
            raise SourceError(problem or "cannot be opened; edgevlm cameras lists what is there, and why one cannot be used")
        self.mode = self._mode(options)

    def grab(self) -> Grabbed | None:
        grabbed = super().grab()
        if grabbed is None:
            self.problem = "gives no more pictures; is it still plugged in?"
        return grabbed

    def _mode(self, options: SourceOptions) -> str:
        """Describe what the driver took, and what was asked for where that is something else."""
        width, height, rate = int(self.property("FRAME_WIDTH")), int(self.property("FRAME_HEIGHT")), self.property("FPS")
        code = fourcc(int(self.property("FOURCC")) & 0xFFFFFFFF)
        refused = []
        if options.size and options.size != (width, height):
            refused.append(f"{options.size[0]}x{options.size[1]}")
        if options.camera_fps and round(options.camera_fps) != round(rate):
            refused.append(f"{options.camera_fps:g} fps")
        if options.pixel_format and options.pixel_format != code:
            refused.append(options.pixel_format)
        return f"{width}x{height} at {rate:g} fps, {code}" + (f" (asked for {', '.join(refused)})" if refused else "")


def device_path(target: str, root: Path = ROOT) -> Path:
    """Return the node of an index or path. Raises SourceError, with the cameras there are, where there is none."""
    path = root / "dev" / f"video{target}" if target.isdigit() else Path(target)
    if look(path) != "nothing":
        return path
    present = ", ".join(str(device.path) for device in devices(root)) or "none"
    raise SourceError(
        f"there is no {path} (cameras here: {present}); connect one, or try --camera demo, --camera rtsp://..., or --video FILE"
    )
