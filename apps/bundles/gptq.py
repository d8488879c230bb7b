"""``edgevlm export --rounding gptq``: the fp32 bundle is made first, and run over text, for the activations to round for."""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm.calib import activations
from edgevlm.export import export_checkpoint
from edgevlm.export.samples import ActivationSampler, Samples, rounded_layout
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle, check_target
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.files import atomic_write
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.plugins import load_class


def export_by_gptq(
    checkpoint: Path, out: Path, *, precision: str | None, progress: Notify, force: bool, **options: Any
) -> Path:
    """As :func:`edgevlm.export.export_checkpoint`, which also keeps what is sampled, for the same command to go on from.

    Raises UserError for a precision that rounds nothing and where there is no engine, before anything is exported.
    """
    rounded_layout(precision or "fp32", options.get("profile", ONNXRUNTIME))
    load_class("engines", DEFAULT_ENGINE)
    check_target(out, force)
    exact = options | {"precision": "fp32", "kv": "fp32", "vision_precision": "fp32", "profile": ONNXRUNTIME, "notify": None}

    def samples(folder: Path) -> Samples:
        return cached_samples(checkpoint, folder, progress, exact)

    return export_checkpoint(
        checkpoint,
        out,
        progress=progress,
        force=force,
        precision=precision,
        samples=ActivationSampler(source(), samples),
        **options,
    )


def source() -> str:
    """What samples depend on: the text that is read, and the program that reads it."""
    program = hashlib.sha256(Path(activations.__file__).read_bytes()).hexdigest()
    return f"sampled over the help topics of Python {platform.python_version()} by {program}"


def cached_samples(checkpoint: Path, folder: Path, progress: Notify, exact: Mapping[str, Any]) -> Samples:
    """The activations of the fp32 bundle, as ``folder`` has them; else sampled and put there, in place of that bundle.

    exact: options of the fp32 bundle's export, which itself goes on where it was stopped.
    """
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
