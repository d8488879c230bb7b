"""Network streams through FFmpeg (PyAV): RTSP, RTSPS, HLS, and whatever else a URL names."""

from __future__ import annotations

import time
from collections.abc import Generator
from http.client import HTTPResponse
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.base import KEYFRAME_WAIT_S, Connection, Grabbed, SourceOptions
from edgevlm.apps.sources.hosts import AllowedHosts
from edgevlm.apps.sources.opencv import CONTAINERS
from edgevlm.apps.sources.proxy import HostProxy
from edgevlm.errors import SourceError, SourceRefused, UserError
from edgevlm.packages import install

if TYPE_CHECKING:
    import av

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


class FfmpegConnection(Connection):
    """Decodes one video stream. FFmpeg's own timeouts end every call, opening as well as reading.

    A recording behind a URL is played at its own speed and comes to an end. ``response``: an open answer that is read instead
    of the URL, and nothing that it refers to. Raises SourceError, in words without the address.
    """

    def __init__(self, url: str, options: SourceOptions, response: HTTPResponse | None = None) -> None:
        self._av, self._response = _load_av(), response
        self._container: Any = None
        self._proxy = _proxy_for(url, options) if response is None else None
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
        if self._recorded and grabbed.stamp_s is not None:
            self._pace(grabbed.stamp_s)
        return grabbed

    def retrieve(self) -> NDArray[np.uint8] | None:
        image: NDArray[np.uint8] = self._frame.to_ndarray(format="rgb24")
        return image

    def close(self) -> None:
        self._pictures.close()
        self._release()

    def _release(self) -> None:
        for each in (self._container, self._response, self._proxy):
            if each is not None:
                each.close()

    @property
    def _refused(self) -> str | None:
        """What the stream named and was not opened."""
        return None if self._proxy is None else self._proxy.refused

    def _open(self, url: str, options: SourceOptions) -> Any:
        error, began = self._av.error, time.monotonic()
        scheme = url.partition("://")[0].lower()
        protocols = "none" if self._response is not None else LISTED.get(ALIKE.get(scheme, scheme))
        if protocols is None:
            raise SourceRefused(f"{scheme}:// is no stream that is read; give {', '.join(LISTED)}, or a file with --video")
        try:
            return self._av.open(
                url if self._response is None else Readable(self._response),
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

    def _decode(self, stream: av.VideoStream) -> Generator[Grabbed, None, None]:
        """Pictures as they are decoded; one that cannot be is passed on as corrupt, and the stream goes on.

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

    def _pace(self, stamp_s: float) -> None:
        """Wait until a recorded picture is due."""
        now = time.monotonic()
        self._origin = now - stamp_s if self._origin is None else self._origin
        time.sleep(min(max(0.0, self._origin + stamp_s - now), 1.0))


def _proxy_for(url: str, options: SourceOptions) -> HostProxy | None:
    """Dials for FFmpeg the address's own host and public ones. None for other than HTTP, or where the user has a proxy."""
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https") or "http" in getproxies():
        return None
    hosts = AllowedHosts(None, private=False, also=parts.hostname or "")
    return HostProxy(hosts, max(options.open_timeout_s, options.read_timeout_s))


class Readable:
    """An answer as PyAV reads it: what has come, and no waiting for more."""

    def __init__(self, response: HTTPResponse) -> None:
        self.read = response.read1


def _load_av() -> Any:
    try:
        import av
        import av.logging
    except ImportError:
        raise UserError(f"network streams need PyAV: {install('cpu')} (or pip install av)") from None
    av.logging.set_level(None)  # what FFmpeg prints on its own would name the address
    return av
