"""``edgevlm export --scaling awq``: the fp32 bundle is made first, and run over text, for the activations to scale for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgevlm.calib.activations import sample_activations
from edgevlm.export import export_checkpoint
from edgevlm.export.scaling import in_blocks
from edgevlm.runtime.bundle import Bundle, Progress
from edgevlm.runtime.publish import beside, check_target


def export_scaled(
    checkpoint: Path, out: Path, *, precision: str | None, progress: Progress, force: bool, **options: Any
) -> Path:
    """As :func:`edgevlm.export.export_checkpoint`; meanwhile the fp32 bundle lies beside ``out``.

    Raises UserError for a precision that rounds nothing, before anything is exported.
    """
    in_blocks(precision or "fp32")
    check_target(out, force)
    with beside(out) as folder:
        plain = export_checkpoint(checkpoint, folder / "bundle", progress=progress, precision="fp32", **options)
        progress("running the model over text")
        samples = sample_activations(Bundle.load(plain, verify="size"))
    return export_checkpoint(checkpoint, out, progress=progress, force=force, precision=precision, samples=samples, **options)
