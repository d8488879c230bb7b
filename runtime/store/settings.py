"""How much of what a store may take."""

from __future__ import annotations

from dataclasses import dataclass

from edgevlm.errors import UserError

LEAST = 1_000_000


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """file_bytes: of the file at most; 0 for host memory alone. host_bytes: of blocks in host memory at most.

    Raises UserError for less than a store can work with.
    """

    file_bytes: int = 8_000_000_000
    host_bytes: int = 256_000_000

    def __post_init__(self) -> None:
        if self.host_bytes < LEAST:
            raise UserError(f"--host-bytes {self.host_bytes:,} is too little; give 1M or more")
        if self.file_bytes and self.file_bytes < LEAST:
            raise UserError(f"--store-bytes {self.file_bytes:,} is too little; give 1M or more, or 0 for no file")
