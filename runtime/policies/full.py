"""Keep everything, up to a declared capacity: the reference that every bounded policy is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from edgevlm.runtime.policies.base import Bool, Policy

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache


@dataclass
class Full(Policy):
    """Never evicts and never re-indexes. Its budget is a capacity; when that is used up the stream ends with an error."""

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "the uncompressed cache"
    bounded: ClassVar[bool] = False

    @property
    def room(self) -> int:
        return self.budget

    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        raise AssertionError("full never compresses")
