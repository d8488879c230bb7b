"""Measure how much each weight precision changes a model's next tokens, compared with float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.timing import spread, timed
from edgevlm.calib.accuracy.policy_divergence import divergence
from edgevlm.errors import UserError
from edgevlm.packages import needs
from edgevlm.progress import show
from edgevlm.runtime.budget import allocate
from edgevlm.runtime.cache import Rows, sight_of
from edgevlm.runtime.engine import Float32
from edgevlm.runtime.model import Model
from edgevlm.runtime.positions import rope_tables

PASSAGE = 500  # tokens per text
CHUNK = 125
STEPS = 30  # number of single tokens timed, in turns with float32, after BEFORE tokens of text
BEFORE = 300
WEIGHTS = ("decoder.weights", "embedding.npy", "embedding-scales.npy")


class Forced:
    """Feeds given tokens to a decoder, whatever it would have predicted (teacher forcing). The cache has ``PASSAGE`` rows."""

    def __init__(self, model: Model) -> None:
        self.model, self.bundle = model, model.bundle
        self.cache = allocate(self.bundle, [PASSAGE] * self.bundle.decoder.layers, 1)
        self._decoder = model.engine.bind(self.cache.buffers())

    def empty(self) -> None:
        self.cache.evict([np.zeros((self.cache.kv_heads, int(n)), np.bool_) for n in self.cache.lengths])

    def logits(self, ids: Sequence[int] | NDArray[np.int64], *, keep: bool = True) -> Float32:
        """Return the logits ``[n, vocabulary]`` after each token. The tokens stay in the cache unless ``keep`` is False."""
        count, held = len(ids), int(self.cache.lengths[0])
        position = np.repeat(np.arange(held, held + count, dtype=np.int32)[:, None], self.cache.axes, 1)
        tables = rope_tables(position, self.bundle.inv_freq, self.cache.pair_axis)
        rows = Rows.text(position)
        sight = sight_of(self.bundle.decoder, self.cache, rows)
        self.cache.reserve(count)
        embeds = self.model.engine.embed(np.asarray(ids, np.int64))
        found = self._decoder.step(embeds, *tables, self.cache.lengths, range(count), **sight).logits
        if keep:
            self.cache.commit(replace(rows, seq=rows.seq + held))
        else:
            self.cache.abort()
        return found

    def texts(self, texts: Sequence[Sequence[int]]) -> Iterator[Float32]:
        """Yield the logits of separate texts, chunk by chunk."""
        for ids in texts:
            self.empty()
            for start in range(0, len(ids), CHUNK):
                yield self.logits(ids[start : start + CHUNK])


def weights(
    model: str,
    precisions: Sequence[str] = ("fp32", "fp16", "int8", "int4", "int4-zp", "int4+gptq"),
    tokens: int = 2000,
    threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Export a checkpoint in float32 and in each precision, and compare them on ``tokens`` tokens of Python's help topics.

    ``top1``: how often the most likely token is the same as in float32. ``kl``: the mean KL(fp32 || precision) in nats. Raises
    UserError for an unknown precision and a checkpoint that cannot be exported or is already quantized.
    """
    with needs("exporting a checkpoint"):
        from edgevlm.calib.activations import passages, sample_activations
        from edgevlm.export import export_checkpoint
        from edgevlm.export.checkpoint import ConfigOnly
        from edgevlm.export.precisions import load_precision
        from edgevlm.export.prequantised import ADVICE, prequantised
        from edgevlm.export.profiles import rounded_layout
    checkpoint, config = Path(model), ConfigOnly(model)
    for name in precisions:
        stored, plus, rounding = name.partition("+")
        load_precision(stored)
        if plus:
            rounded_layout(stored)
        if plus and rounding != "gptq":
            raise UserError(f"--precisions {name!r}: only gptq rounding is supported; use {stored}+gptq")
    if packing := prequantised(config.config):
        where = checkpoint / "config.json"
        raise UserError(
            f"{where}: its weights were rounded to 4 bits by {packing.method}, so there is no fp32 to compare with; {ADVICE}"
        )
    with TemporaryDirectory(prefix="edgevlm-bench-") as place:
        folder, samples = Path(place), None
        show("exporting in fp32")
        fp32 = Model.load(export_checkpoint(checkpoint, folder / "fp32", precision="fp32", kv="fp32"), threads=threads)
        texts = passages(tokens, min(PASSAGE, fp32.bundle.limit), fp32.encode, held_out=True)
        plain = Forced(fp32)
        expected = np.memmap(folder / "logits", np.float32, "w+", shape=(sum(map(len, texts)), fp32.bundle.decoder.vocab))
        first = 0
        for logits in plain.texts(texts):
            expected[first : first + len(logits)] = logits
            first += len(logits)
        for name in precisions:
            path = folder / "fp32"
            if name != "fp32":
                show(f"exporting in {name}")
                stored, rounding, _ = name.partition("+")
                if rounding and samples is None:
                    samples = sample_activations(fp32.bundle)
                given = samples if rounding else None
                path = export_checkpoint(checkpoint, folder / "other", precision=stored, samples=given, kv="fp32", force=True)
            other = Model.load(path, threads=threads)
            show(f"comparing {name}")
            found = compare(plain, Forced(other), texts, expected)
            yield {"bench": "precision", "model": config.name, "precision": name, **found}
            other.close()
        fp32.close()


def compare(plain: Forced, other: Forced, texts: Sequence[Sequence[int]], expected: Float32) -> dict[str, Any]:
    """Compare a decoder's logits with float32's, then time single tokens, alternating between the decoders.

    ``expected``: float32's logits for the texts.
    """
    same, nats, first = [], [], 0
    for found in other.texts(texts):
        wanted = np.asarray(expected[first : first + len(found)])
        same.append(wanted.argmax(1) == found.argmax(1))
        nats.append(divergence(wanted, found))
        first += len(found)
    before, steps = min(BEFORE, len(texts[-1]) - 1), []
    for forced in (plain, other):
        forced.empty()
        forced.logits(texts[-1][:before])
        steps.append(partial(forced.logits, texts[-1][before : before + 1], keep=False))
    fp32_ms, ms = zip(*([timed(step) for step in steps] for _ in range(STEPS)), strict=True)
    fp32_size, size = (
        sum(record.bytes for name, record in forced.bundle.files.items() if name in WEIGHTS) for forced in (plain, other)
    )
    engine: Any = other.model.engine
    return {
        "tokens": first, "top1": round(float(np.concatenate(same).mean()), 4),
        "kl": round(float(np.concatenate(nats).mean()), 5), "decoder_mb": round(size / 1e6, 1),
        "size_over_fp32": round(size / fp32_size, 3), "ms_per_token": spread(ms, "ms", digits=2)["ms"],
        "fp32_ms_per_token": spread(fp32_ms, "ms", digits=2)["ms"], "threads": engine.threads,
    }  # fmt: skip
