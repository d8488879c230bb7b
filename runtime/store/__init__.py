"""Store the cache rows that leave the device in blocks, in host memory and in one file. Each block has a number."""

from edgevlm.runtime.store.block import Block, joined
from edgevlm.runtime.store.store import Store, StoreSettings, StoreStats, StoreUse

__all__ = ["Block", "Store", "StoreSettings", "StoreStats", "StoreUse", "joined"]
