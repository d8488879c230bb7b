"""Accuracy per kind of question on held-out streams under full KV, with intervals clustered by stream.

`python -m edgevlm.calib.demo.train.evaluate CHECKPOINT_DIR [--streams 200] [--frames 64]`
"""

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from transformers import LlavaForConditionalGeneration

from ..questions import KINDS, draw
from . import attention  # noqa: F401  (registers edgevlm_packed)
from .batch import Batch, Plan, Turn, collate, place, write_block
from .decoder import right_answers
from .stream import make_stream
from .tokenizer import build_tokenizer

HELD_OUT = 1_000_000  # first word of the seeds; training uses small ones
DRAWS = 2  # questions of each kind per stream, all after its last frame
AT_ONCE = 4  # streams per batch


def evaluate(
    model: LlavaForConditionalGeneration, streams: int = 200, frames: int = 64, seed: int = 0, hard: bool = False
) -> dict[str, tuple[float, float, int]]:
    """kind -> (accuracy, half-width of its 95 % interval, questions asked)."""
    right: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for first in range(0, streams, AT_ONCE):
        seeds = [[HELD_OUT, seed, index] for index in range(first, min(first + AT_ONCE, streams))]
        for row, kind, good in right_answers(model, exam(seeds, frames, hard)):
            right[kind][first + row].append(good)
    return {kind: clustered(list(right[kind].values())) for kind in KINDS if kind in right}


def exam(seeds: list[list[int]], frames: int, hard: bool = False) -> Batch:
    """Whole streams, with every kind asked after the last frame, DRAWS times where it can be."""
    tokenizer, plan = build_tokenizer(), Plan(len(seeds), frames, 1)
    rows = []
    for seed in seeds:
        rng = np.random.default_rng([*seed, 1])
        stream = make_stream(seed, frames, [frames - 1], hard=hard)
        history = stream.asked[frames - 1]
        kept = np.ones_like(stream.occupied)
        positions = place(kept, plan, rng)
        drawn = [(kind, pair) for kind in KINDS for _ in range(DRAWS) if (pair := draw(kind, history, rng))]
        blocks = [
            write_block([Turn(kind, question.text, answer)], frames - 1, int(positions[-1]) + 1, tokenizer)
            for kind, (question, answer) in drawn
        ]
        rows.append((stream, kept, positions, blocks))
    return collate(rows, tokenizer)


def clustered(clusters: list[list[bool]]) -> tuple[float, float, int]:
    """Mean of all, and 1.96 standard errors of this ratio with clusters as the units."""
    sums, sizes = np.array([sum(c) for c in clusters]), np.array([len(c) for c in clusters])
    mean, units = sums.sum() / sizes.sum(), len(clusters)
    residuals = sums - mean * sizes
    error = np.sqrt((residuals**2).sum() * units / max(1, units - 1)) / sizes.sum()
    return float(mean), float(1.96 * error), int(sizes.sum())


def table(results: dict[str, tuple[float, float, int]]) -> str:
    lines = [f"{kind:12} {mean:.3f} ± {half:.3f}  n {count}" for kind, (mean, half, count) in results.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hard", action="store_true", help="streams with a background that moves and is cut")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = LlavaForConditionalGeneration.from_pretrained(options.checkpoint)
    model.set_attn_implementation({"text_config": "edgevlm_packed", "vision_config": "sdpa"})
    print(table(evaluate(model, options.streams, options.frames, options.seed, options.hard)))


if __name__ == "__main__":
    main()
