"""Choose export options for a device (``edgevlm export --device``), and build TensorRT engines (``edgevlm build``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from edgevlm.apps.planning.model import plan_bundle
from edgevlm.apps.planning.plan import PlanRequest, default_budget, make_plan
from edgevlm.engines.devices import load_device
from edgevlm.engines.tensorrt.jobs import BuildSettings
from edgevlm.errors import UserError
from edgevlm.export.precisions import load_precision
from edgevlm.packages import needed, needs
from edgevlm.progress import Notify, to_stderr
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import open_driver
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, profile_for
from edgevlm.runtime.kv import KVType
from edgevlm.runtime.model import bundle_folder
from edgevlm.runtime.settings import parse_budget

ROUND = 64  # the cache's capacity is rounded up to a multiple of 64 rows


def build(
    name: str, budget: str | None, workspace: int, probes: bool, force: bool, progress: Notify
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Build missing engines; yield a line and JSON fields for each. ``workspace``: memory in MB per layer. Raises UserError."""
    bundle = Bundle.load(bundle_folder(name), progress=progress)
    builder = needed("edgevlm.engines.tensorrt.build", "engine tensorrt", "tensorrt")
    builder.check_profile(bundle)
    capacity = capacity_for(name, None if budget is None else parse_budget(budget))
    settings = BuildSettings(capacity, workspace << 20, probes=probes, force=force)
    for made in builder.build_engines(bundle, settings, open_driver(), to_stderr):
        line = f"{made.path}  {made.bytes / 1e6:.0f} MB{'  (kept)' if made.kept else ''}"
        yield line, asdict(made) | {"capacity": settings.capacity}


def capacity_for(bundle: str, budget: int | None) -> int:
    """Return the number of rows in each layer's cache.

    ``budget``: None means the default. Raises UserError for a budget that is impossible with this model.
    """
    model = plan_bundle(bundle)
    tokens = default_budget(model) if budget is None else budget
    least, most = model.tower.rows, model.most_budget
    if not least <= tokens <= most:
        raise UserError(f"a budget of {tokens} tokens is out of range for {bundle}; use --budget {least} to {most}")
    return -(-model.capacity(tokens) // ROUND) * ROUND


class ExportTarget(NamedTuple):
    """Export options for a device. ``line``: an explanation for the user. ``precision``: None means the exporter's default."""

    profile: str
    precision: str | None
    kv: KVType
    line: str


def target_for(
    checkpoint: Path, name: str, jetpack: str | None, precision: str | None, kv: KVType | None, camera: tuple[int, int]
) -> ExportTarget:
    """Choose export options for the device ``name``. ``jetpack`` is a JetPack release, by default the newest.

    For a Jetson, ``edgevlm plan`` chooses the default precision. Raises UserError for an unknown device, release or precision.
    """
    device, kept = load_device(name), kv or "fp16"
    if precision is not None:
        load_precision(precision)
    releases = {release["jetpack"]: release["tensorrt"] for release in device["releases"]}
    if jetpack is not None and jetpack not in releases:
        known = " or ".join(release for release in releases if release)
        raise UserError(
            f"{name} does not support JetPack {jetpack}; {f'use --jetpack {known}' if known else 'remove --jetpack'}"
        )
    if device.kind != "jetson":
        return ExportTarget(ONNXRUNTIME, precision, kept, f"{name}: profile {ONNXRUNTIME}")
    jetpack = jetpack or list(releases)[-1]
    profile = profile_for(releases[jetpack])
    with needs("exporting"):
        from edgevlm.export.checkpoint import ConfigOnly
        from edgevlm.export.prequantised import check_no_zero_points
        from edgevlm.export.profiles import load_profile

    written = load_profile(profile)
    written.check_kv(kept)
    if precision is not None:
        written.precision(precision)
    check_no_zero_points(ConfigOnly(checkpoint).config, checkpoint)
    plan = make_plan(PlanRequest(str(checkpoint), name, precision=precision, kv=kept, camera=camera))
    chosen = plan.roofline.precision
    line = (
        f"{name} with JetPack {jetpack}, TensorRT {releases[jetpack]}: profile {profile}, {chosen} weights, {kept} keys and "
        f"values; a run takes {plan.memory.total / 1e6:,.0f} of {device.usable_bytes / 1e6:,.0f} MB (edgevlm plan)"
    )
    return ExportTarget(profile, chosen, kept, line)
