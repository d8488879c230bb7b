"""Cameras that go wrong in some forty ways, on loopback: after each fault the camera is well again, and must be seen again.

``python tests/faults/cameras.py 1000 --cameras 10`` plays so many faults, drawn from a seed, to so many sources at once, and
prints what came of them. A source that shows no picture taken after the fault within ``PATIENCE_S`` counts as one that needs a
restart.
"""

import argparse
import gzip
import hashlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import psutil

from edgevlm.apps.hosts import AllowedHosts
from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.apps.sources.opencv import load_cv2

cv2 = load_cv2()

PATIENCE_S = 60.0
LINGER_S = 0.6  # how long a fault that hangs does: longer than any timeout of OPTIONS
OPTIONS = SourceOptions(fps=50, open_timeout_s=0.3, read_timeout_s=0.3, stall_timeout_s=0.15, backoff_s=(0.02, 0.08), wait=True)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=frame\r\n\r\n"
SIZES = ((48, 64), (90, 120))


def picture(size, kind=".jpg"):
    """Noise, as faults show it."""
    return cv2.imencode(kind, np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8))[1].tobytes()


def shade(faults):
    """The even grey of a camera that is well after so many faults."""
    return 8 + 16 * (faults % 16)


WELL = [cv2.imencode(".jpg", np.full((*SIZES[0], 3), shade(faults), np.uint8))[1].tobytes() for faults in range(16)]
GOOD = picture(SIZES[0])
CLAIMED = GOOD.replace(b"\0\x30\0\x40", struct.pack(">HH", 30_000, 30_000), 1)  # height and width of the frame header


def part(body, headers=b"", length=None):
    length = len(body) if length is None else length
    return b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n%s\r\n%s\r\n" % (length, headers, body)


def status(line, *headers, body=b""):
    return b"".join([b"HTTP/1.1 ", line, b"\r\n", *(header + b"\r\n" for header in headers), b"\r\n", body])


def of_type(kind, body=b""):
    return status(b"200 OK", b"Content-Type: " + kind, body=body)


