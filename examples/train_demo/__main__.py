"""Train the demo model on one core: `python examples/train_demo --out DIR [--minutes 90] [--resume]`."""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train_demo.batch import MAX_FRAMES
from train_demo.trainer import WORLDS, TrainSettings, train


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/train_demo", description="Train the demo model on one core.")
    parser.add_argument("--out", type=Path, required=True, help="write state.pt and checkpoint/ to this folder")
    parser.add_argument("--minutes", type=float, default=90, help="train for this much processor time in total")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="continue from DIR/state.pt")
    parser.add_argument("--bf16", action="store_true", help="multiply in bfloat16, faster if supported")
    parser.add_argument("--no-thinning", action="store_true", help="train on complete streams only")
    parser.add_argument("--world", choices=WORLDS, default="demo", help="photo shows things cut from photographs")
    parser.add_argument("--vision-minutes", type=float, default=2, help="train the vision tower for this part of --minutes")
    parser.add_argument("--frames", type=int, default=MAX_FRAMES, help="the longest stream's length in frames")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = TrainSettings(
        options.out, options.minutes, options.seed, options.bf16, not options.no_thinning, options.vision_minutes,
        world=options.world, most=options.frames,
    )  # fmt: skip
    train(settings, options.resume)


if __name__ == "__main__":
    main()
