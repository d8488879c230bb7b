"""Scales of an int8 cache: how far a model's keys and values reach over calibration input, run with an fp32 cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import MANIFEST, Bundle, ChatSpec, hash_file, seal_manifest
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.engine import DEFAULT_ENGINE, load_engine
from edgevlm.runtime.framing import most_text
from edgevlm.runtime.kv import SCALES, KVScales
from edgevlm.runtime.model import Model
from edgevlm.runtime.plugins import load_class
from edgevlm.runtime.policies.baselines import Full
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.stream import Stream

Frames = Iterable[NDArray[np.uint8]]
Encode = Callable[[str], Sequence[int]]

HEADROOM = 1.25  # scales hold so many times what was seen: docs/internals/models.md has what less and more would cost
FRAMES = 8
ANSWER = 16  # tokens
RANDOM = 128  # tokens of the whole vocabulary, so that rare ones are not cut
QUESTIONS = (
    "What happens in the video?",
    "List every number, name and colour that you see: 0 1 2 3 4 5 6 7 8 9, A-Z, red, green, blue.",
    'Answer as JSON with the keys "when", "where" and "who"; then explain, step by step, how sure you are (0-100 %).',
)


def in_fp32(bundle: Bundle) -> Bundle:
    """The same model with an fp32 cache. Raises UserError for one of another KV precision that has no graph for it."""
    spec = bundle.decoder
    if spec.kv == "fp32":
        return bundle
    if "fp32-kv" not in spec.graphs:
        raise UserError(f"{bundle.path}: has no fp32-kv decoder graph; export the checkpoint again with --kv {spec.kv}")
    return replace(bundle, decoder=replace(spec, kv="fp32", graphs={"full": spec.graphs["fp32-kv"]}))


def measured_scales(bundle: Bundle, frames: Frames | None = None, count: int = FRAMES, threads: int | None = None) -> KVScales:
    """Watch ``count`` frames, ask QUESTIONS, read RANDOM tokens, and hold HEADROOM times what keys and values came to.

    frames: uint8 RGB ``[H, W, 3]``; changing fields of colour unless given. Raises UserError where a bundle has no fp32 graph,
    or is of a model with too few positions for a frame and a question.
    """
    exact = in_fp32(bundle)
    tokenizer = Tokenizer.from_file(str(exact.file(exact.chat.tokenizer)))
    with closing(load_engine(DEFAULT_ENGINE, exact, threads=threads)) as engine:
        model = Model(exact, engine, tokenizer, exact.closing_rows())
        reach = Reach(exact)
        _watch(model, colour_fields(exact.vision.size) if frames is None else frames, count, reach)
    return KVScales.holding(reach.key, reach.value, HEADROOM)


def check_scales(limit: int, frame: int, text: tuple[str, str], closing: int, chat: dict[str, Any], tokenizer: str) -> None:
    """Raise UserError, before anything is written, where :func:`add_scales` would: no engine, or too few positions.

    limit: positions of a stream. frame: tokens of a grid; text: what stands around it. tokenizer: its JSON.
    """
    load_class("engines", DEFAULT_ENGINE)
    read = Tokenizer.from_str(tokenizer)

    def encode(words: str) -> list[int]:
        return read.encode(words, add_special_tokens=False).ids

    frames_that_fit(limit, frame + most_text(*text, encode), Chat(ChatSpec(**chat)), closing, encode)


def add_scales(folder: Path, manifest: dict[str, Any], progress: Notify) -> None:
    """Measure the scales of the int8 bundle that ``manifest`` describes, which is complete but for them, and list their file.

    ``bundle.json`` is left as it was needed for that. Raises UserError where no engine is there to measure with.
    """
    spec = manifest["decoder"]
    exact = {**spec, "kv": "fp32", "graphs": {"full": spec["graphs"]["fp32-kv"]}}
    (folder / MANIFEST).write_bytes(seal_manifest({**manifest, "decoder": exact}))
    progress("measuring how far keys and values reach")
    measured_scales(Bundle.load(folder, verify="size")).save(folder / SCALES)
    manifest["files"][SCALES] = asdict(hash_file(folder / SCALES))


class Reach:
    """The longest rotary pair of keys and the largest value, of each layer, KV head and channel, of all caches seen."""

    def __init__(self, bundle: Bundle) -> None:
        spec = bundle.decoder
        self.key = np.zeros((spec.layers, spec.kv_heads, spec.head_dim // 2), np.float32)
        self.value = np.zeros((spec.layers, spec.kv_heads, spec.head_dim), np.float32)

    def see(self, cache: KVCache) -> None:
        for layer in range(cache.layers):
            pairs = np.hypot(*np.split(cache.dequantize("key", layer), 2, -1))
            np.maximum(self.key[layer], pairs.max(1), out=self.key[layer])
            np.maximum(self.value[layer], np.abs(cache.dequantize("value", layer)).max(1), out=self.value[layer])


def _watch(model: Model, frames: Frames, count: int, reach: Reach) -> None:
    """Frames one at a time under full KV, then each question with an answer."""
    chat, per_frame = Chat(model.bundle.chat), model.rows_per_frame
    prefix, asked = model.encode(chat.prefix), _asked(chat, model.encode)
    asked.append(np.random.default_rng(0).integers(0, model.bundle.decoder.vocab, RANDOM))
    count = min(count, frames_that_fit(model.bundle.limit, per_frame, chat, len(model.closing), model.encode))
    text_rows = max(map(len, asked)) + len(model.closing) + ANSWER
    stream = Stream(model, Full(), count * per_frame, prefix, text_rows, "never")
    preprocess = Preprocessor(model.bundle.vision)
    for frame in islice(frames, count):
        stream.append_frames(model.engine.encode(preprocess(frame)[None]))
    for ids in asked:
        with stream.question():
            logits = stream.append_text(np.concatenate([model.closing, model.engine.embed(ids)]))
            for _ in range(ANSWER):
                logits = stream.append_text(model.engine.embed(np.array([int(np.argmax(logits))])))
            reach.see(stream.cache)


def _asked(chat: Chat, encode: Encode) -> list[NDArray[np.int64]]:
    return [np.asarray(encode(chat.suffix([], question)), np.int64) for question in QUESTIONS]


def frames_that_fit(limit: int, rows: int, chat: Chat, closing: int, encode: Encode) -> int:
    """How many frames of ``rows`` rows each leave room for ``closing`` rows and any question in ``limit`` positions.

    Raises UserError if it is invalid.
    """
    longest = max(RANDOM, *map(len, _asked(chat, encode)))
    fits = (limit - len(encode(chat.prefix)) - longest - closing - ANSWER) // rows
    if fits < 1:
        why = f"the model's {limit} positions hold no frame and question, so no KV scales can be measured"
        raise UserError(f"{why}; export it with --kv fp16")
    return fits


def colour_fields(size: tuple[int, int]) -> Iterator[NDArray[np.uint8]]:
    """Frames uint8 RGB ``[height, width, 3]`` without end: fields of colour that change, a box that moves, and fine noise."""
    height, width = size
    random = np.random.default_rng(0)
    for number in range(1 << 30):
        fields = random.integers(0, 256, (6, 8, 3)).astype(np.float32)
        rows, columns = np.arange(height) * 6 // height, np.arange(width) * 8 // width
        frame = fields[rows][:, columns] + random.normal(0, 4 * (number % 4), (height, width, 3))
        top, left = (number * 7 % 11 * size[axis] // 16 for axis in (0, 1))
        frame[top : top + height // 4, left : left + width // 4] = random.integers(0, 256, 3)
        yield frame.clip(0, 255).astype(np.uint8)
