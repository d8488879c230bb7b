"""``edgevlm build``: TensorRT engines of a bundle, made on the device that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from edgevlm.apps.planning.model import plan_bundle
from edgevlm.apps.planning.plan import default_budget
from edgevlm.apps.schemas import json_line
from edgevlm.engines.devices import load_device
from edgevlm.engines.tensorrt.jobs import WORKSPACE, BuildSettings
from edgevlm.errors import UserError
from edgevlm.packages import needed
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import CudaDevice, open_driver
from edgevlm.runtime.model import bundle_folder

MODULE = "edgevlm.engines.tensorrt.build"
ROUND = 64  # rows that a memory's capacity is a multiple of: a longer system prompt fits what is left over
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What was asked for. device: a name of :mod:`edgevlm.engines.devices` that this machine must be; workspace: MB."""

    bundle: str
    device: str | None = None
    budget: int | None = None
    workspace: int = WORKSPACE // MB
    probes: bool = True
    force: bool = False


def build(request: BuildRequest, notify: Notify, progress: Notify, as_json: bool) -> Iterator[str]:
    """Build what is missing; yields a line for each engine. Raises UserError, one line, for all that stands in the way."""
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
    """Rows of each layer's memory for sessions of ``budget`` tokens, a run's default unless given: prefix + |M| + text budget.

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
