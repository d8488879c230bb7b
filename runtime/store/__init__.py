"""Storage for rows that leave the device: blocks by number, in host memory and one file."""

from edgevlm.runtime.store.block import Block, joined
from edgevlm.runtime.store.store import Store, StoreSettings, StoreStats, StoreUse

__all__ = ["Block", "Store", "StoreSettings", "StoreStats", "StoreUse", "joined"]
