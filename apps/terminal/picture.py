"""A frame as a terminal can show it: kitty or sixel graphics, coloured half blocks, or grey characters."""

from __future__ import annotations

import base64
import fcntl
import os
import re
import select
import struct
import sys
import termios
import time
import tty
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Graphics = Literal["kitty", "sixel", "blocks", "ascii"]
GREYS = " .:-=+*#%@"
CELL = (10, 20)  # pixels of a character cell, width and height, where the terminal does not say
SIXEL_LEVELS = 6  # of each colour
CHUNK = 4096  # bytes of a picture in one of kitty's escape sequences
KITTY_CLEAR = "\x1b_Ga=d\x1b\\"  # takes every picture off the screen
ANSWER_S = 0.3  # for a terminal to say what it can
ATTRIBUTES = re.compile(rb"\x1b\[\?([\d;]*)c")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a terminal can show. ``colors``: 2, 256 or 2**24; ``cell``: a character's width and height, pixels.

    typed: what somebody had typed when the terminal was asked.
    """

    unicode: bool = True
    colors: int = 2**24
    graphics: Graphics = "blocks"
    cell: tuple[int, int] = CELL
    typed: bytes = b""


def capabilities(environment: Mapping[str, str] = os.environ, encoding: str = "utf-8") -> Capabilities:
    """By the environment, as NO_COLOR, COLORTERM and the terminals that have graphics set it, and by asking for sixel."""
    try:
        "▀█░✓·".encode(encoding)
        unicode = True
    except (UnicodeEncodeError, LookupError):
        unicode = False
    colors = 2 if environment.get("NO_COLOR") else 2**24 if environment.get("COLORTERM") in ("truecolor", "24bit") else 256
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    graphics: Graphics = "blocks" if unicode and colors > 2 else "ascii"
    typed = b""
    if colors > 2 and not environment.get("TMUX"):
        if "KITTY_WINDOW_ID" in environment or "kitty" in term or program in ("ghostty", "WezTerm"):
            graphics = "kitty"
        else:
            attributes, typed = device_attributes()
            graphics = "sixel" if 4 in attributes else graphics
    return Capabilities(unicode, colors, graphics, cell_size(), typed)


def device_attributes() -> tuple[list[int], bytes]:
    """What the terminal says of itself (DA1), 4 for sixel, and what somebody typed before it did."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return [], b""
    read, end = b"", time.monotonic() + ANSWER_S
    saved = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin, termios.TCSANOW)  # which keeps what is typed already
        os.write(sys.stdout.fileno(), b"\x1b[c")
        while not (found := ATTRIBUTES.search(read)) and (left := end - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0]:
                read += os.read(sys.stdin.fileno(), 64)
    except OSError:
        return [], read
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, saved)
    if found is None:
        return [], read
    return [int(number) for number in found[1].split(b";")[1:] if number], read[: found.start()] + read[found.end() :]


