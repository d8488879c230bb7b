"""How much of what a store may take."""

from __future__ import annotations

from dataclasses import dataclass

from edgevlm.errors import UserError

LEAST_FILE = 1 << 20
LEAST_HOST = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """file_bytes: of the file at most; 0 for host memory alone. host_bytes: of blocks in host memory at most.

    Raises UserError for less than a store can work with.
    """

    file_bytes: int = 8 << 30
    host_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.host_bytes < LEAST_HOST:
            raise UserError(f"--host-bytes {self.host_bytes:,} is too little; give 1M or more")
        if self.file_bytes and self.file_bytes < LEAST_FILE:
            raise UserError(f"--store-bytes {self.file_bytes:,} is too little; give 1M or more, or 0 for no file")
