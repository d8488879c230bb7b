"""Retrieval ratios that were measured here, out of a bench's lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgevlm.errors import UserError

TITLES = {"infinigen": "InfiniGen", "infinigenp": "InfiniGenP", "rekv": "ReKV", "resv": "ReSV"}


def read_ratios(path: Path) -> dict[str, tuple[float, float]]:
    """(prefill, generation) ratios by a method's title, from lines ``{"bench": "retrieval", "policy", "prefill_ratio",
    "answer_ratio"}`` among others; the last line of a policy counts, whatever its options.

    Raises UserError for a file that cannot be read, a ratio that is none, or no line of a policy that the model knows.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--ratios {path}: cannot be read ({getattr(error, 'strerror', None) or 'no text'})") from None
    found = {}
    for number, text in enumerate(texts, 1):
        line = _line(text)
        title = TITLES.get(str(line.get("policy")).partition(":")[0])
        if line.get("bench") == "retrieval" and title:
            place = f"--ratios {path}, line {number}"
            found[title] = _share(line, "prefill_ratio", place), _share(line, "answer_ratio", place)
    if not found:
        raise UserError(f"--ratios {path}: no line of bench retrieval is of {', '.join(TITLES)}; give its --json output")
    return found


def _line(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _share(line: dict[str, Any], name: str, place: str) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise UserError(f"{place}: {name} is {value!r}; a ratio is a number from 0 to 1")
    return float(value)
