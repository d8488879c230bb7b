"""Muon in float32. torch.optim.Muon multiplies in bfloat16, which some processors only emulate, ten times slower."""

from __future__ import annotations

from collections.abc import Iterable

import torch

STEPS, COEFFICIENTS = 5, (3.4445, -4.775, 2.0315)  # for the Newton-Schulz iteration
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """An optimizer of matrices, like torch.optim.Muon with Nesterov momentum and ``adjust_lr_fn="match_rms_adamw"``."""

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - MOMENTUM)
                change = orthogonal(matrix.grad.lerp(average, MOMENTUM))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(change, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix with the same singular vectors and singular values of about one."""
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
