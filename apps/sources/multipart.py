"""Motion JPEG over HTTP, as cameras send it: ``multipart/x-mixed-replace``, one JPEG a part."""

from __future__ import annotations

import time
from http.client import HTTPException, HTTPResponse

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import Connection, Grabbed
from edgevlm.apps.sources.capture import load_cv2

BLOCK = 1 << 16
LARGEST = 64 << 20  # bytes of one picture: more is not a picture


class MultipartConnection(Connection):
    """Each picture says its own size, so one of another resolution is nothing special; parts carry no time of the camera's."""

    def __init__(self, response: HTTPResponse, timeout_s: float) -> None:
        self._cv2 = load_cv2()
        self._response, self._timeout_s = response, timeout_s
        self._boundary = b"--" + (response.headers.get_boundary() or "").strip('"').removeprefix("--").encode("latin-1")
        self._ahead = bytearray()
        self._jpeg = b""

    def grab(self) -> Grabbed | None:
        self._deadline = time.monotonic() + self._timeout_s
        try:
            self._jpeg = self._part()
        except TimeoutError:
            self.problem = f"no picture for {self._timeout_s:g} s"
        except (EOFError, HTTPException, OSError, ValueError) as error:
            self.problem = str(error) if isinstance(error, ValueError) else None
        else:
            return Grabbed(corrupt=not self._jpeg.startswith(b"\xff\xd8"))
        return None

    def retrieve(self) -> NDArray[np.uint8] | None:
        image = self._cv2.imdecode(np.frombuffer(self._jpeg, np.uint8), self._cv2.IMREAD_COLOR)
        return None if image is None else np.asarray(self._cv2.cvtColor(image, self._cv2.COLOR_BGR2RGB))

    def close(self) -> None:
        self._response.close()

    def _part(self) -> bytes:
        """The next part that has a body; by its length where its header has one, else up to the next boundary."""
        self._take(self._find(self._boundary) + len(self._boundary))
        header = self._take(self._find(b"\r\n\r\n") + 4).decode("latin-1")
        for line in header.split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-length" and value.strip().isdigit():
                length = int(value)
                if length > LARGEST:
                    raise ValueError(f"a picture of {length} bytes")
                return self._take(length)
        return self._take(self._find(b"\r\n" + self._boundary))

    def _find(self, mark: bytes) -> int:
        """Where ``mark`` begins in what is ahead; reads until it is there."""
        start = 0
        while (found := self._ahead.find(mark, start)) < 0:
            start = max(0, len(self._ahead) - len(mark))
            if start > LARGEST:
                raise ValueError("the stream is no Motion JPEG")
            self._more()
        return found

    def _take(self, count: int) -> bytes:
        while len(self._ahead) < count:
            self._more()
        taken = bytes(self._ahead[:count])
        del self._ahead[:count]
        return taken

    def _more(self) -> None:
        """Read what has come. The deadline holds for the whole picture, however slowly its bytes trickle in."""
        if time.monotonic() > self._deadline:
            raise TimeoutError
        if not (block := self._response.read1(BLOCK)):
            raise EOFError
        self._ahead += block
