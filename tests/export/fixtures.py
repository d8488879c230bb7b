"""Fixtures shared by the tests of several folders: tiny checkpoints and their bundles, made once a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

OPTIONS = ("st_spattn_from", "kv", "precision", "vision_precision", "profile", "positions")


@dataclass(frozen=True)
class Exported:
    """A checkpoint folder and the bundle made from it."""

    checkpoint: Path
    bundle: Path


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """``exported(family, **shape)``: the tiny checkpoint of that shape and its bundle, made once a run.

    OPTIONS go to the export, which keeps fp32 keys and values unless ``kv`` is given; the rest to the checkpoint.
    """
    from checkpoints import make_checkpoint
    from more_checkpoints import CLASSES, FRAME, make_more

    from edgevlm.export import export_checkpoint

    made: dict[tuple[Any, ...], Exported] = {}

    def export(family: str = "llava", **shape: Any) -> Exported:
        key = (family, *sorted((name, str(value)) for name, value in shape.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            options = {"kv": "fp32"} | {name: shape.pop(name) for name in OPTIONS if name in shape}
            checkpoint = (make_more if family in CLASSES else make_checkpoint)(folder / "checkpoint", family, **shape)
            bundle = export_checkpoint(checkpoint, folder / "bundle", camera=FRAME, **options)
            made[key] = Exported(checkpoint, bundle)
        return made[key]

    return export
