"""What is compared with what: a policy at a budget, at which it takes no more bytes than the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from edgevlm.bench.accuracy.entries import ORACLE, Entry
from edgevlm.calib.choose import reason_of
from edgevlm.calib.footprint import fitted
from edgevlm.errors import UserError

PLAIN = Entry("sliding-window")  # holds nothing beside the cache: its bytes are what everybody gets


@dataclass(frozen=True, slots=True)
class Cell:
    """A policy at a budget. tokens: |M|; allowed: bytes that cache and policy may take together, 0 for any number."""

    label: str
    budget: str
    tokens: int
    allowed: int = 0


@dataclass(frozen=True, slots=True)
class Skipped:
    label: str
    budget: str
    reason: str


def equal_cells(
    entries: Sequence[Entry],
    budget: str,
    tokens: int,
    per_token: int,
    least: int,
    taken: Callable[[Entry, int], int],
    free: Collection[Entry] = (),
) -> Iterator[Cell | Skipped]:
    """Each entry at ``tokens``, or at the most at which it takes no more bytes than a plain window does; or why it cannot be.

    per_token, least: see :func:`edgevlm.calib.footprint.fitted`. taken: measures an entry's bytes at a budget. free: entries
    that may take any number.
    """
    try:
        allowed = taken(PLAIN, tokens)
    except UserError as error:
        names = dict.fromkeys(ORACLE if entry.is_oracle else entry.label for entry in entries)
        yield from (Skipped(name, budget, reason_of(error)) for name in names)
        return
    for entry in entries:
        try:
            if entry in free:
                yield Cell(entry.label, budget, tokens)
            else:
                yield Cell(entry.label, budget, fitted(tokens, allowed, per_token, least, partial(taken, entry)), allowed)
        except UserError as error:
            yield Skipped(entry.label, budget, reason_of(error))
