"""Time SigLIP's vision tower with random weights in fp32 and int8, compared with transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from numpy.typing import NDArray

from edgevlm.bench.seeded import llava_onevision_config, write_checkpoint
from edgevlm.bench.stream.torch_baseline import load
from edgevlm.bench.timing import Job, figures, ratio, take_turns
from edgevlm.export import export_checkpoint
from edgevlm.progress import show
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, vision_precision
from edgevlm.runtime.model import Model

TOWER = "siglip-so400m-384"
OURS, OTHER = "edgevlm", "transformers"
Float32 = NDArray[np.float32]


def vision(
    precisions: Sequence[str] = ("fp32", "int8"),
    frames: Sequence[int] = (1, 4),
    layers: int | None = None,
    threads: int = 1,
    rounds: int = 3,
) -> Iterator[dict[str, Any]]:
    """Time the tower and projector for each precision and number of ``frames`` per call. Then yield ratios and int8's errors.

    Frames and weights are random. ``working_mb``: MB added by a runtime's first call. ``max_error``: the largest difference
    between int8's and fp32's features, divided by fp32's root mean square. Raises UserError for an unknown precision.
    """
    for name in precisions:
        vision_precision(ONNXRUNTIME, name, name)
    torch.set_num_threads(threads)
    config = llava_onevision_config(layers)
    text, side = config.text_config, config.vision_config.image_size
    config.text_config = transformers.Qwen2Config(  # a small decoder, because only the tower is timed
        vocab_size=512, hidden_size=text.hidden_size, intermediate_size=64, num_hidden_layers=1, tie_word_embeddings=True,
        num_attention_heads=text.num_attention_heads, num_key_value_heads=text.num_key_value_heads,
    )  # fmt: skip
    place = {"bench": "vision", "tower": TOWER, "layers": config.vision_config.num_hidden_layers, "threads": threads}
    with ExitStack() as stack, torch.inference_mode():
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="edgevlm-bench-")))
        checkpoint = write_checkpoint(folder / "checkpoint", config)
        encoders: dict[tuple[str, str], Callable[[Float32], Any]] = {}
        for precision in precisions:
            show(f"exporting in {precision}")
            bundle = export_checkpoint(checkpoint, folder / precision, precision="fp32", vision_precision=precision)
            loaded = Model.load(bundle, threads=threads)
            stack.callback(loaded.close)
            encoders[OURS, precision] = loaded.engine.encode
        features = load(checkpoint, "sdpa").model.get_video_features
        encoders[OTHER, "fp32"] = lambda pixels: features(torch.from_numpy(pixels)[None], return_dict=True)
        for batch in frames:
            show(f"timing {batch} frames a call")
            pixels, about = noise(batch, side), {**place, "batch": batch}
            working = {key: _grown(partial(encode, pixels)) for key, encode in encoders.items()}
            took = take_turns({key: Job(partial(encode, pixels), batch) for key, encode in encoders.items()}, rounds)
            for (runtime, precision), times in took.items():
                named = {"runtime": runtime, "precision": precision}
                yield {**about, **named, **figures("frame", times), "working_mb": working[runtime, precision]}
            for precision in precisions:
                named = {"runtime": OURS, "precision": precision, "against": OTHER}
                yield {**about, **named, **ratio(took[OURS, precision], took[OTHER, "fp32"])}
        if {"fp32", "int8"} <= set(precisions):
            exact, rounded = (encoders[OURS, precision](noise(2, side)) for precision in ("fp32", "int8"))
            yield {**place, "runtime": OURS, "precision": "int8", **error(exact, rounded)}


def _grown(run: Callable[[], object]) -> int:
    """Return how much the process's memory grows during a call, in MB."""
    before = psutil.Process().memory_info().rss
    run()
    return round((psutil.Process().memory_info().rss - before) / 1e6)


def noise(count: int, side: int) -> Float32:
    return np.random.default_rng(0).standard_normal((count, 3, side, side), np.float32)


def error(exact: Float32, rounded: Float32) -> dict[str, float]:
    """Return the features' cosine similarity, and their largest difference divided by the exact features' root mean square."""
    cosine = float(np.vdot(exact, rounded) / (np.linalg.norm(exact) * np.linalg.norm(rounded)))
    largest = float(np.abs(exact - rounded).max() / np.sqrt(np.mean(exact**2)))
    return {"cosine": round(cosine, 6), "max_error": round(largest, 4)}
