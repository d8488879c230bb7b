"""The second buffer: a stream's arrays are copied here while it is held, and written from here while it goes on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.bundle import DecoderSpec, VisionSpec
from edgevlm.runtime.chunk import chunk_bytes
from edgevlm.runtime.snapshots.format import ALIGNMENT, Arrays, padding

METADATA = 1 + 8 + 4 + 2 + 2  # bytes of a row's kind, seq, frame, row and col; a position has four on each axis


def copy_bytes(decoder: DecoderSpec, vision: VisionSpec, rows: int, chunk: int, item: int) -> int:
    """Bytes of a stream's copy: ``rows`` of all layers together with elements of ``item`` bytes, and a chunk not yet appended.

    What a policy keeps is known only when it keeps it, and comes to that.
    """
    held = rows * decoder.kv_heads * (2 * decoder.head_dim * item + METADATA + 4 * decoder.axes)
    features = chunk // vision.group * vision.tokens_per_frame * decoder.row_width * np.dtype(np.float32).itemsize
    return held + features + chunk_bytes(chunk, vision) + 8 * ALIGNMENT * (decoder.layers + 1)


class Copies:
    """A block of memory for one copy of a stream's arrays, its pages touched at once, that grows where they need more."""

    def __init__(self, nbytes: int) -> None:
        self._block = np.ones(nbytes, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def of(self, arrays: Arrays) -> dict[str, NDArray]:
        """Dense copies of ``arrays``, which stay until the next call."""
        needed = sum(array.nbytes + padding(array.nbytes) for array in arrays.values())
        if needed > self.nbytes:
            self._block = np.ones(needed, np.uint8)
        copies, start = {}, 0
        for name, array in arrays.items():
            copy = self._block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(copy, array)
            copies[name] = copy
            start += array.nbytes + padding(array.nbytes)
        return copies
