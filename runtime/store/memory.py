"""The part of a store that lies in host memory: blocks used lately, and rows that the file does not have yet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from edgevlm.runtime.store.block import Block, joined
from edgevlm.runtime.store.record import Part, record_bytes


@dataclass(slots=True)
class Held:
    """Of one block: all its rows, if they are here, and those that are in no file, in their order."""

    whole: Block | None = None
    parts: list[Part] = field(default_factory=list)

    @property
    def spare(self) -> bool:
        """Whether ``whole`` takes memory of its own and is also in the file, or in it and ``parts`` together."""
        return self.whole is not None and all(part.block is not self.whole for part in self.parts)

    @property
    def unwritten(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def nbytes(self) -> int:
        own = record_bytes(self.whole) if self.spare and self.whole is not None else 0
        return own + self.unwritten


class Memory:
    """Blocks by number. ``used``: bytes of all. ``unwritten``: bytes of parts.

    limit: the bytes that it is meant to hold; who adds makes room first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = self.unwritten = 0
        self._held: dict[int, Held] = {}
        self._spare: OrderedDict[int, None] = OrderedDict()  # numbers of blocks to let go of, the one used last at the end
        self._only_here: OrderedDict[int, None] = OrderedDict()  # of blocks with parts, the same way

    def find(self, number: int) -> Held | None:
        return self._held.get(number)

    def whole(self, number: int) -> Block | None:
        """All rows of a block, if they are here; it is then the one used last."""
        held = self._held.get(number)
        if held is None or held.whole is None:
            return None
        for order in (self._spare, self._only_here):
            if number in order:
                order.move_to_end(number)
        return held.whole

    def put(self, number: int, part: Part) -> None:
        self._set(number, Held(part.block, [part]))

    def append(self, number: int, part: Part) -> None:
        held = self._held.get(number) or Held()
        whole = None if held.whole is None else joined([held.whole, part.block])
        self._set(number, Held(whole, [*held.parts, part]))

    def cache(self, number: int, block: Block) -> None:
        """All rows of a block, read from the file, if there is room or what is in the file too makes it."""
        needed = record_bytes(block)
        while self.used + needed > self.limit:
            if not self.let_go():
                return
        held = self._held.get(number)
        self._set(number, Held(block, held.parts if held is not None else []))

    def written(self, number: int, part: Part) -> bool:
        """A part is in the file now. Returns whether it was the block's last."""
        held = self._held.get(number)
        if held is None or part not in held.parts:
            return False
        parts = [other for other in held.parts if other is not part]
        self._set(number, Held(held.whole, parts))
        return not parts

    def replace(self, number: int, count: int, part: Part) -> None:
        """One part instead of the block's records and its first ``count`` parts."""
        held = self._held.get(number) or Held()
        whole = part.block if held.whole is not None and count == len(held.parts) else held.whole
        self._set(number, Held(whole, [part, *held.parts[count:]]))

    def renumber(self, number: int, new: int) -> None:
        """A block has another number; it is the one used least lately."""
        held = self._held.get(number) or Held()
        self.drop(number)
        self._set(new, held)
        for order in (self._spare, self._only_here):
            if new in order:
                order.move_to_end(new, last=False)

    def drop(self, number: int) -> None:
        self._set(number, Held())

    def let_go(self) -> bool:
        """Forget the rows, used least lately, that the file or a part has too. Returns whether there were any."""
        number = next(iter(self._spare), None)
        if number is not None:
            self._set(number, Held(None, self._held[number].parts))
        return number is not None

    def only_here(self) -> list[int]:
        """Blocks with rows that are in no file, the one used least lately first."""
        return list(self._only_here)

    def first_only_here(self) -> int | None:
        return next(iter(self._only_here), None)

    def _set(self, number: int, held: Held) -> None:
        """What is held of a block, now the one used last."""
        if (before := self._held.pop(number, None)) is not None:
            self.used -= before.nbytes
            self.unwritten -= before.unwritten
            self._spare.pop(number, None)
            self._only_here.pop(number, None)
        if held.whole is None and not held.parts:
            return
        self.used += held.nbytes
        self.unwritten += held.unwritten
        self._held[number] = held
        if held.spare:
            self._spare[number] = None
        if held.parts:
            self._only_here[number] = None
