"""Watch a clip under full KV and record value norms and attention in every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import BundleError, UserError
from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.kernels import attention_mass, value_norms
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Appended, Layer, Needs
from edgevlm.runtime.policies.baselines import Full
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.stream import Stream

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

WINDOW = 32  # PureKV's w: the queries of this many newest vision rows score all earlier tokens
MOST_TOKENS = 6000
FEWEST_FRAMES = 10  # with fewer frames, their newest tenth is less than one frame


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip to watch: RGB frames, uint8 ``[H, W, 3]``, and questions to ask after the last frame."""

    name: str
    frames: Iterable[NDArray[np.uint8]]
    questions: Sequence[str]


@dataclass(frozen=True, slots=True)
class ClipTrace:
    """Measurements of each layer on a clip's n vision tokens, in stream order.

    ``attention``: the attention from the questions, averaged over heads, rows and questions, ``[n]``. ``norms``: the L2 norms
    of values, ``[kv_heads, n]``. ``mass``: the sums of PureKV's eq. 2, ``[kv_heads, n - w]``.
    """

    frames: int
    attention: list[Float64]
    norms: list[Float32]
    mass: list[Float32]


@dataclass
class TracedFull(Full):
    """Full KV that also records every layer's rotated queries for the newest WINDOW rows of the video."""

    def __post_init__(self) -> None:
        self.queries: dict[int, Float32] = {}  # layer -> [heads, w, head_dim]
        self.seq = np.zeros(0, np.int64)

    @property
    def needs(self) -> Needs:
        return Needs(probe_layers=tuple(range(self.shape.layers)))

    def after_append(self, layers: Sequence[Layer], appended: Appended) -> None:
        self.seq = np.concatenate([self.seq, appended.seq])[-WINDOW:]
        for layer, queries in appended.queries.items():
            rows = [self.queries[layer], queries] if layer in self.queries else [queries]
            self.queries[layer] = np.concatenate(rows, 1)[:, -WINDOW:]


class ClipTracer:
    """Watches clips with one model. ``frames``: how many frames to watch, by default as many as fit in MOST_TOKENS tokens.

    Raises UserError if the model cannot hold ``frames`` frames in full.
    """

    def __init__(self, model: Model, frames: int | None, questions: Iterable[str]) -> None:
        self.model, self._chat = model, Chat(model.bundle.chat, model.tokenizer)
        self._prefix = self._chat.prefix
        longest = max(len(self._asked(question)) for question in questions)
        per_frame, limit = model.rows_per_frame, model.bundle.limit
        self._text_rows = longest + len(model.closing)
        most = (limit - len(self._prefix) - self._text_rows) // per_frame
        self.frames = min(most, max(FEWEST_FRAMES, MOST_TOKENS // per_frame)) if frames is None else frames
        if self.frames > most:
            raise UserError(f"--frames {frames}: the model's {limit} positions hold at most {most} whole frames; set fewer")
        if self.frames < FEWEST_FRAMES:
            raise UserError(f"{self.frames} frames are too few for calibration; it requires {FEWEST_FRAMES}")

    def _asked(self, question: str) -> list[int]:
        return self._chat.suffix([], question)

    def __call__(self, clip: Clip) -> ClipTrace:
        """Watch a clip's first ``frames`` frames and ask its questions. Raises UserError if the clip is too short."""
        policy = TracedFull()
        stream = self._watch(clip, policy)
        if stream.frames < FEWEST_FRAMES:
            raise UserError(f"{clip.name}: {stream.frames} frames are too few for calibration; it requires {FEWEST_FRAMES}")
        cache, layers = stream.cache, range(stream.cache.layers)
        vision = np.flatnonzero(cache.kind(0)[0] == Kind.VISION)  # without evictions, all layers and heads hold the same rows
        older = vision[: len(vision) - len(policy.seq)]
        return ClipTrace(
            frames=stream.frames,
            norms=[value_norms(cache.value(layer)[:, vision], cache.value_scale(layer)) for layer in layers],
            mass=[_mass(cache, layer, policy.queries[layer], policy.seq)[:, older] for layer in layers],
            attention=self._attention(stream, clip.questions, vision),
        )

    def _watch(self, clip: Clip, policy: TracedFull) -> Stream:
        bundle, engine = self.model.bundle, self.model.engine
        budget = self.frames * self.model.rows_per_frame
        try:
            stream = Stream(self.model, policy, budget, self._prefix, self._text_rows, "never")
        except BundleError:  # a file cannot be read, so watching fewer frames would not help
            raise
        except UserError as error:
            raise UserError(f"{self.frames} frames cannot all be held ({error}); set fewer --frames") from None
        preprocess = Preprocessor(bundle.vision)
        for frame in islice(clip.frames, self.frames):
            stream.append_frames(engine.encode(preprocess(frame)[None]))
        return stream

    def _attention(self, stream: Stream, questions: Sequence[str], vision: NDArray[np.int64]) -> list[Float64]:
        cache, closing = stream.cache, self.model.closing
        held = int(cache.lengths[0])
        total = [np.zeros(len(vision)) for _ in range(cache.layers)]
        for question in questions:
            embeds = np.concatenate([closing, self.model.engine.embed(np.asarray(self._asked(question), np.int64))])
            with stream.question():
                probes = stream.probe_text(embeds)
                asked = cache.seq(0)[0, held + len(closing) :].copy()
                for layer, queries in probes.items():
                    rows = queries[:, len(closing) :]
                    mass = _mass(cache, layer, rows, asked)[:, vision]
                    total[layer] += mass.sum(0, dtype=np.float64) / (len(rows) * len(asked) * len(questions))
        return total


def _mass(cache: KVCache, layer: int, queries: Float32, seq: NDArray[np.int64]) -> Float32:
    return attention_mass(queries, seq, cache.key(layer), cache.seq(layer), scale=cache.key_scale(layer))
