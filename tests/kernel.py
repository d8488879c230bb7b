"""A machine with cameras, made of files."""

import errno
import os


class Machine:
    """A folder that stands for /. ``add`` plugs a camera in; ``fails``: what opening it raises."""

    def __init__(self, root, monkeypatch):
        self.root, self.fails = root, {}
        (root / "dev").mkdir()
        plain = os.open

        def opened(path, *arguments, **options):
            if code := self.fails.get(str(path)):
                raise OSError(code, os.strerror(code))
            return plain(path, *arguments, **options)

        monkeypatch.setattr(os, "open", opened)

    def add(self, number, name="HD Webcam", *, bus="usb1/1-2", link=None, fails=None):
        node = self.root / "dev" / f"video{number}"
        node.touch()
        self.fails[str(node)] = fails
        entry = self.root / "sys" / "class" / "video4linux" / node.name
        place = self.root / "sys" / "devices" / bus / "1-2:1.0"
        place.mkdir(parents=True, exist_ok=True)
        entry.mkdir(parents=True)
        (entry / "name").write_text(name + "\n")
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


DENIED, BUSY, GONE = errno.EACCES, errno.EBUSY, errno.ENODEV
