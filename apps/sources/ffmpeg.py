"""Streams that FFmpeg reads through PyAV: RTSP, HLS and whatever else a URL names, Motion JPEG, and pipes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import KEYFRAME_WAIT_S, Connection, Grabbed, SourceOptions
from edgevlm.apps.sources.hosts import HostProxy, proxy_for
from edgevlm.apps.sources.opencv import CONTAINERS, decode_picture, load_cv2
from edgevlm.errors import SourceError, SourceRefused, UserError
from edgevlm.packages import install
from edgevlm.runtime.preprocess import MOST_PIXELS

WRONG_PASSWORD = "wrong or no user and password (401); they stand in the address, before the host and an at sign"
LOW_LATENCY = {  # docs/guide/cameras.md has what they save
    "rtsp_transport": "tcp",
    "fflags": "nobuffer",
    "flags": "low_delay",
    "analyzeduration": "0",
    "probesize": "32",
}
LISTED = {  # what a stream of each scheme may open itself, of FFmpeg's protocols: no files
    "http": "http,httpproxy,https,tls,tcp,crypto",
    "https": "https,httpproxy,tls,tcp,crypto",
    "rtsp": "rtsp,rtp,srtp,udp,tcp,tls,http,https",
    "rtmp": "rtmp,rtmps,rtmpt,rtmpts,rtmpe,rtmpte,tcp,tls,http,https,ffrtmphttp,ffrtmpcrypt",
    "udp": "udp", "tcp": "tcp", "tls": "tls,tcp", "rtp": "rtp,udp", "srt": "srt,udp",
}  # fmt: skip
ALIKE = {"rtsps": "rtsp", "rtmps": "rtmp", "rtmpt": "rtmp", "rtmpts": "rtmp", "rtmpe": "rtmp", "rtmpte": "rtmp"}
NETWORK_FORMATS = f"{CONTAINERS},hls,rtsp,rtp"  # lists are those of HLS alone
PICTURES = (b"\xff\xd8", b"\x89PNG")  # as they begin
LARGEST, MORE = 16 << 20, 1 << 20  # bytes of a first picture; and beside four times the one before: more is not a picture


def load_av() -> Any:
    """Import PyAV, silent. Raises UserError where it is not installed."""
    try:
        import av
        import av.logging
    except ImportError:
        raise UserError(f"network streams and pipes need PyAV: {install('cpu')} (or pip install av)") from None
    av.logging.set_level(None)  # what FFmpeg prints on its own would name the address
    return av


class Feed:
    """Bytes as PyAV reads a file: those that have come, until a deadline and up to ``largest`` after :meth:`renew`.

    It ends there, and where reading fails; ``problem`` says why. Exceptions would be printed by PyAV.
    """

    def __init__(self, read: Callable[[int], bytes], largest: float = math.inf, timeout_s: float = math.inf) -> None:
        self._read, self.largest, self._timeout_s = read, largest, timeout_s
        self.problem: str | None = None
        self.renew()

    def renew(self) -> None:
        """Begin a picture: the deadline holds for all of it, however slowly its bytes arrive."""
        self._deadline, self._left = time.monotonic() + self._timeout_s, self.largest

    def read(self, count: int) -> bytes:
        late = time.monotonic() > self._deadline
        block = b""
        try:
            block = b"" if late or self._left <= 0 else self._read(count)
        except TimeoutError:
            late = True
        except (HTTPException, OSError, ValueError) as error:
            self.problem = getattr(error, "strerror", None) or type(error).__name__
        if late:
            self.problem = f"no picture for {self._timeout_s:g} s"
        elif self._left <= 0:
            self.problem = f"no picture within {self.largest / 2**20:g} MB"
        self._left -= len(block)
        return block


def open_feed(feed: Feed, kind: str) -> Any:
    """Open pictures of one of FFmpeg's formats, which opens nothing else and reads no more than it needs."""
    options = {"protocol_whitelist": "none", "probesize": "32", "analyzeduration": "0"}
    return load_av().open(
        feed, format=kind, options=options, stream_options=[{"max_pixels": str(MOST_PIXELS)}], buffer_size=4096
    )


class MultipartConnection(Connection):
    """Motion JPEG over HTTP. Each picture is decoded by itself, so its size and kind may change; there are no times."""

    def __init__(self, response: HTTPResponse, timeout_s: float) -> None:
        load_cv2(), load_av()  # raises now if one is not installed
        self._response, self._timeout_s = response, timeout_s
        self._feed = Feed(response.read1, LARGEST, timeout_s)
        self._packets = self._demux()
        self._data = b""

    def _demux(self) -> Iterator[Any]:
        with open_feed(self._feed, "mpjpeg") as container:
            yield from container.demux(video=0)

    def grab(self) -> Grabbed | None:
        self._feed.renew()
        try:
            packet = next(self._packets, None)
        except load_av().error.FFmpegError:
            packet, self.problem = None, "the stream is no Motion JPEG"
        if packet is None or not packet.size or self._feed.problem:
            self.problem = self._feed.problem or self.problem
            return None
        self._data = bytes(packet)
        self._feed.largest = min(LARGEST, MORE + 4 * packet.size)
        return Grabbed(corrupt=packet.is_corrupt or not self._data.startswith(PICTURES))

    def retrieve(self) -> NDArray[np.uint8] | None:
        return decode_picture(self._data)

    def close(self) -> None:
        self._packets.close()  # type: ignore[attr-defined]
        self._response.close()


