"""Declare a run's settings once: ``edgevlm run``, ``watch`` and ``serve`` make their options from :class:`RunSettings`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from edgevlm.errors import UserError
from edgevlm.runtime.settings import Metavar, SessionSettings


class Shown(NamedTuple):
    """Describes a field's default in ``--help``. Pydantic keeps each ``Shown`` in ``model_fields[name].metadata``."""

    text: str


def parse_size(text: Any, option: str = "") -> Any:
    """Parse ``1280x720`` as (width, height) and ``auto`` as None.

    For invalid text, raises a UserError that begins with ``option``.
    """
    if not isinstance(text, str) or text == "auto":
        return None if text == "auto" else text
    if not (match := re.fullmatch(r"(\d{1,5})[xX](\d{1,5})", text.strip())) or "0" in match.groups():
        raise UserError(f"{option}{text}: give width and height in pixels, like 640x480")
    return int(match[1]), int(match[2])


def parse_ask_at(text: str) -> tuple[float, str]:
    """Parse ``60:Who came in?`` as a question at 60 seconds. Raises UserError for invalid text."""
    time_s, _, question = text.partition(":")
    if not re.fullmatch(r"\s*\d{1,12}(\.\d*)?\s*", time_s) or not question.strip():
        raise UserError(f"{text}: give seconds, a colon and the question, like 60:'who came in?'")
    return float(time_s), question.strip()


def _one_line(parse: Any) -> Any:
    def check(value: Any) -> Any:
        try:
            return parse(value)
        except UserError as error:
            raise ValueError(str(error)) from None

    return check


def _question(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Size = Annotated[tuple[int, int] | None, BeforeValidator(_one_line(parse_size)), Metavar("WxH")]
Seconds = Annotated[float, Metavar("S")]
Name = Annotated[str, Metavar("NAME")]


class RunSettings(SessionSettings):
    """The settings of a run, including those of its session. Sizes are (width, height)."""

    camera: Annotated[str | None, Metavar("SRC"), Shown("demo")] = Field(
        None, description="Watch 0, csi://0, a URL, a pipeline, - or demo."
    )
    video: Annotated[str | None, Metavar("FILE")] = Field(None, description="Watch a video file, or a folder of pictures.")
    model: Annotated[str, Metavar("MODEL"), Shown("demo")] = Field(
        "demo", description="Use this bundle, checkpoint or ORG/NAME."
    )
    ask: Annotated[list[Annotated[str, AfterValidator(_question)]], Metavar("TEXT")] = Field(
        [], description="Ask this at the end of the stream."
    )
    ask_at: Annotated[list[Annotated[Any, BeforeValidator(_one_line(parse_ask_at))]], Metavar("S:TEXT")] = Field(
        [], description="Ask this S seconds into the stream."
    )
    fps: Annotated[float, Metavar("N")] = Field(2.0, description="Watch this many frames a second.")
    state: Annotated[str | None, Metavar("DIR")] = Field(None, description="Keep snapshots in this folder or URL, and resume.")
    state_from: Annotated[str | None, Metavar("SRC")] = Field(None, description="Resume from another source's snapshots.")
    frames: Annotated[int | None, Metavar("N")] = Field(None, ge=1, description="Stop after this many frames.")
    seconds: Annotated[float | None, Metavar("S")] = Field(None, ge=0, description="Stop S seconds into the stream.")
    realtime: bool | None = Field(None, description="Play recordings at their own speed.")
    frame_size: Annotated[Size, Metavar("auto|WxH")] = Field(None, description="Expect frames of this size.")
    seed: Annotated[int, Metavar("N")] = Field(0, ge=0, description="Seed the demo world.")
    wait: bool = Field(False, description="Wait for a camera that is not available yet.")
    rule: Annotated[Literal["block", "drop-oldest"] | None, Metavar("block|drop-oldest"), Shown("live: drop-oldest")] = Field(
        None, description="When the model is busy, wait or drop frames."
    )
    size: Size = Field(None, description="Ask a camera for this size.")
    pixel_format: Annotated[str | None, Metavar("FOURCC")] = Field(None, description="Ask a USB camera for MJPG, YUYV, ..")
    camera_fps: Annotated[float | None, Metavar("N")] = Field(None, description="Ask a camera for this rate.")
    open_timeout: Seconds = Field(10.0, description="Give up connecting after this long.")
    read_timeout: Seconds = Field(10.0, description="Reconnect after this long without a frame.")
    stall_timeout: Seconds = Field(3.0, description="Report a stall after this long.")
    state_every: Seconds = Field(30.0, description="Take a snapshot this often.")
    state_key_file: Annotated[Path | None, Metavar("FILE")] = Field(None, description="Encrypt snapshots with this file's key.")
    precision: Annotated[Name | None, Shown("by plan")] = Field(None, description="Export weights as fp32, int8, int4, ..")
    vision_precision: Annotated[Name | None, Shown("by plan")] = Field(
        None, description="Export vision weights in this precision."
    )
    kv: Annotated[Literal["fp32", "fp16", "int8"] | None, Metavar("NAME"), Shown("by plan")] = Field(
        None, description="Export with a cache in fp32, fp16 or int8."
    )
    threads: Annotated[int | None, Metavar("N"), Shown("physical cores")] = Field(
        None, ge=1, le=256, description="Use this many CPU threads."
    )
    engine: Name = Field("onnxruntime-cpu", description="Run the model with this engine.")
    stats_every: Annotated[float | None, Metavar("S"), Shown("1 for --json")] = Field(
        None, ge=0.1, description="Report statistics this often."
    )

    @property
    def is_demo_source(self) -> bool:
        return self.video is None and self.camera in (None, "demo")

    @property
    def is_stdin_source(self) -> bool:
        return "-" in (self.camera, self.video)

    @property
    def state_key(self) -> str | None:
        """Return where to read the key that encrypts snapshots, as ``file:PATH``, or None without a key."""
        return None if self.state_key_file is None else f"file:{self.state_key_file}"
