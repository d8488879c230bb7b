"""Keep rows that have left the device's cache. The rows form numbered blocks, in host memory and in one file."""

from edgevlm.runtime.store.block import Block, joined
from edgevlm.runtime.store.store import Store, StoreSettings, StoreStats, StoreUse

__all__ = ["Block", "Store", "StoreSettings", "StoreStats", "StoreUse", "joined"]