class FfmpegConnection(Connection):
    """Decodes one video stream. FFmpeg's own timeouts end every call, opening as well as reading.

    A recording behind a URL is played at its own speed and comes to an end. ``response``: an open answer that is read instead
    of the URL, and nothing that it refers to. Raises SourceError, in words without the address.
    """

    def __init__(self, url: str, options: SourceOptions, response: HTTPResponse | None = None) -> None:
        self._av, self._response = load_av(), response
        self._container: Any = None
        timeout_s = max(options.open_timeout_s, options.read_timeout_s)
        self._proxy: HostProxy | None = proxy_for(url, timeout_s) if response is None else None
        try:
            self._container = self._open(url, options)
            if not self._container.streams.video:
                raise SourceRefused("there is no video in it")
            stream = self._container.streams.video[0]
            stream.codec_context.flags |= self._av.codec.context.Flags.low_delay
        except BaseException:
            self._release()
            raise
        self._recorded = not url.startswith("rtsp") and self._container.duration is not None
        self._origin: float | None = None  # of a recording's times
        self._frame: Any = None
        self._pictures = self._decode(stream)

    def grab(self) -> Grabbed | None:
        try:
            grabbed = next(self._pictures)
        except StopIteration:
            self.problem = self._refused
            self.finished = self._recorded and self.problem is None
            return None
        except self._av.error.FFmpegError as error:
            self.problem = self._refused or error.strerror
            return None
        if self._recorded and grabbed.stamp_s is not None:  # wait until it is due
            now = time.monotonic()
            self._origin = now - grabbed.stamp_s if self._origin is None else self._origin
            time.sleep(min(max(0.0, self._origin + grabbed.stamp_s - now), 1.0))
        return grabbed

    def retrieve(self) -> NDArray[np.uint8] | None:
        image: NDArray[np.uint8] = self._frame.to_ndarray(format="rgb24")
        return image

    def close(self) -> None:
        self._pictures.close()  # type: ignore[attr-defined]
        self._release()

    def _release(self) -> None:
        for each in (self._container, self._response, self._proxy):
            if each is not None:
                each.close()

    @property
    def _refused(self) -> str | None:
        return None if self._proxy is None else self._proxy.refused

    def _open(self, url: str, options: SourceOptions) -> Any:
        error, began = self._av.error, time.monotonic()
        scheme = url.partition("://")[0].lower()
        protocols = "none" if self._response is not None else LISTED.get(ALIKE.get(scheme, scheme))
        if protocols is None:
            raise SourceRefused(f"{scheme}:// is no stream that is read; give {', '.join(LISTED)}, or a file with --video")
        try:
            return self._av.open(
                url if self._response is None else Feed(self._response.read1),
                options={
                    "protocol_whitelist": protocols,
                    "format_whitelist": NETWORK_FORMATS,
                    **({"http_proxy": self._proxy.url} if self._proxy is not None else {}),
                    **(LOW_LATENCY if scheme.startswith("rtsp") else {}),
                },
                timeout=(options.open_timeout_s, options.read_timeout_s),
            )
        except error.HTTPUnauthorizedError:
            raise SourceRefused(WRONG_PASSWORD) from None
        except error.HTTPNotFoundError:
            raise SourceRefused("no such stream there (404); check the path of the address") from None
        except error.FFmpegError as failed:
            if time.monotonic() - began >= options.open_timeout_s:
                raise SourceError(f"no answer within {options.open_timeout_s:g} s (--open-timeout)") from None
            raise SourceError(self._refused or str(failed.strerror)) from None

    def _decode(self, stream: Any) -> Iterator[Grabbed]:
        """Yield pictures as they are decoded; one that cannot be is passed on as corrupt.

        Decoders give nothing before the first keyframe, which may be many seconds away: those packets are passed on too.
        """
        started, patience = False, time.monotonic() + KEYFRAME_WAIT_S
        for packet in self._container.demux(stream):
            started = started or packet.is_keyframe or time.monotonic() > patience
            if not started:
                yield Grabbed(decoded=False)
                continue
            try:
                frames = packet.decode()
            except self._av.error.InvalidDataError:
                if packet.size:  # the last packet, which says that the stream is over, has none
                    yield Grabbed(corrupt=True)
                continue
            for self._frame in frames:
                yield Grabbed(self._frame.time, self._frame.key_frame or self._frame.pict_type == 1, self._frame.is_corrupt)
