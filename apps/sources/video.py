"""Open and decode videos with PyAV, from files, pipes, network streams and HTTP requests."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from fractions import Fraction
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm.apps.sources.base import Image
from edgevlm.apps.sources.picture import check_size
from edgevlm.errors import SourceError
from edgevlm.packages import needed
from edgevlm.runtime.preprocess import MOST_PIXELS

CONTAINERS = (  # FFmpeg's formats, except those that refer to other files (concat, hls, dash, image2)
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,live_flv,asf,ogg,mxf,nut,wtv,rm,dv,gif,apng,ivf,obu,av1,"
    "h264,hevc,vvc,vc1,m4v,mjpeg,mpjpeg,yuv4mpegpipe,dhav"
)
LEAST_S = 1e-3
JUMP_S, BACK_S = 60.0, 0.5  # timestamps that jump ahead by more than JUMP_S or back by more than BACK_S are corrected
FALLBACK_FPS = 25.0
SQUEEZED = 8  # largest accepted aspect ratio of a pixel


def load_av() -> Any:
    """Import PyAV and turn off its messages. Raises UserError if PyAV is not installed."""
    av, logging = (needed(name, "reading video", "cpu") for name in ("av", "av.logging"))
    logging.set_level(None)  # FFmpeg's own messages would show the address
    return av


class Video:
    """An open video file or stream, and the best video track in it. Raises SourceError.

    Cover art is ignored. ``source`` and ``options``: passed to ``av.open``. If ``source`` is an open file, FFmpeg opens no
    other file.
    """

    def __init__(self, source: Any, most_pixels: int = MOST_PIXELS, threads: str = "AUTO", **options: Any) -> None:
        av = load_av()
        allowed = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
        options = {"options": allowed, "metadata_errors": "replace", **options}  # titles are not always UTF-8
        self._errors, self._most = av.error, most_pixels
        self.container, self.closing = av.open(source, **options), ExitStack()
        try:
            self.stream = self._best()
            context = self.stream.codec_context
            if context.width:  # take an unknown size from the first picture
                check_size(context.width, context.height, most_pixels)
            context.thread_type = threads
            context.options = {**context.options, "max_pixels": str(most_pixels)}
        except BaseException:
            self.close()
            raise
        rate = float(self.stream.average_rate or 0)
        self.period_s = 1 / rate if 0 < rate < 1000 else 1 / FALLBACK_FPS
        self._filter: Deinterlacer | None = None
        self._lost, self._spoiled = False, set[int | None]()  # timestamps of pictures between a lost packet and a keyframe

    def _best(self) -> Any:
        hidden = load_av().stream.Disposition.attached_pic | load_av().stream.Disposition.timed_thumbnails
        shown = [stream for stream in self.container.streams.video if not stream.disposition & hidden]
        found = [stream for stream in shown if stream.codec_context is not None]
        if not found:
            why = ", only streams of unknown codecs" if shown else ", only cover art" if self.container.streams.video else ""
            raise SourceError("contains no video" + why)
        return max(found, key=lambda each: (bool(each.disposition & 1), each.codec_context.width * each.codec_context.height))

    def frames(self) -> Iterator[Any]:
        """Yield deinterlaced PyAV frames in display order. Yield None for each picture that cannot be decoded."""
        for packet in self.packets():
            yield from self.decode(packet)
        yield from self.drain()

    def packets(self) -> Iterator[Any]:
        """Yield the packets of a recording. A damaged recording ends at its last readable packet."""
        with suppress(self._errors.FFmpegError, OSError, ValueError):  # reading the file can raise OSError or ValueError
            yield from (packet for packet in self.container.demux(self.stream) if packet.size)

    def decode(self, packet: Any) -> list[Any]:
        """Decode a packet to PyAV frames. The list contains None for each picture that cannot be decoded."""
        self._lost = packet.is_corrupt or (self._lost and not packet.is_keyframe)
        if self._lost:
            self._spoiled.add(packet.pts)
        elif len(self._spoiled) > 256:  # is_corrupt, which removes timestamps, is not in use
            self._spoiled.clear()
        try:
            frames = self.stream.codec_context.decode(packet)
        except self._errors.InvalidDataError:
            return [None]
        if self._filter is None and any(frame.interlaced_frame for frame in frames):
            self._filter = Deinterlacer(self.stream.time_base)
        return frames if self._filter is None else self._filter(frames)

    def is_corrupt(self, frame: Any) -> bool:
        """Return whether data was lost in this picture or in an earlier one since the last keyframe."""
        known = frame.pts in self._spoiled
        self._spoiled.discard(frame.pts)
        return known or bool(frame.is_corrupt)

    def drain(self) -> list[Any]:
        """Return the pictures still in the decoder, and reset the decoder for the next packet."""
        try:
            frames = self.stream.codec_context.decode(None)
        except (self._errors.InvalidDataError, self._errors.EOFError):
            frames = []
        if self._filter is not None:
            frames = [*self._filter(frames), *self._filter.drain()]
        self.stream.codec_context.flush_buffers()
        return frames

    def rgb(self, frame: Any) -> Image:
        """Convert a frame to uint8 RGB ``[H, W, 3]`` with square pixels.

        The image is turned and mirrored as the video's metadata requires.
        """
        ratio, width, height = self._pixel_ratio(), frame.width, frame.height
        width, height = (round(width * ratio), height) if ratio >= 1 else (width, round(height / ratio))
        check_size(width, height, self._most)
        image: Image = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
        matrix = frame.side_data.get(load_av().sidedata.sidedata.Type.DISPLAYMATRIX)
        return image if matrix is None else oriented(image, np.frombuffer(matrix, np.int32)[[0, 1, 3, 4]])

    def _pixel_ratio(self) -> Fraction:
        ratio = self.stream.sample_aspect_ratio or self.stream.codec_context.sample_aspect_ratio
        return ratio if ratio and 1 / SQUEEZED <= ratio <= SQUEEZED else Fraction(1)

    def close(self) -> None:
        self.container.close()
        self.closing.close()


def oriented(image: Image, matrix: Any) -> Image:
    """Turn and mirror an image by FFmpeg's display matrix: x' = a x + c y, y' = b x + d y, with y pointing down."""
    a, b, c, d = map(int, matrix)
    if abs(a) + abs(d) < abs(b) + abs(c):
        image, a, d = image.swapaxes(0, 1), c, b
    return np.ascontiguousarray(image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])


