"""Text that may stand in HTML, whatever it was, and numbers as people read them."""

from __future__ import annotations

import html
import re
from typing import Any

NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]|[\U0001fffe-\U0001ffff]")
LONGEST = 200  # characters of a name


def safe(value: object) -> str:
    """Escaped for HTML and SVG, for content and attributes; what no page may hold becomes U+FFFD, what is long is cut."""
    text = NOT_TEXT.sub("\ufffd", str(value))
    return html.escape(short(text, LONGEST))


def short(text: str, longest: int) -> str:
    """The text, cut to ``longest`` characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def plain(value: Any) -> str:
    """A number with the digits that matter, ``1,184``, ``26.4``, ``0.0012``; anything else as it is. Not escaped."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and abs(value) < 1e15):
        return f"{value:,.0f}" if abs(value) < 10**15 else f"{value:.3e}" if abs(value) < 10**300 else "huge"
    return f"{value:.3g}"
