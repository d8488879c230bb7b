"""Pretraining of the vision tower alone: what is in each patch, and, in the last one, how many objects there are."""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlavaForConditionalGeneration

from ..world import COLORS, SHAPES, World
from .model import PATCHES, features

EMPTY = 8  # the class of a patch without an object
FRAMES = 128  # per step


class PatchHeads(nn.Module):
    """Linear readers of colour, shape and the number of objects present; dropped after the pretraining."""

    def __init__(self, width: int):
        super().__init__()
        self.color = nn.Linear(width, len(COLORS) + 1)
        self.shape = nn.Linear(width, len(SHAPES) + 1)
        self.present = nn.Linear(width, 4)

    def loss(self, seen: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """seen [F, 16, W], labels int64 [F, 16, 3]; the loss, and the share of objects and counts told right."""
        told = [head(seen) for head in (self.color, self.shape)]
        count = self.present(seen[:, -1])
        held = labels[..., 0] != EMPTY
        right = (told[0].argmax(-1) == labels[..., 0]) & (told[1].argmax(-1) == labels[..., 1])
        accuracy = torch.cat([right[held], count.argmax(-1) == labels[:, -1, 2]]).float().mean()
        total = cross_entropy(count, labels[:, -1, 2])
        for column, logits in enumerate(told):  # a half for the few objects, a half for the many empty patches
            classes = labels[..., column]
            total = total + cross_entropy(logits[held], classes[held]) + cross_entropy(logits[~held], classes[~held])
        return total, accuracy


def make_frames(seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Busy frames, uint8 [F, 56, 56, 3], and int64 [F, 16, 3]: colour and shape of each patch or EMPTY, objects present."""
    frames, labels = [], []
    for stream in range(FRAMES // 16):
        world = World([*seed, stream], event_rate=1.0)
        for _ in range(4 * 16):
            frame = world.step()
            if world.history.now % 4 == 0:
                label = np.full((PATCHES, 3), EMPTY, dtype=np.int64)
                for thing in world.history.present:
                    label[thing.cell, :2] = thing.color, thing.shape
                label[:, 2] = len(world.history.present)
                frames.append(frame)
                labels.append(label)
    return torch.from_numpy(np.stack(frames)), torch.from_numpy(np.stack(labels))


def pretrain_vision(model: LlavaForConditionalGeneration, seed: int, minutes: float, report: Callable[[str], None]) -> float:
    """Train the tower for `minutes`; returns the accuracy over the last steps."""
    tower = model.model.vision_tower
    heads = PatchHeads(tower.config.hidden_size)
    optimizer = torch.optim.AdamW([*tower.parameters(), *heads.parameters()], lr=2e-3, weight_decay=0.01)
    begun, step, accuracy = time.monotonic(), 0, 0.0
    while (progress := (time.monotonic() - begun) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * min(1.0, 2 * (1 - progress))
        frames, labels = make_frames([seed, 1, step])
        total, right = heads.loss(features(model, frames), labels)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        accuracy += (right.item() - accuracy) * max(0.02, 1 / (step + 1))
        if step % 50 == 0:
            report(f"vision step {step} loss {total.item():.3f} accuracy {accuracy:.4f} {1 - progress:.0%} left")
        step += 1
    return accuracy
