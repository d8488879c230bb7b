"""Motion JPEG from a pipe: JPEG files one after the other, whatever stands between them (multipart headers, for one)."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.bytestream import ByteStream
from edgevlm.apps.sources.opencv import decode_picture
from edgevlm.errors import SourceError

START = re.compile(rb"\xff\xd8\xff")
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # but for stuffing, filling and restarts, which stand inside a scan
LARGEST = 64 << 20  # bytes of one picture
BETWEEN = 1 << 20  # bytes from one picture to the next, at most
END = 0xD9


class MjpegDecoder:
    """Frames of a stream of JPEG pictures. It carries no times: ``fps`` is what it is taken for."""

    def __init__(self, stream: ByteStream, fps: float) -> None:
        self.fps = fps
        self._stream = stream
        self._picture = b""

    def advance(self) -> bool:
        """Read the next picture; False at the end. Raises SourceError for a stream that is damaged or cut short."""
        start = self._stream.find(START, limit=BETWEEN)
        if start < 0 and len(self._stream.peek(BETWEEN)) == BETWEEN:
            raise SourceError("stdin: no JPEG picture for a megabyte; the stream is damaged")
        if start < 0:
            return False
        self._stream.take(start)
        self._picture = self._stream.take(self._length())
        return True

    def image(self) -> NDArray[np.uint8] | None:
        """The picture that was read, uint8 RGB ``[H, W, 3]``; None where it is damaged."""
        return decode_picture(self._picture)

    def _length(self) -> int:
        """Of the picture that begins here. Walks from segment to segment: a thumbnail in one of them has an end of its own."""
        at = 2
        while (at := self._stream.find(MARKER, at, LARGEST)) >= 0:
            marker = self._stream.peek(4, at)
            if marker[1] == END:
                return at + 2
            at += 2 + int.from_bytes(marker[2:], "big")
        raise SourceError("stdin: ended in the middle of a picture; the stream was cut short or is damaged")
