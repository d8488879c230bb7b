"""Train the demo model on one core: `python -m edgevlm.calib.demo.train --out DIR [--minutes 90] [--resume]`."""

import argparse
from pathlib import Path

import torch

from .trainer import TrainSettings, train


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m edgevlm.calib.demo.train", description="Train the demo model on one core.")
    parser.add_argument("--out", type=Path, required=True, help="gets state.pt and checkpoint/")
    parser.add_argument("--minutes", type=float, default=90, help="processor time of the whole run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from DIR/state.pt")
    parser.add_argument("--bf16", action="store_true", help="multiply in bfloat16: faster where the processor can")
    parser.add_argument("--no-thinning", action="store_true", help="train on complete streams only")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(TrainSettings(options.out, options.minutes, options.seed, options.bf16, not options.no_thinning), options.resume)


if __name__ == "__main__":
    main()