def open_video(path: Path, **options: Any) -> Video:
    """Open a video file. Raises SourceError with a one-line message."""
    with ExitStack() as opened:  # given a path instead of an open file, FFmpeg could open other files
        file = opened.enter_context(path.open("rb"))
        try:
            video = Video(file, **options)
        except (load_av().error.FFmpegError, OSError, ValueError):  # reading the file can raise OSError or ValueError
            raise SourceError("not a readable video (damaged, truncated, or another kind of file)") from None
        video.closing = opened.pop_all()
    return video


@dataclass
class Feed:
    """A file-like object that reads received bytes, with limits on time and size.

    Each call of :meth:`renew` restarts the limits, ``timeout_s`` in seconds and ``largest`` in bytes.

    If a limit is reached or reading fails, the read returns no bytes and ``problem`` is the reason. No exception is raised,
    because PyAV would print its traceback.
    """

    take: Callable[[int], bytes]
    largest: float = math.inf
    timeout_s: float = math.inf
    end: Callable[[], None] = lambda: None
    problem: str | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Restart the time and size limits."""
        self._deadline, self._left = time.monotonic() + self.timeout_s, self.largest

    def read(self, count: int) -> bytes:
        late, block = time.monotonic() > self._deadline, b""
        try:
            block = b"" if late or self._left <= 0 else self.take(count)
        except TimeoutError:
            late = True
        except (HTTPException, OSError, ValueError) as error:
            self.problem = getattr(error, "strerror", None) or type(error).__name__
        if late:
            self.problem = f"no picture for {self.timeout_s:g} s"
        elif self._left <= 0:
            self.problem = f"no picture within {self.largest / 2**20:g} MB"
        self._left -= len(block)
        return block

    def close(self) -> None:
        self.closed = True
        self.end()


class Deinterlacer:
    """Deinterlaces frames with FFmpeg's yadif filter, and returns them one frame late. Progressive frames are unchanged."""

    def __init__(self, time_base: Fraction) -> None:
        self._time_base, self._kind = time_base, (0, 0, "")
        self._graph: Any = None

    def __call__(self, frames: list[Any]) -> list[Any]:
        done = []
        for frame in frames:
            if (kind := (frame.width, frame.height, frame.format.name)) != self._kind:
                done += self.drain()
                self._kind, self._graph = kind, load_av().filter.Graph()
                source = self._graph.add_buffer(width=kind[0], height=kind[1], format=kind[2], time_base=self._time_base)
                self._graph.link_nodes(source, self._graph.add("yadif", "deint=interlaced"), self._graph.add("buffersink"))
                self._graph.configure()
            self._graph.push(frame)
            done += self._pulled()
        return done

    def drain(self) -> list[Any]:
        """Return the last frame, if it is still in the filter."""
        if self._graph is None:
            return []
        self._graph.push(None)
        done, self._kind, self._graph = self._pulled(), (0, 0, ""), None
        return done

    def _pulled(self) -> list[Any]:
        av, done = load_av(), []
        while True:
            try:
                done.append(self._graph.pull())
            except (av.error.BlockingIOError, av.error.EOFError):
                return done