# What a connection is answered with. None after the bytes: it hangs; an int: they are sent again and again, so many bytes.
ANSWERS = {
    "closed": (b"", 0), "silent": (b"", None), "half a status": (b"HTTP/1.1 20", None), "half headers": (OK[:40], None),
    "endless headers": (b"HTTP/1.1 200 OK\r\n" + b"X-More: 1\r\n" * 500, 20_000_000),
    "a long header": (b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1_000_000, 0), "noise": (bytes(range(256)) * 40, 0),
    "404": (status(b"404 Not Found"), 0), "500": (status(b"500 Broken"), 0), "503": (status(b"503 Busy", b"Retry-After: 9"), 0),
    "a login": (status(b"401 Unauthorized", b'WWW-Authenticate: Basic realm="c"'), 0),
    "a strange login": (status(b"401 Unauthorized", b"WWW-Authenticate: Digest nonce=" + b"9" * 9_000), 0),
    "redirect to itself": (status(b"302 Found", b"Location: /live"), 0),
    "redirect to a file": (status(b"302 Found", b"Location: file:///etc/passwd"), 0),
    "redirect to nobody": (status(b"302 Found", b"Location: http://127.0.0.1:1/"), 0),
    "redirect to hung TLS": (status(b"302 Found", b"Location: https://127.0.0.1:HUNG/"), 0),
    "redirect nowhere": (status(b"302 Found"), 0), "a login that expires": (b"", 0),
    "a page": (of_type(b"text/html", b"<html>log in</html>"), 0),
    "no boundary": (of_type(b"multipart/x-mixed-replace", part(GOOD)), 0), "an empty body": (OK, 0),
    "a negative length": (status(b"200 OK", b"Content-Type: image/jpeg", b"Content-Length: -9", body=GOOD), 0),
    "a huge length": (status(b"200 OK", b"Content-Type: image/jpeg", b"Content-Length: 999999999999", body=GOOD), None),
    "a gzip bomb": (of_type(b"image/jpeg\r\nContent-Encoding: gzip", gzip.compress(bytes(100_000_000))), 0),
    "wrong chunks": (of_type(b"image/jpeg\r\nTransfer-Encoding: chunked", b"zz\r\n" + GOOD), 0),
    "a TLS alert": (b"\x15\x03\x01\0\x02\x02\x28", 0), "an old greeting": (b"ICY 200 OK\r\n\r\n" + GOOD, 0),
}  # fmt: skip
# What comes between good pictures. None after the bytes: then it hangs; an int as above; "go on": good pictures follow.
BETWEEN = {
    "half a picture, closed": (part(GOOD)[:300], 0), "half a picture, hung": (part(GOOD)[:300], None),
    "noise between pictures": (bytes(range(256)) * 8, "go on"), "zeros for a picture": (part(bytes(900)), "go on"),
    "another boundary": (part(GOOD).replace(b"--frame", b"--other"), "go on"),
    "an endless part": (b"--frame\r\nContent-Type: image/jpeg\r\n\r\n" + bytes(1 << 16), 40_000_000),
    "a part of a terabyte": (part(GOOD, length=10**12), None), "a part of less than nothing": (part(GOOD, length=-5), "go on"),
    "another size": (part(picture(SIZES[1])) * 3, "go on"), "a pixel": (part(picture((1, 1))), "go on"),
    "a cut picture": (part(GOOD[: len(GOOD) // 2]), "go on"), "a picture said to be gigantic": (part(CLAIMED), "go on"),
    "another format": (part(picture(SIZES[0], ".png")), "go on"), "a burst": (part(GOOD) * 300, "go on"),
    "a clock that jumps": (b"".join(part(GOOD, b"X-Timestamp: %s\r\n" % at) for at in (b"9e99", b"-5", b"nan")), "go on"),
    "a zipped part": (part(gzip.compress(GOOD), b"Content-Encoding: gzip\r\n"), "go on"),
    "the end said": (b"--frame--\r\n", 0), "reset": (None, 0),
}  # fmt: skip
KINDS = [*ANSWERS, *BETWEEN]
BY_FFMPEG = [kind for kind, (answer, _) in ANSWERS.items() if b"Type: image/jpeg" in answer]  # which asks once more
REALM = b'Digest realm="c", nonce="%d"'


def login(nonce):
    """The answer that RFC 2069 asks for, of user and password in the address."""
    one, two = (hashlib.md5(text).hexdigest() for text in (b"u:c:secret", b"GET:/live"))
    return hashlib.md5(f"{one}:{nonce}:{two}".encode()).hexdigest().encode()


class FaultyCamera:
    """An MJPEG camera whose next connection, or next picture, goes wrong as :meth:`fail` says; otherwise it is well."""

    def __init__(self):
        self._listening, self._hung = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
        self.url = f"http://u:secret@127.0.0.1:{self._listening.getsockname()[1]}/live"
        self.kind, self.met, self._again, self._closing = None, 0, 0, False
        self._nonce = 0  # of its logins, each good for one connection; 0: it wants none
        threading.Thread(target=self._accept, daemon=True).start()

    def fail(self, kind):
        self.kind, self._again = kind, kind in BY_FFMPEG

    def close(self):
        self._closing = True
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()
        self._hung.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self._listening.accept()[:1], daemon=True).start()

    def _serve(self, connection):
        with suppress(OSError), connection:
            asked = connection.recv(4096)
            if self.kind in ANSWERS:
                return self._play(connection, ANSWERS[self.kind])
            if self._nonce and login(self._nonce) not in asked:
                self._nonce += 1
                return connection.sendall(status(b"401 Unauthorized", b"WWW-Authenticate: " + REALM % self._nonce))
            self._nonce = 0
            connection.sendall(OK)
            while not self._closing and self.kind not in ANSWERS:
                if self.kind and not self._play(connection, BETWEEN[self.kind]):
                    return None
                connection.sendall(part(WELL[self.met % 16]))
                time.sleep(0.01)
        return None

    def _play(self, connection, fault):
        """Whether good pictures follow."""
        what, then = fault
        if self._again:
            self._again = False
        else:
            self._nonce = 7 * (self.kind == "a login that expires")
            self.kind, self.met = None, self.met + 1
        if what is None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        what = what.replace(b"HUNG", b"%d" % self._hung.getsockname()[1])
        connection.settimeout(5)
        connection.sendall(what)
        for _ in range(then // len(what) if isinstance(then, int) and what else 0):
            connection.sendall(what)
        if then is None:
            time.sleep(LINGER_S)
        return then == "go on"


class Viewer:
    """Reads a source in a thread."""

    def __init__(self, camera, hosts):
        self.source = open_source(camera.url, None, replace(OPTIONS, hosts=hosts))
        self.shades, self.backwards, self._last_s = Counter(), 0, -1.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def alive(self):
        return self._thread.is_alive()

    def _read(self):
        while (frame := self.source.read()) is not None:
            self.backwards += frame.time_s <= self._last_s
            self._last_s = frame.time_s
            if np.ptp(frame.image) < 8:
                self.shades[round((float(frame.image.mean()) - 8) / 16)] += 1

    def sees(self, faults):
        """Whether three pictures come that were taken after so many faults."""
        wanted, deadline = self.shades[faults % 16] + 3, time.monotonic() + PATIENCE_S
        while self.shades[faults % 16] < wanted and time.monotonic() < deadline and self.alive:
            time.sleep(0.005)
        return self.shades[faults % 16] >= wanted

    def close(self):
        self.source.close()
        self._thread.join(30)
        return not self.alive


def play(kinds, found, hosts=None):
    """One camera and one source, through these faults; ``hosts`` as clients of a server are bound to them."""
    camera = FaultyCamera()
    viewer = Viewer(camera, hosts)
    try:
        assert viewer.sees(0)
        for kind in kinds:
            met = camera.met
            camera.fail(kind)
            deadline = time.monotonic() + PATIENCE_S
            while camera.met == met and time.monotonic() < deadline and viewer.alive:
                time.sleep(0.002)
            found["faults"] += 1
            found["met"] += camera.met > met
            found["secrets"] += "secret" in (viewer.source.problem or "")
            if not viewer.sees(camera.met):
                found["needed a restart"] += 1
                found[f"needed a restart: {kind}: {viewer.source.state.value}, {viewer.source.problem}"] += 1
                viewer.close()
                viewer = Viewer(camera, hosts)
        found["times backwards"] += viewer.backwards
        found["reconnects"] += viewer.source.reconnects
    finally:
        found["did not close"] += not viewer.close()
        camera.close()


def run(count, cameras=1, seed=0):
    """Play ``count`` faults in all, every kind in turn before any comes again; returns what was counted."""
    drawn = random.Random(seed)
    kinds = [kind for _ in range(-(-count // len(KINDS))) for kind in drawn.sample(KINDS, len(KINDS))][:count]
    found = [Counter() for _ in range(cameras)]
    bound = [None, AllowedHosts(["127.0.0.1"])]  # every second one, so that FFmpeg reads what was opened for it
    threads = [threading.Thread(target=play, args=(kinds[at::cameras], of, bound[at % 2])) for at, of in enumerate(found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(found, Counter())
    names = ("faults", "met", "needed a restart", "reconnects", "times backwards", "secrets", "did not close")
    return {name: total[name] for name in [*names, *sorted(total.keys() - set(names))]}


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("faults", type=int)
    options.add_argument("--cameras", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    run(2 * len(KINDS), 2)  # so that what is loaded once is there
    process, began = psutil.Process(), time.monotonic()
    before, descriptors, threads = process.memory_info().rss, process.num_fds(), threading.active_count()
    for name, number in run(given.faults, given.cameras, given.seed).items():
        print(f"{name}: {number:,}")
    print(f"{len(KINDS)} kinds, {time.monotonic() - began:.0f} s")
    time.sleep(2)  # the last connections end
    grown = (process.memory_info().rss - before) / 1e6, process.num_fds() - descriptors, threading.active_count() - threads
    print("left: {:.0f} MB, {} descriptors, {} threads".format(*grown))
