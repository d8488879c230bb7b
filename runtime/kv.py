"""Storage types of keys and values: ``fp32``, ``fp16``, or ``int8`` codes with a scale per channel.

A stored number is ``code * scale``, and codes saturate at -128 and 127. Scales are fixed, one for each layer, KV head and
channel. The two channels of a key's rotary pair, ``d`` and ``d + head_dim / 2``, share a scale. Rotation keeps a pair's length,
so a scale that fits the length fits every rotation. Keys stored as codes are rotated in float32, then rounded to integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

KVType = str
DTYPES: dict[KVType, np.dtype] = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "int8": np.dtype(np.int8)}
KV_TYPES = tuple(DTYPES)
SCALES = "kv-scales.npy"
MOST = 127  # the largest code whose negative is also a code


@dataclass(frozen=True, slots=True)
class KVScales:
    """The scales of keys and values, each float32 ``[layers, kv_heads, head_dim]``, finite and above 0."""

    key: NDArray[np.float32]
    value: NDArray[np.float32]

    @classmethod
    def holding(cls, key: NDArray[np.floating], value: NDArray[np.floating], headroom: float = 1.0) -> KVScales:
        """Return the scales that fit the largest keys and values. ``headroom``: a factor that leaves room for larger numbers.

        ``key``: the largest length of each rotary pair, ``[layers, kv_heads, head_dim / 2]``. ``value``: the largest magnitude
        of each channel, ``[layers, kv_heads, head_dim]``. All channels of a head's values share one scale, which fits the
        largest channel, because separate scales saturate more inputs (docs/internals/models.md).
        """
        largest = np.concatenate([key, key], -1), np.broadcast_to(value.max(-1, keepdims=True), value.shape)
        return cls(*(_usable(headroom * part / MOST) for part in largest))

    @classmethod
    def load(cls, path: Path, shape: tuple[int, int, int]) -> KVScales:
        """Read a saved file. ``shape``: (layers, kv_heads, head_dim). Raises ValueError if the file is invalid."""
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError:
            raise
        except Exception as error:  # numpy raises errors of many types for an invalid file
            raise ValueError(f"cannot be read ({type(error).__name__})") from None
        if not isinstance(found, np.ndarray) or found.dtype != np.float32 or found.shape != (2, *shape):
            kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else "several arrays"
            raise ValueError(f"must be scales, float32 {[2, *shape]}, not {kind}")
        if not (np.isfinite(found) & (found > 0)).all():
            raise ValueError("scales must be finite and above 0")
        half = shape[2] // 2
        if not np.array_equal(found[0, ..., :half], found[0, ..., half:]):
            raise ValueError("the halves of a rotary pair must have the same scale")
        return cls(np.array(found[0]), np.array(found[1]))

    def save(self, path: Path) -> None:
        """Write both scales to an .npy file, as one float32 array ``[2, layers, kv_heads, head_dim]``."""
        with path.open("wb") as stream:
            np.lib.format.write_array(stream, np.stack([self.key, self.value]), allow_pickle=False)


def codes(numbers: NDArray[np.floating], scale: NDArray[np.float32]) -> NDArray[np.int8]:
    """Round numbers to int8 codes; halves round to even. ``numbers``: ``[kv_heads, n, head_dim]``. ``scale``: ``[kv_heads,
    head_dim]``.
    """
    return np.clip(np.rint(numbers / scale[:, None]), -MOST - 1, MOST).astype(np.int8)


def _usable(scale: NDArray[np.floating]) -> NDArray[np.float32]:
    """Replace scales of zero with the head's largest scale, or with 1 if all are zero."""
    most = scale.max(-1, keepdims=True)
    filled = np.where(scale > 0, scale, np.where(most > 0, most, 1.0))
    return np.maximum(filled, np.finfo(np.float32).tiny).astype(np.float32)
