"""What precisions cost and save beside float32, teacher-forced: weights of a checkpoint, and a bundle's KV cache."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.timing import timed
from edgevlm.calib.accuracy.policy_divergence import divergence
from edgevlm.errors import UserError
from edgevlm.export.kv_scales import in_fp32
from edgevlm.packages import needs
from edgevlm.progress import Notify
from edgevlm.runtime.budget import allocate
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cache import Rows
from edgevlm.runtime.engine import Float32
from edgevlm.runtime.model import Model
from edgevlm.runtime.positions import rope_tables
from edgevlm.runtime.sampling import Sampler

PASSAGE = 500  # tokens of a text that one context is given
CHUNK = 125  # appended in a call
STEPS = 30  # single tokens timed, in turn with float32's, after BEFORE tokens of a passage
BEFORE = 300
PIECE = 64  # tokens in a call where KV precisions are compared
WINDOW = 2048  # tokens before the caches are emptied, at most
WEIGHTS = ("decoder.weights", "embedding.npy", "embedding-scales.npy")


class Forced:
    """A decoder with a cache of ``rows`` rows, fed given tokens whatever it would have said next."""

    def __init__(self, model: Model, bundle: Bundle, rows: int, variant: str = "full") -> None:
        self.model, self.bundle, self.rows = model, bundle, rows
        self.cache = allocate(bundle, [rows] * bundle.decoder.layers, 1)
        self._decoder = model.engine.bind(self.cache.buffers(), variant=variant)

    def empty(self) -> None:
        self.cache.evict([np.zeros((self.cache.kv_heads, int(n)), np.bool_) for n in self.cache.lengths])

    def logits(self, ids: Sequence[int] | NDArray[np.int64], *, keep: bool = True) -> Float32:
        """The logits after each of the tokens, ``[n, vocabulary]``; they stay in the cache unless ``keep`` is False."""
        count, held = len(ids), int(self.cache.lengths[0])
        position = np.repeat(np.arange(held, held + count, dtype=np.int32)[:, None], self.cache.axes, 1)
        tables = rope_tables(position, self.bundle.inv_freq, self.cache.pair_axis)
        self.cache.reserve(count)
        embeds = self.model.engine.embed(np.asarray(ids, np.int64))
        found = self._decoder.step(embeds, *tables, self.cache.lengths, range(count)).logits
        if keep:
            none, seq = np.zeros(count, np.int16), np.arange(held, held + count, dtype=np.int64)
            self.cache.commit(Rows(none.astype(np.uint8), seq, none.astype(np.int32), none, none, position))
        else:
            self.cache.abort()
        return found

    def texts(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Float32]]:
        """The logits of texts, each by itself and chunk by chunk, with the number of tokens before the chunk."""
        before = 0
        for ids in texts:
            self.empty()
            for start in range(0, len(ids), CHUNK):
                logits = self.logits(ids[start : start + CHUNK])
                yield before, logits
                before += len(logits)


def weights(
    model: Sequence[str],
    precisions: Sequence[str] = ("fp32", "fp16", "int8", "int4", "int4-zp", "int4+gptq"),
    tokens: int = 2000,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Export a checkpoint in float32 and in each precision, and compare them on ``tokens`` tokens of Python's help topics.

    ``top1``: how often the same token is likeliest; ``kl``: KL(fp32 || precision), mean nats; single tokens are timed in turn.
    Raises UserError for an unknown precision and for a checkpoint that cannot be exported or is quantized already.
    """
    with needs("exporting a checkpoint"):
        from edgevlm.calib.activations import passages, sample_activations
        from edgevlm.export import export_checkpoint
        from edgevlm.export.checkpoint import ConfigOnly
        from edgevlm.export.prequantised import ADVICE, prequantised
    checkpoint = Path(model[0])
    for name in precisions:
        check_precision(name)
    if packing := prequantised(ConfigOnly(checkpoint).config):
        where = checkpoint / "config.json"
        raise UserError(f"{where}: {packing.method} has rounded it to 4 bits, and there is no fp32 to compare with; {ADVICE}")
    with TemporaryDirectory(prefix="edgevlm-bench-") as place:
        folder, name_of = Path(place), ConfigOnly(checkpoint).name
        about = {"bench": "precision", "model": name_of}
        progress("exporting in fp32")
        fp32 = Model.load(export_checkpoint(checkpoint, folder / "fp32", precision="fp32"), threads=threads)
        texts = passages(tokens, min(PASSAGE, fp32.bundle.limit), fp32.encode, held_out=True)
        plain = Forced(fp32, fp32.bundle, PASSAGE)
        expected = np.memmap(folder / "logits", np.float32, "w+", shape=(sum(map(len, texts)), fp32.bundle.decoder.vocab))
        for first, logits in plain.texts(texts):
            expected[first : first + len(logits)] = logits
        samples = None
        for name in precisions:
            path = folder / "fp32"
            if name != "fp32":
                progress(f"exporting in {name}")
                stored, _, rounding = name.partition("+")
                if rounding and samples is None:
                    samples = sample_activations(fp32.bundle)
                path = export_checkpoint(
                    checkpoint, folder / "other", precision=stored, samples=samples if rounding else None, force=True
                )
            other = Model.load(path, threads=threads)
            progress(f"comparing {name}")
            yield about | {"precision": name} | compare_weights(plain, Forced(other, other.bundle, PASSAGE), texts, expected)
            other.close()
        fp32.close()


