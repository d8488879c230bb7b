"""Pretrain vision tower and projector to show each patch's colour, shape and quadrant, and the number of objects in the last.

The tower is frozen afterwards. What its projected patches do not show in well separated directions, the decoder learns late or
never; a tower trained without quadrants forgot them.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from transformers import LlavaForConditionalGeneration

from edgevlm.calib.demo.world import GRID, World
from edgevlm.progress import Notify
from edgevlm.runtime.taught import COLORS, SHAPES

from .model import PATCHES, features
from .muon import Muon

QUADRANT_OF = np.add.outer(np.arange(GRID) // 2 * 2, np.arange(GRID) // 2).reshape(-1)  # int64 [16]
EMPTY = 8  # class of patches without an object
FRAMES = 128  # frames per step
RATE = 2e-3
SHARPNESS = 16.0  # scales the cosines in the heads' softmax


class CosineHead(nn.Module):
    """A head whose logits are cosines with one direction per class, so that only well separated classes differ."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.directions = nn.Parameter(torch.randn(classes, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return SHARPNESS * normalize(tokens, dim=-1) @ normalize(self.directions, dim=-1).T


class PatchHeads(nn.Module):
    """Heads that read what a projected patch should show. They are dropped after pretraining."""

    def __init__(self, width: int):
        super().__init__()
        self.color = CosineHead(width, len(COLORS) + 1)
        self.shape = CosineHead(width, len(SHAPES) + 1)
        self.quadrant = CosineHead(width, 4)
        self.present = CosineHead(width, 4)

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, and the fraction of right objects and counts. tokens: [F, 16, E]. labels: int64 [F, 16, 4]."""
        color, shape, quadrant, present = labels.unbind(-1)
        told = {"color": self.color(tokens), "shape": self.shape(tokens), "quadrant": self.quadrant(tokens)}
        count = self.present(tokens[:, -1])
        held = color != EMPTY
        total = cross_entropy(count, present[:, -1])
        for logits, classes in zip(told.values(), (color, shape, quadrant), strict=True):
            # the few objects weigh as much as the many empty patches
            total = total + cross_entropy(logits[held], classes[held]) + cross_entropy(logits[~held], classes[~held])
        right = torch.stack([told["color"].argmax(-1) == color, told["shape"].argmax(-1) == shape]).all(0)[held]
        return total, torch.cat([right, count.argmax(-1) == present[:, -1]]).float().mean()


def make_frames(seed: list[int], make_world: Callable[..., World] = World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return busy frames, uint8 [F, H, W, 3], and labels, int64 [F, 16, 4]: colour, shape (or EMPTY), quadrant, object
    count."""
    frames, labels = [], []
    for stream in range(FRAMES // 16):
        world = make_world([*seed, stream], event_rate=1.0, hard=stream % 2 == 0)
        for _ in range(16):
            for _ in range(3):
                world.skip()
            frames.append(world.step())
            label = np.full((PATCHES, 4), EMPTY, dtype=np.int64)
            for thing in world.history.present:
                label[world.owners == thing.number, :2] = thing.color, thing.shape
            label[:, 2] = QUADRANT_OF
            label[:, 3] = len(world.history.present)
            labels.append(label)
    return torch.from_numpy(np.stack(frames)), torch.from_numpy(np.stack(labels))


def pretrain_vision(
    model: LlavaForConditionalGeneration,
    seed: int,
    minutes: float,
    report: Notify,
    make_world: Callable[..., World] = World,
) -> float:
    """Train the tower for `minutes` of processor time; return the accuracy over the last steps."""
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    heads = PatchHeads(model.config.text_config.hidden_size)
    trained = [*tower.parameters(), *projector.parameters(), *heads.parameters()]
    matrices = [p for p in tower.encoder.layers.parameters() if p.ndim == 2]
    others = [p for p in trained if not any(p is m for m in matrices)]
    optimizers = (
        Muon(matrices, lr=2 * RATE),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.01),
    )
    begun, step, accuracy = time.process_time(), 0, 0.0
    while (progress := (time.process_time() - begun) / (60 * minutes)) < 1:
        scale = min(1.0, (step + 1) / 50) * min(1.0, 2 * (1 - progress))
        for optimizer, rate in zip(optimizers, (2 * RATE, RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        frames, labels = make_frames([seed, 1, step], make_world)
        total, right = heads.loss(projector(features(model, frames)), labels)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        accuracy += (right.item() - accuracy) * max(0.02, 1 / (step + 1))
        if step % 50 == 0:
            report(f"vision step {step} loss {total.item():.3f} accuracy {accuracy:.4f}")
        step += 1
    return accuracy
