"""Store cache rows that leave the device as numbered blocks, in host memory and in one file."""

from edgevlm.runtime.store.block import Block, joined
from edgevlm.runtime.store.store import Store, StoreSettings, StoreStats, StoreUse

__all__ = ["Block", "Store", "StoreSettings", "StoreStats", "StoreUse", "joined"]
