"""What a weight precision costs and saves, beside float32: agreement, divergence, bytes, milliseconds a token."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.timing import timed
from edgevlm.calib.accuracy.policy_divergence import divergence
from edgevlm.calib.activations import passages, sample_activations
from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.checkpoint import ConfigOnly
from edgevlm.export.precisions import load_precision
from edgevlm.export.prequantised import ADVICE, prequantised
from edgevlm.export.scaling import in_blocks
from edgevlm.runtime.bundle import Bundle, Progress
from edgevlm.runtime.engine import KVBuffer
from edgevlm.runtime.model import Model
from edgevlm.runtime.positions import rope_tables

Float32 = NDArray[np.float32]

PASSAGE = 500  # tokens of a text that one context is given
CHUNK = 125  # appended in a call
STEPS = 30  # single tokens timed, in turn with float32's, after this many of a passage
BEFORE = 300
SIZES = ("decoder.weights", "embedding.npy", "embedding-scales.npy")


@dataclass(frozen=True, slots=True)
class Result:
    """Of one precision. kl: nats, KL(fp32 || precision); ms: of a token alone, and of float32's beside it, medians."""

    precision: str
    tokens: int
    top1: float
    kl: float
    bytes: int
    fp32_bytes: int
    ms: float
    fp32_ms: float
    threads: int

    def line(self) -> dict[str, Any]:
        return {
            "bench": "precision",
            "precision": self.precision,
            "tokens": self.tokens,
            "top1": round(self.top1, 4),
            "kl": round(self.kl, 5),
            "decoder_mb": round(self.bytes / 1e6, 1),
            "size_over_fp32": round(self.bytes / self.fp32_bytes, 3),
            "ms_per_token": round(self.ms, 2),
            "fp32_ms_per_token": round(self.fp32_ms, 2),
            "threads": self.threads,
        }


class Forward:
    """A model's decoder with memory for one passage."""

    def __init__(self, folder: Path, threads: int | None) -> None:
        self.model = Model.load(folder, threads=threads)
        spec = self.model.bundle.decoder
        shape = (1, spec.kv_heads, PASSAGE, spec.head_dim)
        memory = [[np.zeros(shape, np.float32) for _ in range(2)] for _ in range(spec.layers)]
        buffers = [KVBuffer(k.ctypes.data, v.ctypes.data, shape, k.dtype, (k, v)) for k, v in memory]
        self._decoder, self._inv_freq = self.model.engine.bind(buffers), self.model.bundle.inv_freq
        self._layers = spec.layers

    def logits(self, ids: Sequence[int], past: int = 0) -> Float32:
        """``[len(ids), vocab]`` of tokens at positions from ``past`` on."""
        tables = rope_tables(np.arange(past, past + len(ids), dtype=np.int32), self._inv_freq)
        embeds = self.model.engine.embed(np.asarray(ids, np.int64))
        return self._decoder.step(embeds, *tables, np.full(self._layers, past, np.int32), range(len(ids))).logits

    def texts(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[int, Float32]]:
        """The logits of texts, each by itself and chunk by chunk; before each the number of tokens that came before it."""
        before = 0
        for ids in texts:
            for start in range(0, len(ids), CHUNK):
                logits = self.logits(ids[start : start + CHUNK], start)
                yield before, logits
                before += len(logits)


def run(checkpoint: Path, precisions: Sequence[str], tokens: int, threads: int | None, progress: Progress) -> Iterator[Result]:
    """Export ``checkpoint`` in float32 and in each precision, and compare them on ``tokens`` tokens of text, teacher-forced.

    The text is that of :func:`passages`, in passages of PASSAGE tokens. Bundles, one besides float32's at a time,
    and float32's logits are in a temporary folder. Raises UserError for a precision that is not known and for a checkpoint that
    cannot be exported, or is rounded already.
    """
    for name in precisions:
        check_name(name)
    if packing := prequantised(ConfigOnly(checkpoint).config):
        where = checkpoint / "config.json"
        raise UserError(f"{where}: {packing.method} has rounded it to 4 bits, and there is no fp32 to compare with; {ADVICE}")
    with TemporaryDirectory(prefix="edgevlm-bench-") as place:
        folder = Path(place)
        progress("exporting in fp32")
        plain = Forward(export_checkpoint(checkpoint, folder / "fp32", precision="fp32"), threads)
        texts = passages(tokens, min(PASSAGE, plain.model.bundle.limit), plain.model.encode, held_out=True)
        shape = (sum(map(len, texts)), plain.model.bundle.decoder.vocab)
        wanted = np.memmap(folder / "logits", np.float32, "w+", shape=shape)
        for first, logits in plain.texts(texts):
            wanted[first : first + len(logits)] = logits
        for name in precisions:
            progress(f"measuring {name}")
            path = folder / "fp32"
            if name != "fp32":
                rounding, _, scaling = name.partition("+")
                samples = sample_activations(plain.model.bundle) if scaling else None
                path = export_checkpoint(checkpoint, folder / "other", precision=rounding, samples=samples, force=True)
            other = Forward(path, threads)
            yield compare(name, plain, other, texts, wanted)
            other.model.close()


def check_name(name: str) -> None:
    """Raise UserError unless ``name`` is a precision, or one of whole numbers and ``+awq``."""
    precision, plus, scaling = name.partition("+")
    load_precision(precision)
    if plus:
        in_blocks(precision)
        if scaling != "awq":
            raise UserError(f"--precisions {name!r}: the only scaling is awq; write {precision}+awq")


def compare(name: str, plain: Forward, other: Forward, texts: Sequence[Sequence[int]], wanted: Float32) -> Result:
    """``other`` on the texts beside the logits ``wanted`` of ``plain``, and single tokens of both in turn."""
    same, nats = [], []
    for first, found in other.texts(texts):
        expected = np.asarray(wanted[first : first + len(found)])
        same.append(expected.argmax(1) == found.argmax(1))
        nats.append(divergence(expected, found))
    before = min(BEFORE, len(texts[-1]) - 1)
    plain.logits(texts[-1][:before])
    other.logits(texts[-1][:before])
    token = texts[-1][before : before + 1]
    pairs = [(timed(lambda: plain.logits(token, before)), timed(lambda: other.logits(token, before))) for _ in range(STEPS)]
    fp32_ms, ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    engine: Any = other.model.engine
    return Result(
        precision=name,
        tokens=sum(map(len, same)),
        top1=float(np.concatenate(same).mean()),
        kl=float(np.concatenate(nats).mean()),
        bytes=weight_bytes(other.model.bundle),
        fp32_bytes=weight_bytes(plain.model.bundle),
        ms=ms,
        fp32_ms=fp32_ms,
        threads=engine.threads,
    )


def weight_bytes(bundle: Bundle) -> int:
    """Bytes of the decoder's weights, its embedding and its head."""
    return sum(record.bytes for name, record in bundle.files.items() if name in SIZES)
