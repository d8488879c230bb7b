"""What weight precisions cost and save beside float32, teacher-forced."""

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
from edgevlm.packages import needs
from edgevlm.progress import Notify
from edgevlm.runtime.budget import allocate
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cache import Rows
from edgevlm.runtime.engine import Float32
from edgevlm.runtime.model import Model
from edgevlm.runtime.positions import rope_tables

PASSAGE = 500  # tokens of a text that one context is given
CHUNK = 125  # appended in a call
STEPS = 30  # single tokens timed, in turn with float32's, after BEFORE tokens of a passage
BEFORE = 300
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
    from edgevlm.export.profiles import rounded_layout

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
