"""What a Video4Linux device says of itself, asked through its ioctls (linux/videodev2.h), which disturbs nobody who streams."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Mode:
    """A FourCC with a size in pixels (0, 0: any) and its highest rate, frames a second (0: not said)."""

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


def describe(path: Path, ioctl: Ioctl = fcntl.ioctl) -> Described:
    """Ask a device. Raises OSError where it cannot be opened or is no Video4Linux device (ENOTTY)."""
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        driver, card, bus, _, all_nodes, node = _ask(ioctl, descriptor, QUERYCAP, CAPABILITY, *(b"",) * 3, 0, 0, 0)
        bits = node if all_nodes & PER_NODE else all_nodes
        kinds = [kind for bit, kind in BUFFERS.items() if bits & bit]
        modes = tuple(mode for kind in kinds for mode in _modes(ioctl, descriptor, kind))
        return Described(_text(driver), _text(card), _text(bus), bool(kinds), modes)
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
    """A list of the driver's, entry by entry; a driver without that list has an empty one."""
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
    """Four characters, as V4L2 packs them into a number."""
    return code.to_bytes(4, "little").decode("ascii", "replace").rstrip("\0 ")


def _text(field: bytes) -> str:
    return field.split(b"\0")[0].decode("utf-8", "replace")
