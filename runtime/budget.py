"""Decide how much memory a stream allocates at the start, and make its chunks smaller while memory is short."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle, DecoderSpec, VisionSpec
from edgevlm.runtime.cache import KVCache, row_bytes
from edgevlm.runtime.engine import KVDevice
from edgevlm.runtime.free_memory import Available, available
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy

DEFAULT_BUDGET = 6000  # the largest default budget, in vision tokens per layer
LOW, ENOUGH = 1 / 16, 1 / 8
INTERVAL = 1.0  # seconds between two checks of the free memory


@dataclass(frozen=True, slots=True)
class TextBudget:
    """The tokens set aside at the start for the conversation, the question and the answer, in addition to the memory.

    ``pictures``: the number of pictures for which tokens are set aside. ``most``: the longest question allowed, in tokens,
    including its conversation and further pictures; 0 allows only the tokens set aside. If a question needs more tokens, the
    session allocates memory for them when the question is asked and frees that memory afterwards.
    """

    conversation: int
    question: int
    answer: int
    pictures: int = 0
    most: int = 0

    @classmethod
    def fitting(cls, position_limit: int) -> TextBudget:
        """Return a budget of min(256, ``position_limit // 16``) tokens for each of conversation, question and answer."""
        part = min(256, position_limit // 16)
        return cls(part, part, part)

    def rows(self, model: Model) -> int:
        """Return how many rows each layer sets aside for text and pictures."""
        pictures = self.pictures * model.rows_per_frame
        return self.conversation + self.question + self.answer + len(model.closing) + pictures


def longest_question(text: TextBudget, spare: int) -> int:
    """Return the maximum number of tokens in a question. ``spare``: how many of the model's positions are still unused."""
    return max(text.question, min(text.most, text.conversation + text.question + spare))


def present_rows(model: Model, present: int = 1) -> int:
    """Return how many rows must be free to show the ``present`` newest frames to a question.

    A tower that merges frames needs room for one more frame, because the newest group may be incomplete.
    """
    return (present + (model.bundle.vision.group > 1)) * model.rows_per_frame


def default_budget(model: Model, policy: Policy, most: int) -> int:
    """Return the default memory budget in tokens. This is half the model's positions, but at most DEFAULT_BUDGET and ``most``,
    rounded down to whole frames. For an unbounded policy, the default is ``most``.
    """
    budget = min(DEFAULT_BUDGET, model.bundle.limit // 2, most) if policy.bounded else most
    return max(budget // model.rows_per_frame, 1) * model.rows_per_frame


def check_budget(policy: Policy, budget: int, bundle: Bundle, text_rows: int, prefix: int, frame: int | None = None) -> None:
    """Raise UserError for a budget that is too small or too large. ``frame``: a frame's number of rows, including its text."""
    frame, limit = frame or bundle.vision.tokens_per_frame, bundle.limit
    smallest, largest = int(policy.layer_budgets.min()), int(policy.layer_budgets.max()) + policy.needs.working_rows
    least, what = (2 * frame, "two frames, which take") if policy.needs.keeps_first_frame else (frame, "one frame, which takes")
    if smallest < least:
        in_layer = "" if smallest == budget else f", {smallest} in its smallest layer,"
        raise UserError(f"a budget of {budget} tokens{in_layer} is less than {what} {least}; give a larger --budget")
    if prefix + largest + text_rows > limit:
        most = (limit - prefix - text_rows) * budget // largest
        raise UserError(
            f"a budget of {budget} tokens exceeds the model's limit of {limit} positions "
            f"(prefix {prefix}, text budget {text_rows}); policy {policy.name} allows at most {max(most, 0)}"
        )


def allocate(
    bundle: Bundle, capacities: list[int], chunk: int, capture_bytes: int = 0, device: KVDevice = "host", store_bytes: int = 0
) -> KVCache:
    """Allocate one stream's cache in the bundle's KV precision, with keys and values on ``device``.

    ``capture_bytes``: the size of the buffer for snapshots. ``store_bytes``: the host memory that a store may use. Raises
    UserError if cache, snapshot buffer, store and a chunk exceed the free memory, or if a needed CUDA device is unusable.
    """
    decoder = bundle.decoder
    shape = (decoder.layers, decoder.kv_heads, decoder.head_dim, capacities)
    rotary: dict[str, Any] = {
        "inv_freq": bundle.inv_freq.astype(np.float64),
        "axes": decoder.axes,
        "sections": decoder.rope_sections,
        "interleaved": decoder.rope_interleaved,
        "dtype": decoder.kv,
        "local": list(map(bool, decoder.windows)) if decoder.local_inv_freq else None,
    }
    wanted, pixels = KVCache.bytes_for(*shape, **rotary) if device == "host" else 0, chunk_bytes(chunk, bundle.vision)
    free = available().free
    if wanted + pixels + capture_bytes + store_bytes > free:
        needs = {"--budget": wanted + capture_bytes, "--chunk": pixels, "--host-bytes": store_bytes}
        takes = ", ".join(f"{option} {nbytes / 1e9:.1f} GB" for option, nbytes in needs.items() if nbytes)
        most = max(needs, key=needs.__getitem__)
        raise UserError(f"this stream's memory ({takes}) does not fit in {free / 1e9:.1f} GB; give a lower {most}")
    if device == "host":
        return KVCache(*shape, **rotary, scales=bundle.kv_scales())
    from edgevlm.runtime.cuda.cache import CudaCache

    return CudaCache(*shape, **rotary, scales=bundle.kv_scales())  # CudaCache checks the device's free memory


def chunk_bytes(frames: int, vision: VisionSpec) -> int:
    return frames * 3 * vision.size[0] * vision.size[1] * 4


def capture_bytes(decoder: DecoderSpec, vision: VisionSpec, rows: int, chunk: int, item: int) -> int:
    """Return the size in bytes of a snapshot's buffer.

    The policy's state is not counted, because the buffer grows if needed. ``rows``: the number of rows in all layers together.
    ``chunk``: the number of frames in a chunk. ``item``: the size of a stored number in bytes.
    """
    held = rows * decoder.kv_heads * (2 * decoder.head_dim * item + row_bytes(decoder.axes))
    features = chunk // vision.group * vision.tokens_per_frame * decoder.row_width * np.dtype(np.float32).itemsize
    alignment = 512 * (decoder.layers + 1)
    return held + features + chunk_bytes(chunk, vision) + alignment


class Pressure:
    """Makes chunks smaller while memory is short.

    A chunk's number of frames is halved while the free fraction of memory is below LOW, and doubled while it is above ENOUGH.
    ``most``: the maximum number of frames per chunk, used at the start. ``group``: the number of frames that the tower merges;
    each chunk contains a multiple of this number. ``notify``: called when chunks shrink, and when they are back to ``most``
    frames. ``short``: whether chunks have fewer than ``most`` frames now.
    """

    def __init__(
        self,
        most: int,
        notify: Notify,
        read: Callable[[], Available] = available,
        clock: Callable[[], float] = time.monotonic,
        group: int = 1,
    ) -> None:
        self.most = self.frames = most
        self.group, self.short = group, False
        self._notify, self._read, self._clock = notify, read, clock
        self._next = clock()

    def look(self) -> int:
        """Return the number of frames for the next chunk, after checking the free memory at most once per INTERVAL."""
        if self._clock() < self._next:
            return self.frames
        self._next = self._clock() + INTERVAL
        try:
            memory, before = self._read(), self.frames
        except (OSError, psutil.Error):  # the free memory is unknown while no file can be opened
            return self.frames
        if memory.free < LOW * memory.total:
            self.frames, self.short = max(1, before // self.group // 2) * self.group, True
        elif memory.free > ENOUGH * memory.total:
            self.frames = min(self.most, 2 * before)
            self.short = self.frames < self.most
        with suppress(OSError):  # keep running if the terminal has been closed
            if self.frames < before:
                left = f"{memory.free / 1e6:,.0f} of {memory.total / 1e6:,.0f} MB free"
                self._notify(f"memory is low ({left}): processing {self.frames} frames at a time instead of {before}")
            elif before < self.frames == self.most:
                self._notify(f"enough memory is free again: processing {self.most} frames at a time")
        return self.frames
