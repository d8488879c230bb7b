"""What a stream allocates at start: the budget's arena, a chunk of pixels, and rows for a question's text."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle, DecoderSpec, VisionSpec
from edgevlm.runtime.cache import KVCache, row_bytes
from edgevlm.runtime.chunk import chunk_bytes
from edgevlm.runtime.engine import KVDevice
from edgevlm.runtime.framing import Framing
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.pressure import available

DEFAULT_BUDGET = 6000  # vision tokens per layer


@dataclass(frozen=True, slots=True)
class TextBudget:
    """Tokens set aside at start for each part of a question's turn: the rows a question may take beside the memory.

    pictures: how many a question may show.
    """

    conversation: int
    question: int
    answer: int
    pictures: int = 0

    @classmethod
    def fitting(cls, position_limit: int) -> TextBudget:
        """256 tokens each, or a sixteenth of a small model's positions."""
        part = min(256, position_limit // 16)
        return cls(part, part, part)

    def rows(self, model: Model) -> int:
        """Rows set aside in each layer: conversation, question, the model's closing rows, answer, and pictures."""
        pictures = self.pictures * Framing(model).rows_per_frame
        return self.conversation + self.question + self.answer + len(model.closing) + pictures


def frames_ahead(model: Model, chunk: int) -> int:
    """Rows that a chunk of ``chunk`` frames appends at the most."""
    framing = Framing(model)
    return -(-chunk // framing.vision.group) * framing.rows_per_frame


def present_rows(model: Model) -> int:
    """Rows of the newest frame that a question appends, where only what changed enters the memory.

    Of a tower that merges frames, those that changed in the frame before a group that waits, too.
    """
    framing = Framing(model)
    return (2 if framing.vision.group > 1 else 1) * framing.rows_per_frame


def default_budget(model: Model, policy: Policy, most: int) -> int:
    """Half of the model's positions, DEFAULT_BUDGET tokens at most, in whole frames; all that fits (``most``) for full."""
    per_frame = Framing(model).rows_per_frame
    budget = min(DEFAULT_BUDGET, model.bundle.limit // 2, most) if policy.bounded else most
    return max(budget // per_frame, 1) * per_frame


def check_budget(
    policy: Policy, budget: int, bundle: Bundle, text_rows: int, prefix: int, ahead: int = 0, frame: int | None = None
) -> None:
    """Refuse a budget that cannot work, before anything is allocated.

    ahead: rows that are appended before a compression. frame: rows of a frame, its tokens unless text stands around them.
    """
    frame, limit = frame or bundle.vision.tokens_per_frame, bundle.limit
    smallest, largest = int(policy.layer_budgets.min()), int(policy.layer_budgets.max()) + policy.working_rows
    least, what = (2 * frame, "two frames, which take") if policy.keeps_first_frame else (frame, "one frame, which takes")
    if smallest < least:
        of_layer = "" if smallest == budget else f", {smallest} in its smallest layer,"
        enough = _enough(policy, least)
        raise UserError(f"a budget of {budget} tokens{of_layer} is less than {what} {least}; give --budget {enough} or more")
    if prefix + largest + ahead + text_rows > limit:
        most = (limit - prefix - ahead - text_rows) * budget // largest
        chunk = f", a chunk of {ahead}" if ahead else ""
        raise UserError(
            f"a budget of {budget} tokens passes the model's limit of {limit} positions "
            f"(prefix {prefix}, text budget {text_rows}{chunk}); policy {policy.name} can have {max(most, 0)} at most"
        )


def _enough(policy: Policy, least: int) -> int:
    """The smallest budget that leaves every layer ``least`` tokens; the policy is of no more use afterwards."""

    def smallest_of(budget: int) -> int:
        policy.attach(budget, policy.shape)
        return int(policy.layer_budgets.min())

    budgets = range(least, 10_000 * least)
    return budgets[bisect_left(budgets, least, key=smallest_of)]


def allocate(
    bundle: Bundle, capacities: list[int], chunk: int, capture_bytes: int = 0, device: KVDevice = "host", store_bytes: int = 0
) -> KVCache:
    """The arena of one stream, of the bundle's KV precision; capture_bytes: of the buffer that snapshots are taken in, if any.

    device: where keys and values are kept. store_bytes: host memory that a store may take. Raises UserError, before it
    is touched, when all of that and a chunk do not fit in the free memory, and where a CUDA device is needed and cannot be
    used.
    """
    decoder = bundle.decoder
    shape = (decoder.layers, decoder.kv_heads, decoder.head_dim, capacities)
    rotary: dict[str, Any] = {
        "inv_freq": bundle.inv_freq.astype(np.float64),
        "axes": decoder.axes,
        "sections": decoder.rope_sections,
        "interleaved": decoder.rope_interleaved,
        "dtype": decoder.kv,
    }
    wanted, pixels = KVCache.bytes_for(*shape, **rotary) if device == "host" else 0, chunk_bytes(chunk, bundle.vision)
    free = available().free
    if wanted + pixels + capture_bytes + store_bytes > free:
        lower, frames = "--budget", f", snapshots {capture_bytes / 1e9:.1f} GB" if capture_bytes else ""
        if store_bytes:
            lower, frames = "--host-bytes", f"{frames}, what leaves it {store_bytes / 1e9:.1f} GB"
        if pixels > wanted:
            lower, frames = "--chunk", f"{frames}, a chunk of frames {pixels / 1e9:.1f} GB"
        raise UserError(
            f"this budget's cache takes {wanted / 1e9:.1f} GB{frames} and {free / 1e9:.1f} GB are free; give a lower {lower}"
        )
    if device == "host":
        return KVCache(*shape, **rotary, scales=bundle.kv_scales())
    from edgevlm.runtime.cuda.cache import CudaCache

    return CudaCache(*shape, **rotary, scales=bundle.kv_scales())  # which sees for itself whether the device has room


def capture_bytes(decoder: DecoderSpec, vision: VisionSpec, rows: int, chunk: int, item: int) -> int:
    """Bytes that a snapshot of a stream copies: ``rows`` of all layers together, elements of ``item`` bytes, and a chunk.

    What a policy keeps is known only when it keeps it; the buffer grows by it.
    """
    held = rows * decoder.kv_heads * (2 * decoder.head_dim * item + row_bytes(decoder.axes))
    features = chunk // vision.group * vision.tokens_per_frame * decoder.row_width * np.dtype(np.float32).itemsize
    alignment = 512 * (decoder.layers + 1)
    return held + features + chunk_bytes(chunk, vision) + alignment