class RecordedClock:
    """Makes a recording's timestamps start at 0 and strictly increase.

    Picture ``n`` has the timestamp ``s[n]`` and gets the time ``m[n]``. The offset ``o`` is ``-s[0]`` at first::

        m[n] = max(s[n] + o, m[n-1] + LEAST_S)

    If timestamps jump forward by more than ``JUMP_S`` or back by more than ``BACK_S``, the clock was set, timestamps wrapped or
    recordings were joined. After such a jump, ``m[n]`` is ``m[n-1] + period_s``, and ``o`` becomes ``m[n] - s[n]``. A picture
    without a timestamp is placed ``period_s`` after the previous picture.
    """

    def __init__(self, period_s: float) -> None:
        self._period, self._origin = period_s, 0.0
        self.time_s: float | None = None  # time of the newest picture

    def __call__(self, stamp_s: float | None) -> float:
        """Return the corrected time of the next picture, in seconds."""
        before = self.time_s
        if before is None:
            self.time_s, self._origin = 0.0, -(stamp_s or 0.0)
        elif stamp_s is None or not -BACK_S <= stamp_s + self._origin - before <= JUMP_S:
            self.time_s = before + self._period
            if stamp_s is not None:
                self._origin = self.time_s - stamp_s
        else:
            self.time_s = max(stamp_s + self._origin, before + LEAST_S)
        return self.time_s


def spread(open_video: Callable[[], Video], count: int, limit_s: float) -> list[Image]:
    """Decode up to ``count`` pictures, evenly spaced in time.

    A first pass reads the packets' times, because the container's length and index may be wrong or missing. A second pass
    decodes each wanted picture, starting at the previous keyframe. Raises SourceError if no picture can be decoded, or after
    ``limit_s`` seconds.
    """
    until = time.monotonic() + limit_s

    def packets(video: Video) -> Iterator[Any]:
        for packet in video.packets():
            if time.monotonic() > until:
                raise SourceError(f"decoding this video takes more than {limit_s:g} s")
            yield packet

    times, places, key, place = list[float](), list[tuple[int, int]](), 0, 0
    with closing(open_video()) as video:
        clock = RecordedClock(video.period_s)
        for number, packet in enumerate(packets(video)):
            if packet.is_keyframe:
                key, place = number, 0
            if not packet.is_discard:  # MP4 edit lists hide some packets
                times.append(clock(None if packet.dts is None else float(packet.dts * packet.time_base)))
                places.append((key, place))
                place += 1
    if not times:
        raise SourceError("this video has no pictures")
    length = times[-1] + video.period_s
    picked = sorted({places[max(0, bisect_right(times, (each + 0.5) / count * length) - 1)] for each in range(count)})
    last, found, newest = dict(picked), dict[tuple[int, int], Image](), dict[int, Any]()
    with closing(open_video()) as video:
        key = place = 0

        def show(frames: list[Any]) -> None:
            nonlocal place
            for newest[key] in filter(None, frames):
                if (key, place) in picked:
                    found[key, place] = video.rgb(newest[key])
                place += 1

        for number, packet in enumerate(packets(video)):
            if packet.is_keyframe:
                if key in last:
                    show(video.drain())
                key, place = number, 0
            if place <= last.get(key, -1):
                show(video.decode(packet))
        if key in last:
            show(video.drain())
        for missing in picked:  # if there are fewer pictures than packets, repeat the newest picture
            if missing not in found and missing[0] in newest:
                found[missing] = video.rgb(newest[missing[0]])
    if not found:
        raise SourceError("no picture in this video can be decoded")
    return [found[each] for each in sorted(found)]
