"""Train the vision tower and then the decoder, for given minutes of processor time. A run can resume at any checkpoint."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from edgevlm.calib.demo.world import World

from .batch import MAX_FRAMES, make_batch, plan_batch
from .decoder import FactHeads, evaluate, loss, table
from .model import build_model, build_tokenizer, save_model
from .muon import Muon
from .photo_world import PhotoWorld
from .vision import pretrain_vision

MUON_RATE, ADAM_RATE = 4e-3, 2e-3
WARMUP = 50  # warm-up steps
WORLDS: dict[str, tuple[type[World], Callable[..., World]]] = {
    "demo": (World, World),
    "photo": (PhotoWorld, partial(PhotoWorld, unseen=True)),
}
"""World -> what makes its training streams and its held-out streams."""
DECAY = 0.6  # the learning rates fall linearly over this last part of the run


@dataclass(slots=True)
class TrainSettings:
    out: Path  # folder for state.pt and checkpoint/
    minutes: float  # processor time of the whole run, including the vision tower
    seed: int = 0
    bf16: bool = False  # multiply in bfloat16
    thin: bool = True  # show some streams as a compressed memory holds them
    vision_minutes: float = 2.0
    world: str = "demo"  # one of WORLDS
    most: int = MAX_FRAMES  # the longest stream's frames
    save_every: float = 3.0  # minutes of wall-clock time
    evaluate_every: float = 8.0  # minutes of wall-clock time

    def __post_init__(self) -> None:
        if not 0 < self.vision_minutes < self.minutes:
            raise ValueError(f"{self.minutes} minutes leave none for the decoder after {self.vision_minutes} of vision")


class Trainer:
    """The state that a checkpoint saves, and the optimiser step that changes it."""

    def __init__(self, seed: int, bf16: bool = False, world: str = "demo"):
        torch.manual_seed(seed)
        self.bf16 = bf16
        self.seed = seed
        self.world = world
        self.make_world, self.make_held_out = WORLDS[world]
        self.steps = 0  # of the decoder so far
        self.elapsed = 0.0  # seconds of processor time, over all runs
        self.tokenizer = build_tokenizer()
        self.model = build_model(self.tokenizer, WORLDS[world][0].size)
        self.model.set_attn_implementation({"text_config": "edgevlm_packed", "vision_config": "sdpa"})
        self.heads = FactHeads(self.model.config.text_config.hidden_size)
        matrices = [p for p in self.model.model.language_model.layers.parameters() if p.ndim == 2]
        others = [
            *(p for p in self.model.model.language_model.parameters() if not any(p is m for m in matrices)),
            *self.model.model.multi_modal_projector.parameters(),
            *self.heads.parameters(),
        ]
        self.trained = [*matrices, *others]
        self.optimizers = (
            Muon(matrices, lr=MUON_RATE),
            torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        )

    def step(self, progress: float, thin: bool = True, most: int = MAX_FRAMES) -> float:
        """Take one step and return the loss on answers. Only seed, step number and progress determine the batch."""
        scale = min(1.0, (self.steps + 1) / WARMUP) * min(1.0, max(0.02, (1 - progress) / DECAY))
        for optimizer, rate in zip(self.optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
        plan = plan_batch(np.random.default_rng([self.seed, 2, self.steps]), progress, thin, most)
        batch = make_batch([self.seed, 3, self.steps], plan, self.tokenizer, self.make_world)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            total, answers = loss(self.model, self.heads, batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1
        return answers.item()

    def save(self, path: Path) -> None:
        """Save the state atomically."""
        state = {
            "seed": self.seed,
            "world": self.world,
            "steps": self.steps,
            "elapsed": self.elapsed,
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    @classmethod
    def load(cls, path: Path, bf16: bool = False) -> "Trainer":
        state = torch.load(path, weights_only=True)
        trainer = cls(state["seed"], bf16, state["world"])
        trainer.steps, trainer.elapsed = state["steps"], state["elapsed"]
        trainer.model.load_state_dict(state["model"])
        trainer.heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return trainer


def train(settings: TrainSettings, resume: bool = False) -> None:
    """Train for `settings.minutes` of processor time over all runs, so the machine's other work only delays the end."""
    state = settings.out / "state.pt"
    settings.out.mkdir(parents=True, exist_ok=True)
    going_on = resume and state.exists()
    if going_on and torch.load(state, weights_only=True).get("world") != settings.world:
        raise SystemExit(f"{state}: is of another world or an older version; choose another --out")
    trainer = Trainer.load(state, settings.bf16) if going_on else Trainer(settings.seed, settings.bf16, settings.world)
    total, vision = 60 * settings.minutes, 60 * settings.vision_minutes
    begun = time.process_time() - trainer.elapsed

    def report(text: str) -> None:
        print(f"[{(time.process_time() - begun) / 60:5.1f} of {settings.minutes:g} min] {text}", flush=True)

    if trainer.elapsed == 0:
        accuracy = pretrain_vision(trainer.model, settings.seed, settings.vision_minutes, report, trainer.make_world)
        trainer.elapsed = time.process_time() - begun
        report(f"vision done, accuracy {accuracy:.4f}")
    saved = evaluated = time.monotonic()
    average: float | None = None
    while trainer.elapsed < total:
        progress = max(0.0, (trainer.elapsed - vision) / (total - vision))
        answers = trainer.step(progress, settings.thin, settings.most)
        trainer.elapsed = time.process_time() - begun
        average = answers if average is None else 0.95 * average + 0.05 * answers
        if trainer.steps % 25 == 0:
            report(f"step {trainer.steps} loss on answers {average:.4f}")
        if time.monotonic() - saved > 60 * settings.save_every:
            saved = time.monotonic()
            trainer.save(state)
            replace_checkpoint(trainer, settings.out / "checkpoint")
        if time.monotonic() - evaluated > 60 * settings.evaluate_every:
            evaluated = time.monotonic()
            report("32 held-out streams\n" + table(evaluate(trainer.model, streams=32, make_world=trainer.make_held_out)))
    trainer.save(state)
    replace_checkpoint(trainer, settings.out / "checkpoint")
    report(f"done after {trainer.steps} steps")


def replace_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Replace the Hugging Face checkpoint in `folder` with the current one."""
    fresh = folder.with_suffix(".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    save_model(trainer.model, fresh)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)
