"""``edgevlm export --device``: which graph profile, precision and KV type suit a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgevlm.apps.planning.plan import PlanRequest, make_plan
from edgevlm.engines.devices import DeviceProfile, load_device
from edgevlm.errors import UserError
from edgevlm.export.precisions import load_precision
from edgevlm.packages import needs
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, profile_for
from edgevlm.runtime.kv import KVType

DEFAULT_KV: dict[str, KVType] = {"cpu": "fp32", "cuda": "fp16"}  # of profile onnxruntime


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """What to export, and a line that says why. precision None: the exporter's default."""

    profile: str
    precision: str | None
    kv: KVType
    line: str


def target_for(
    checkpoint: Path, name: str, jetpack: str | None, precision: str | None, kv: KVType | None, camera: tuple[int, int]
) -> ExportTarget:
    """The target of a device. jetpack: its release, the newest unless given. precision, kv: what was asked for, if it was.

    On a Jetson ``edgevlm plan`` chooses the weights; keys and values are fp16, for a graphics card too, whose engine takes no
    other. Raises UserError for a device, release or precision that
    there is not.
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
    """The versions that belong together; raises UserError for a JetPack that the device has not."""
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