def cell_size() -> tuple[int, int]:
    """A character's width and height in pixels."""
    try:
        rows, columns, width, height = struct.unpack("4H", fcntl.ioctl(sys.stdout, termios.TIOCGWINSZ, bytes(8)))
    except (OSError, ValueError):
        return CELL
    return (width // columns, height // rows) if rows and columns and width and height else CELL


def fit(image: Image, columns: int, rows: int) -> tuple[int, int]:
    """Columns and rows of character cells, twice as high as wide, that show an image undistorted within those given."""
    height, width = image.shape[:2]
    scale = min(columns / width, 2 * rows / height)
    return max(1, round(width * scale)), max(1, round(height * scale / 2))


def draw(image: Image, columns: int, rows: int, able: Capabilities, number: int = 1) -> list[str]:
    """The image over ``rows`` lines of ``columns`` cells, as escape sequences; kitty and sixel are one string for all rows.

    number: kitty's, of the picture that this one takes the place of.
    """
    if able.graphics == "kitty":
        return [kitty(resize(image, columns * able.cell[0], rows * able.cell[1]), columns, rows, number)]
    if able.graphics == "sixel":
        return [sixel(resize(image, columns * able.cell[0], rows * able.cell[1] // 6 * 6))]
    if able.graphics == "ascii":
        grey = resize(image, columns, rows).mean(axis=2)
        return ["".join(GREYS[int(value) * len(GREYS) // 256] for value in line) for line in grey]
    small = resize(image, columns, 2 * rows)
    return [half_blocks(upper, lower, able.colors) for upper, lower in zip(small[::2], small[1::2], strict=True)]


def resize(image: Image, width: int, height: int) -> Image:
    """The pixel in the middle of each of ``width`` x ``height`` cells."""
    rows = (2 * np.arange(height) + 1) * image.shape[0] // (2 * height)
    columns = (2 * np.arange(width) + 1) * image.shape[1] // (2 * width)
    return image[rows][:, columns]


def half_blocks(upper: Image, lower: Image, colors: int) -> str:
    """Two rows of pixels ``[width, 3]`` in one line of characters."""
    if colors == 256:
        codes = [f"5;{16 + 36 * r + 6 * g + b}" for r, g, b in (np.concatenate([upper, lower]).astype(int) * 6 // 256).tolist()]
    else:
        codes = [f"2;{r};{g};{b}" for r, g, b in np.concatenate([upper, lower]).tolist()]
    pairs = zip(codes[: len(upper)], codes[len(upper) :], strict=True)
    return "".join(f"\x1b[38;{top};48;{bottom}m▀" for top, bottom in pairs) + "\x1b[0m"


def kitty(image: Image, columns: int, rows: int, number: int = 1) -> str:
    """Kitty's graphics protocol: a picture that takes the place of the last one, and leaves the cursor where it is."""
    data = base64.standard_b64encode(np.ascontiguousarray(image).tobytes()).decode()
    head = f"a=T,f=24,s={image.shape[1]},v={image.shape[0]},c={columns},r={rows},i={number},p=1,C=1,q=2,"
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    last = len(chunks) - 1
    return "".join(f"\x1b_G{'' if i else head}m={int(i < last)};{chunk}\x1b\\" for i, chunk in enumerate(chunks))


def sixel(image: Image) -> str:
    """DEC's sixel graphics, in a palette of SIXEL_LEVELS levels a colour; height is a multiple of 6."""
    levels = image.astype(int) * SIXEL_LEVELS // 256
    index = (levels[..., 0] * SIXEL_LEVELS + levels[..., 1]) * SIXEL_LEVELS + levels[..., 2]
    palette, index = np.unique(index, return_inverse=True)
    index = index.reshape(image.shape[:2])
    out = ["\x1bP0;1q", f'"1;1;{image.shape[1]};{image.shape[0]}']
    for number, code in enumerate(palette.tolist()):
        red, green, blue = code // SIXEL_LEVELS**2, code // SIXEL_LEVELS % SIXEL_LEVELS, code % SIXEL_LEVELS
        out.append(f"#{number};2;" + ";".join(str(100 * level // (SIXEL_LEVELS - 1)) for level in (red, green, blue)))
    for band in index.reshape(-1, 6, image.shape[1]):
        for number in np.unique(band).tolist():
            bits = ((band == number) * (1 << np.arange(6))[:, None]).sum(axis=0) + 63
            out.append(f"#{number}{_runs(bits.astype(np.uint8).tobytes().decode())}$")
        out.append("-")
    return "".join(out) + "\x1b\\"


def _runs(text: str) -> str:
    """Sixel's run lengths: ``!5~`` for ``~~~~~``."""
    edges = [0, *(i for i in range(1, len(text)) if text[i] != text[i - 1]), len(text)]
    return "".join(f"!{end - start}{text[start]}" if end - start > 3 else text[start:end] for start, end in pairwise(edges))
