"""A machine with cameras, made of files and of answers to Video4Linux's questions."""

import errno
import os
import struct

REQUESTS = {"cap": 0x80685600, "format": 0xC0405602, "size": 0xC02C564A, "interval": 0xC034564B}
CAPTURE, META, PER_NODE = 0x1, 0x00800000, 0x80000000


def four(text):
    return int.from_bytes(text.ljust(4).encode(), "little")


class Camera:
    """What one node answers. ``modes``: {FourCC: {(width, height): [frames a second]}}; a driver's own error with ``fails``."""

    def __init__(self, card="HD Webcam", driver="uvcvideo", caps=CAPTURE, modes=None, fails=None, ranges=False):
        self.card, self.driver, self.caps, self.fails, self.ranges = card, driver, caps, fails, ranges
        self.modes = {"MJPG": {(1280, 720): [30, 15], (640, 480): [30]}, "YUYV": {(640, 480): [30]}} if modes is None else modes

    def answer(self, request, data):
        if self.fails is not None:
            raise OSError(self.fails, os.strerror(self.fails))
        if request == REQUESTS["cap"]:
            struct.pack_into(
                "16s32s32sIII", data, 0, self.driver.encode(), self.card.encode(), b"usb-1", 7, PER_NODE | 0xFF, self.caps
            )
            return
        index = struct.unpack_from("I", data)[0]
        try:
            if request == REQUESTS["format"]:
                assert struct.unpack_from("I", data, 4)[0] == 1
                struct.pack_into("I", data, 44, four(list(self.modes)[index]))
            elif request == REQUESTS["size"]:
                self.put_size(data, list(self.sizes(data))[index])
            else:
                width, height = struct.unpack_from("II", data, 8)
                rate = self.sizes(data)[width, height][index]
                struct.pack_into("III", data, 16, 1, 1000, int(rate * 1000))
        except (IndexError, KeyError):
            raise OSError(errno.EINVAL, "Invalid argument") from None

    def put_size(self, data, size):
        if self.ranges:
            struct.pack_into("7I", data, 8, 3, 16, size[0], 2, 16, size[1], 2)
        else:
            struct.pack_into("3I", data, 8, 1, *size)

    def sizes(self, data):
        return {four(code): sizes for code, sizes in self.modes.items()}[struct.unpack_from("I", data, 4)[0]]


class Machine:
    """A folder that stands for /. ``add`` plugs a camera in; ``ioctl`` takes the place of the kernel's."""

    def __init__(self, root):
        self.root = root
        self.cameras = {}
        (root / "dev").mkdir()

    def add(self, number, camera=None, *, bus="usb1/1-2", link=None):
        camera = camera or Camera()
        node = self.root / "dev" / f"video{number}"
        node.touch()
        self.cameras[str(node)] = camera
        entry = self.root / "sys" / "class" / "video4linux" / node.name
        place = self.root / "sys" / "devices" / bus / "1-2:1.0"
        place.mkdir(parents=True, exist_ok=True)
        entry.mkdir(parents=True)
        (entry / "name").write_text(camera.card + "\n")
        (entry / "device").symlink_to(place)
        if link:
            (self.root / "dev" / "v4l" / "by-id").mkdir(parents=True, exist_ok=True)
            (self.root / "dev" / "v4l" / "by-id" / link).symlink_to(f"../../video{number}")
        return node

    def hold(self, node, number, name):
        """A process that has the node open."""
        process = self.root / "proc" / str(number)
        (process / "fd").mkdir(parents=True)
        (process / "comm").write_text(name + "\n")
        (process / "fd" / "5").symlink_to(node)

    def ioctl(self, descriptor, request, data):
        self.cameras[os.readlink(f"/proc/self/fd/{descriptor}")].answer(request, data)
