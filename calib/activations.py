"""Passages of ``pydoc``'s help topics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module


def passages(tokens: int, length: int, encode: Callable[[str], Sequence[int]], *, held_out: bool) -> list[list[int]]:
    """The beginnings of topics, ``length`` tokens each and ``tokens`` in all; every other topic is ``held_out``."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    found: list[list[int]] = []
    for name in sorted(topics)[held_out::2]:
        missing = tokens - sum(map(len, found))
        ids = list(encode(topics[name][: 16 * length]))[: min(length, missing)]
        if missing and len(ids) == min(length, missing):
            found.append(ids)
    return found
