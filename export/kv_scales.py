"""Measure the scales of an int8 cache from the ranges of keys and values in an fp32 cache on calibration input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import MANIFEST, Bundle, hash_file, seal_manifest
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.engine import DEFAULT_ENGINE, load_engine
from edgevlm.runtime.kv import SCALES, KVScales
from edgevlm.runtime.model import Model, load_tokenizer
from edgevlm.runtime.policies.baselines import Full
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.stream import Stream

HEADROOM = 1.25  # scales cover this many times the measured range
FRAMES = 8
ANSWER = 16
RANDOM = 128  # tokens from the whole vocabulary, because the scales must cover rare tokens
QUESTIONS = (
    "What happens in the video?",
    "List every number, name and colour that you see: 0 1 2 3 4 5 6 7 8 9, A-Z, red, green, blue.",
    'Answer as JSON with the keys "when", "where" and "who"; then explain, step by step, how sure you are (0-100 %).',
)


def add_scales(folder: Path, manifest: dict[str, Any], progress: Notify) -> None:
    """Measure the KV scales of an int8 bundle, and add the file of scales to the bundle's manifest.

    During the measurement, ``bundle.json`` names fp32 as the cache's type. Raises UserError if no engine is installed.
    """
    exact = {**manifest["decoder"], "kv": "fp32"}
    (folder / MANIFEST).write_bytes(seal_manifest({**manifest, "decoder": exact}))
    progress("measuring KV scales")
    measured_scales(Bundle.load(folder, verify="size")).save(folder / SCALES)
    manifest["files"][SCALES] = asdict(hash_file(folder / SCALES))


def measured_scales(
    bundle: Bundle, frames: Iterable[NDArray[np.uint8]] | None = None, count: int = FRAMES, threads: int | None = None
) -> KVScales:
    """Run the model on frames, questions and random tokens, and return the scales for an int8 cache.

    Keys are measured by rotary pair and values by channel, for each layer and KV head. The scales allow for HEADROOM times the
    largest magnitudes found. Raises UserError if the model supports too few positions. ``frames``: uint8 RGB ``[H, W, 3]``, by
    default :func:`colour_fields`. ``count``: how many frames to use.
    """
    exact = bundle.in_fp32()
    spec = exact.decoder
    key = np.zeros((spec.layers, spec.kv_heads, spec.head_dim // 2), np.float32)
    value = np.zeros((spec.layers, spec.kv_heads, spec.head_dim), np.float32)
    tokenizer = load_tokenizer(exact)
    with closing(load_engine(DEFAULT_ENGINE, exact, threads=threads)) as engine:
        model = Model(exact, engine, tokenizer, exact.closing_rows())
        chat = Chat(exact.chat, tokenizer)
        prefix = chat.prefix
        asked = [np.asarray(chat.suffix([], question), np.int64) for question in QUESTIONS]
        asked.append(np.random.default_rng(0).integers(0, spec.vocab, RANDOM))
        text_rows = max(map(len, asked)) + len(model.closing) + ANSWER
        count = min(count, (exact.limit - len(prefix) - text_rows) // model.rows_per_frame)
        if count < 1:
            why = f"the model's {exact.limit} positions cannot hold a frame and a question to measure KV scales"
            raise UserError(f"{why}; export it with --kv fp16")
        stream = Stream(model, Full(), count * model.rows_per_frame, prefix, text_rows, "never")
        preprocess = Preprocessor(exact.vision)
        for frame in islice(colour_fields(exact.vision.size) if frames is None else frames, count):
            stream.append_frames(engine.encode(preprocess(frame)[None]))
        for ids in asked:
            with stream.question():
                logits = stream.append_text(np.concatenate([model.closing, engine.embed(ids)]))
                for _ in range(ANSWER):
                    logits = stream.append_text(engine.embed(np.array([int(np.argmax(logits))])))
                for layer in range(spec.layers):
                    pairs = np.hypot(*np.split(stream.cache.dequantize("key", layer), 2, -1))
                    np.maximum(key[layer], pairs.max(1), out=key[layer])
                    np.maximum(value[layer], np.abs(stream.cache.dequantize("value", layer)).max(1), out=value[layer])
    return KVScales.holding(key, value, HEADROOM)


def colour_fields(size: tuple[int, int]) -> Iterator[NDArray[np.uint8]]:
    """Yield endless frames of changing colour fields, a moving box and fine noise, each uint8 RGB ``[height, width, 3]``."""
    height, width = size
    random = np.random.default_rng(0)
    for number in range(1 << 30):
        fields = random.integers(0, 256, (6, 8, 3)).astype(np.float32)
        rows, columns = np.arange(height) * 6 // height, np.arange(width) * 8 // width
        frame = fields[rows][:, columns] + random.normal(0, 4 * (number % 4), (height, width, 3))
        top, left = (number * 7 % 11 * size[axis] // 16 for axis in (0, 1))
        frame[top : top + height // 4, left : left + width // 4] = random.integers(0, 256, 3)
        yield frame.clip(0, 255).astype(np.uint8)
