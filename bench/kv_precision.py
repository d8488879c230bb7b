"""What a KV precision costs: a bundle's own cache beside an fp32 one, on the same weights and the same text.

Tokens are teacher-forced: both caches are given the same ones, whatever either would have said next. The text is a file's, or
one that the model says itself with its fp32 cache, drawn with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.accuracy.policy_divergence import divergence
from edgevlm.errors import UserError
from edgevlm.export.kv_scales import in_fp32
from edgevlm.runtime.budget import allocate
from edgevlm.runtime.bundle import Bundle, Progress
from edgevlm.runtime.cache import KVCache, Rows
from edgevlm.runtime.engine import Decoder, Float32
from edgevlm.runtime.model import Model
from edgevlm.runtime.positions import rope_tables
from edgevlm.runtime.sampling import Sampler

PIECE = 64  # tokens in one call
WINDOW = 2048  # tokens before the caches are emptied, at most
FURTHEST = 20_000  # positions that a turn takes keys away


@dataclass(frozen=True, slots=True)
class Result:
    """Of ``tokens`` next-token distributions p (fp32) and q: KL(p || q) in nats, its mean and its largest value.

    top1: the share for which both have the same most probable token. bytes: of keys and values of a token in all layers.
    turns: of all keys before each PIECE, as a re-indexing turns them. saturated: numbers beyond their scale, as a share of all.
    """

    model: str
    kv: str
    tokens: int
    turns: int
    kl: float
    kl_most: float
    top1: float
    bytes: int
    saturated: float

    def line(self) -> dict[str, Any]:
        return {
            "bench": "kv-precision",
            "model": self.model,
            "kv": self.kv,
            "tokens": self.tokens,
            "turns": self.turns,
            "kl": float(f"{self.kl:.4g}"),
            "kl_most": float(f"{self.kl_most:.4g}"),
            "top1": round(self.top1, 5),
            "bytes_per_token": self.bytes,
            "saturated": float(f"{self.saturated:.4g}"),
        }


@dataclass(slots=True)
class Forced:
    """A cache and its decoder, fed with given tokens."""

    model: Model
    bundle: Bundle
    variant: str
    rows: int
    cache: KVCache = field(init=False)
    decoder: Decoder = field(init=False)

    def __post_init__(self) -> None:
        self.cache = allocate(self.bundle, [self.rows] * self.bundle.decoder.layers, 1)
        self.decoder = self.model.engine.bind(self.cache.buffers(), variant=self.variant)

    def empty(self) -> None:
        self.cache.evict([np.zeros((self.cache.kv_heads, int(n)), np.bool_) for n in self.cache.lengths])

    def logits(self, ids: NDArray[np.int64]) -> Float32:
        """Append tokens ``[n]``; the logits after each of them, ``[n, vocabulary]``."""
        count, held = len(ids), int(self.cache.lengths[0])
        position = np.repeat(np.arange(held, held + count, dtype=np.int32)[:, None], self.cache.axes, 1)
        tables = rope_tables(position, self.bundle.inv_freq, self.cache.pair_axis)
        self.cache.reserve(count)
        found = self.decoder.step(self.model.engine.embed(ids), *tables, self.cache.lengths, range(count)).logits
        none, seq = np.zeros(count, np.int16), np.arange(held, held + count, dtype=np.int64)
        self.cache.commit(Rows(none.astype(np.uint8), seq, none.astype(np.int32), none, none, position))
        return found

    def turn(self, turns: int, random: np.random.Generator) -> None:
        """Turn all keys so many times, each time to other positions, and the last time to where they belong."""
        places = [self.cache.position(layer).copy() for layer in range(self.cache.layers)]
        for turn in range(turns):
            for layer, place in enumerate(places):
                away = 0 if turn == turns - 1 else int(random.integers(1, FURTHEST))
                self.cache.shift(layer, place + np.int32(away))


def run(
    models: Sequence[str], tokens: int, text: Path | None, turns: int, threads: int | None, progress: Progress
) -> Iterator[Result]:
    """A result for each bundle, as it comes. Raises UserError for one of fp32 and a text too short."""
    for name in models:
        model = Model.load(name, threads=threads)
        try:
            if model.bundle.decoder.kv == "fp32":
                raise UserError(f"{name}: is of fp32; give one exported with --kv int8 or fp16")
            yield measure(name, model, tokens, text, turns, progress)
        finally:
            model.close()


def measure(name: str, model: Model, tokens: int, text: Path | None, turns: int, progress: Progress) -> Result:
    """Both caches over ``tokens`` tokens, in windows of as many as the model has positions for."""
    window = min(WINDOW, model.bundle.limit, tokens)
    window, random = max(window // PIECE, 1) * min(PIECE, window), np.random.default_rng(0)
    plain = Forced(model, in_fp32(model.bundle), "fp32-kv", window)
    own = Forced(model, model.bundle, "whole", window)
    progress(f"{name}: {tokens:,} tokens of text")
    ids = spoken(plain, tokens) if text is None else written(model, text, tokens)
    nats, same = np.zeros(tokens), np.zeros(tokens, np.bool_)
    for start in range(0, tokens, min(PIECE, window)):
        if start % window == 0:
            plain.empty()
            own.empty()
        own.turn(turns, random)
        progress(f"{name}: token {start:,} of {tokens:,}")
        piece = slice(start, min(start + min(PIECE, window), tokens))
        expected, found = plain.logits(ids[piece]), own.logits(ids[piece])
        nats[piece] = divergence(expected, found)
        same[piece] = expected.argmax(1) == found.argmax(1)
    spec, cache = model.bundle.decoder, own.cache
    numbers = spec.layers * spec.kv_heads * spec.head_dim
    return Result(
        name, spec.kv, tokens, turns, float(nats.mean()), float(nats.max()), float(same.mean()),
        2 * numbers * cache.dtype.itemsize, cache.saturated / (1.5 * numbers * tokens),
    )  # fmt: skip


def written(model: Model, text: Path, tokens: int) -> NDArray[np.int64]:
    """The first tokens of a text file, ``[tokens]``."""
    try:
        ids = model.encode(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{text}: cannot be read as text ({error}); give a file of UTF-8") from None
    if len(ids) < tokens:
        raise UserError(f"{text}: holds {len(ids)} tokens of this model; give a longer text, or --tokens {len(ids)}")
    return np.asarray(ids[:tokens], np.int64)


def spoken(forced: Forced, tokens: int) -> NDArray[np.int64]:
    """What the model says, drawn at temperature 1 with a fixed seed, ``[tokens]``."""
    draw, ids = Sampler(temperature=1.0, seed=0), [0]
    while len(ids) < tokens:
        if int(forced.cache.lengths[0]) == forced.rows:
            forced.empty()
        ids.append(draw(forced.logits(np.array(ids[-1:], np.int64))[0]))
    forced.empty()
    return np.array(ids, np.int64)