def check_precision(name: str) -> None:
    """Raise UserError unless ``name`` is a precision, or one of integers and ``+gptq``."""
    from edgevlm.export.precisions import load_precision
    from edgevlm.export.samples import rounded_layout

    precision, plus, rounding = name.partition("+")
    load_precision(precision)
    if plus:
        rounded_layout(precision)
        if rounding != "gptq":
            raise UserError(f"--precisions {name!r}: the only rounding is gptq; write {precision}+gptq")


def compare_weights(plain: Forced, other: Forced, texts: Sequence[Sequence[int]], expected: Float32) -> dict[str, Any]:
    """``other`` on the texts beside the logits ``expected`` of ``plain``, and single tokens of both in turn."""
    same, nats = [], []
    for first, found in other.texts(texts):
        wanted = np.asarray(expected[first : first + len(found)])
        same.append(wanted.argmax(1) == found.argmax(1))
        nats.append(divergence(wanted, found))
    before = min(BEFORE, len(texts[-1]) - 1)
    for forced in (plain, other):
        forced.empty()
        forced.logits(texts[-1][:before])
    token = texts[-1][before : before + 1]
    times = [[timed(lambda: forced.logits(token, keep=False)) for forced in (plain, other)] for _ in range(STEPS)]  # noqa: B023
    fp32_ms, ms = (statistics.median(column) for column in zip(*times, strict=True))
    size, fp32_size = (weight_bytes(forced.bundle) for forced in (other, plain))
    engine: Any = other.model.engine
    return {
        "tokens": sum(map(len, same)), "top1": round(float(np.concatenate(same).mean()), 4),
        "kl": round(float(np.concatenate(nats).mean()), 5), "decoder_mb": round(size / 1e6, 1),
        "size_over_fp32": round(size / fp32_size, 3), "ms_per_token": round(ms, 2), "fp32_ms_per_token": round(fp32_ms, 2),
        "threads": engine.threads,
    }  # fmt: skip


def weight_bytes(bundle: Bundle) -> int:
    """Bytes of the decoder's weights, its embedding and its head."""
    return sum(record.bytes for name, record in bundle.files.items() if name in WEIGHTS)


def kv_cache(
    model: Sequence[str],
    tokens: int = 2000,
    text: Path | None = None,
    threads: int | None = None,
    *,
    progress: Notify = lambda what: None,
) -> Iterator[dict[str, Any]]:
    """Compare each bundle's KV cache (int8 or fp16) with an fp32 one, on the same weights and text.

    ``text``: a file, by default what the model says itself at temperature 1, seed 0. ``kl``: KL(fp32 || own) in nats, mean and
    largest; ``saturated``: fraction of numbers beyond their scale. Raises UserError for a bundle of fp32 and a text too short.
    """
    for name in model:
        loaded = Model.load(name, threads=threads)
        try:
            if loaded.bundle.decoder.kv == "fp32":
                raise UserError(f"{name}: is of fp32; give one exported with --kv int8 or fp16")
            yield _compare_kv(name, loaded, tokens, text, progress)
        finally:
            loaded.close()


def _compare_kv(name: str, model: Model, tokens: int, text: Path | None, progress: Notify) -> dict[str, Any]:
    window = min(WINDOW, model.bundle.limit, tokens)
    window = max(window // PIECE, 1) * min(PIECE, window)
    plain, own = Forced(model, in_fp32(model.bundle), window, "fp32-kv"), Forced(model, model.bundle, window)
    progress(f"{name}: {tokens:,} tokens of text")
    ids = _spoken(plain, tokens) if text is None else _written(model, text, tokens)
    nats, same = np.zeros(tokens), np.zeros(tokens, np.bool_)
    for start in range(0, tokens, min(PIECE, window)):
        if start % window == 0:
            plain.empty()
            own.empty()
        progress(f"{name}: token {start:,} of {tokens:,}")
        piece = slice(start, min(start + min(PIECE, window), tokens))
        expected, found = plain.logits(ids[piece]), own.logits(ids[piece])
        nats[piece], same[piece] = divergence(expected, found), expected.argmax(1) == found.argmax(1)
    spec, cache = model.bundle.decoder, own.cache
    numbers = spec.layers * spec.kv_heads * spec.head_dim
    return {
        "bench": "kv-precision", "model": name, "kv": spec.kv, "tokens": tokens,
        "kl": float(f"{nats.mean():.4g}"), "kl_most": float(f"{nats.max():.4g}"), "top1": round(float(same.mean()), 5),
        "bytes_per_token": 2 * numbers * cache.dtype.itemsize,
        "saturated": float(f"{cache.saturated / (1.5 * numbers * tokens):.4g}"),
    }  # fmt: skip


def _written(model: Model, text: Path, tokens: int) -> NDArray[np.int64]:
    """The first tokens of a text file."""
    try:
        ids = model.encode(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{text}: cannot be read as text ({error}); give a file of UTF-8") from None
    if len(ids) < tokens:
        raise UserError(f"{text}: holds {len(ids)} tokens of this model; give a longer text, or --tokens {len(ids)}")
    return np.asarray(ids[:tokens], np.int64)


def _spoken(forced: Forced, tokens: int) -> NDArray[np.int64]:
    """What the model says at temperature 1, seed 0."""
    draw, ids = Sampler(temperature=1.0, seed=0), [0]
    while len(ids) < tokens:
        if int(forced.cache.lengths[0]) == forced.rows:
            forced.empty()
        ids.append(draw(forced.logits(ids[-1:])[0]))
    forced.empty()
    return np.array(ids, np.int64)
