"""Round weights by GPTQ (``edgevlm export --rounding gptq``), from activations that an fp32 bundle computes on text."""

from __future__ import annotations

import hashlib
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm.calib import activations
from edgevlm.export import export_checkpoint
from edgevlm.export.options import ActivationSampler, Samples
from edgevlm.export.profiles import rounded_layout
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle, check_target
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.files import atomic_write
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.plugins import load_class


def export_by_gptq(
    checkpoint: Path, out: Path, *, precision: str | None, progress: Notify, force: bool, **options: Any
) -> Path:
    """Export like :func:`edgevlm.export.export_checkpoint`. An interrupted export keeps its samples for the next attempt.

    Raises UserError before exporting if the precision does not round weights or the engine is missing.
    """
    rounded_layout(precision or "fp32", options.get("profile", ONNXRUNTIME))
    load_class("engines", DEFAULT_ENGINE)
    check_target(out, force)
    exact = options | {"precision": "fp32", "kv": "fp32", "vision_precision": "fp32", "profile": ONNXRUNTIME, "notify": None}

    def sampled(folder: Path) -> Samples:
        """Return the activations sampled in ``folder``. Missing samples are first made with a temporary fp32 bundle."""
        file, plain = folder / "samples.npz", folder / "fp32"
        if not file.exists():
            if not plain.exists():
                export_checkpoint(checkpoint, plain, progress=progress, **exact)
            progress("running the model over text")
            samples = activations.sample_activations(Bundle.load(plain, verify="size"))
            with atomic_write(file) as stream:
                np.savez(stream, **{name: np.asarray(rows) for name, rows in samples.items()})  # type: ignore[arg-type]
        shutil.rmtree(plain, ignore_errors=True)
        with np.load(file, allow_pickle=False) as stored:
            return dict(stored)

    sampler = ActivationSampler(source(), sampled)
    return export_checkpoint(checkpoint, out, progress=progress, force=force, precision=precision, samples=sampler, **options)


def source() -> str:
    """Return an identifier of the sampled text and of the code that samples it."""
    program = hashlib.sha256(Path(activations.__file__).read_bytes()).hexdigest()
    return f"sampled over the help topics of Python {platform.python_version()} by {program}"
