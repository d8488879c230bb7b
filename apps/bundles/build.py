"""What suits a device: ``edgevlm export --device`` and ``edgevlm build``, which makes TensorRT engines on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from edgevlm.apps.planning.model import plan_bundle
from edgevlm.apps.planning.plan import PlanRequest, default_budget, make_plan
from edgevlm.apps.schemas import json_line
from edgevlm.engines.devices import DeviceProfile, load_device
from edgevlm.engines.tensorrt.jobs import WORKSPACE, BuildSettings
from edgevlm.errors import UserError
from edgevlm.export.precisions import load_precision
from edgevlm.packages import needed, needs
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import CudaDevice, open_driver
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, profile_for
from edgevlm.runtime.kv import KVType
from edgevlm.runtime.model import bundle_folder

MODULE = "edgevlm.engines.tensorrt.build"
ROUND = 64  # rows that a memory's capacity is a multiple of: a longer system prompt fits what is left over
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """Options of ``edgevlm build``. device: what this machine must be, of :mod:`edgevlm.engines.devices`; workspace: MB."""

    bundle: str
    device: str | None = None
    budget: int | None = None
    workspace: int = WORKSPACE // MB
    probes: bool = True
    force: bool = False


def build(request: BuildRequest, notify: Notify, progress: Notify, as_json: bool) -> Iterator[str]:
    """Build the missing engines and yield a line for each. Raises UserError."""
    if request.workspace < 1:
        raise UserError(f"--workspace {request.workspace}: give 1 MB or more")
    bundle = Bundle.load(bundle_folder(request.bundle), progress=progress)
    builder = needed(MODULE, "engine tensorrt", "tensorrt")
    builder.check_profile(bundle)
    settings = BuildSettings(
        capacity_for(request.bundle, request.budget), request.workspace * MB, probes=request.probes, force=request.force
    )
    driver = open_driver()
    if request.device is not None:
        check_device(request.device, driver.device)
    for made in builder.build_engines(bundle, settings, driver, notify, progress):
        if as_json:
            yield json_line("engine", asdict(made) | {"capacity": settings.capacity})
        else:
            yield f"{made.path}  {made.bytes / 1e6:.0f} MB{'  (was there)' if made.kept else ''}"


def capacity_for(bundle: str, budget: int | None) -> int:
    """Return the rows of each layer's memory for sessions of ``budget`` tokens (a run's default): prefix + |M| + text budget.

    Raises UserError for a budget that no session of this model can have.
    """
    model = plan_bundle(bundle)
    tokens = default_budget(model) if budget is None else budget
    least, most = model.tower.rows, model.most_budget
    if not least <= tokens <= most:
        raise UserError(f"a budget of {tokens} tokens does not suit {bundle}: give --budget {least} to {most}")
    return -(-model.capacity(tokens) // ROUND) * ROUND


def check_device(name: str, found: CudaDevice) -> None:
    """Raise UserError where this machine's GPU is not the named device's."""
    device = load_device(name)
    wanted = device["compute_capability"]
    here = ".".join(map(str, found.compute_capability))
    if device["cuda_cores"] is None or wanted != here:
        raise UserError(
            f"this machine's {found.name} has compute capability {here} and {name} {wanted or 'no GPU'}: engines are built on "
            "the device that runs them; leave --device out to build for this one"
        )


DEFAULT_KV: dict[str, KVType] = {"cpu": "fp32", "cuda": "fp16"}  # of profile onnxruntime


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """What to export, and a line that explains it. precision None: the exporter's default."""

    profile: str
    precision: str | None
    kv: KVType
    line: str


def target_for(
    checkpoint: Path, name: str, jetpack: str | None, precision: str | None, kv: KVType | None, camera: tuple[int, int]
) -> ExportTarget:
    """Choose the target for a device. jetpack: its release, by default the newest. precision, kv: as given.

    On a Jetson ``edgevlm plan`` chooses the weights; keys and values are fp16 there and on a graphics card. Raises UserError
    for an unknown device, release or precision.
    """
    device = load_device(name)
    if precision is not None:
        load_precision(precision)
    release = _release(device, jetpack)
    if device.kind != "jetson":
        return ExportTarget(ONNXRUNTIME, precision, kv or DEFAULT_KV[device.kind], f"{name}: profile {ONNXRUNTIME}")
    profile, kept = profile_for(release["tensorrt"]), kv or "fp16"
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
    chosen, taken = plan.roofline.precision, plan.memory.total
    line = (
        f"{name} with JetPack {release['jetpack']}, TensorRT {release['tensorrt']}: profile {profile}, {chosen} weights, "
        f"{kept} keys and values; a run takes {taken / 1e6:,.0f} of {device.usable_bytes / 1e6:,.0f} MB (edgevlm plan)"
    )
    return ExportTarget(profile, chosen, kept, line)


def _release(device: DeviceProfile, jetpack: str | None) -> dict[str, str]:
    """Return the versions that belong together. Raises UserError for a JetPack that the device does not have."""
    releases: list[dict[str, str]] = device["releases"]
    if jetpack is None:
        return releases[-1]
    found = [release for release in releases if release["jetpack"] == jetpack]
    if not found:
        known = [release["jetpack"] for release in releases if release["jetpack"]]
        raise UserError(
            f"{device.name} has no JetPack {jetpack}; give --jetpack {' or '.join(known)}"
            if known
            else f"{device.name} has no JetPack; leave --jetpack out"
        )
    return found[0]
