"""Find or make the bundle of a model that is named by ``demo``, a folder or ``ORG/NAME[@revision]`` on the hub."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from edgevlm.apps.bundles.cache import DEFAULTS, DIGITS, cached, cached_bundle, cached_path, description, is_complete
from edgevlm.apps.bundles.hub import hub_id
from edgevlm.apps.planning.model import PlannedModel, plan_checkpoint, published_facts
from edgevlm.apps.planning.plan import DevicePlan, PlanRequest, choose, default_budget, figure
from edgevlm.apps.planning.this_machine import this_cpu
from edgevlm.engines.devices import DeviceProfile
from edgevlm.engines.devices.machine import Machine
from edgevlm.errors import UserError
from edgevlm.export.families import load_family
from edgevlm.export.foreign import refuse_files
from edgevlm.progress import Notify, Report
from edgevlm.runtime.bundle import MANIFEST, Bundle
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.files import look, refuse_address
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.helper_process import call_in_helper
from edgevlm.runtime.plugins import load_class

FETCH = "edgevlm.apps.bundles.fetch"
Size = tuple[int, int]  # (height, width)


@dataclass
class ExportChoice:
    """Chooses the export options that were not given.

    ``plan``: the plan that the choice is based on, or None until :meth:`options` is called.
    ``frame_shape``: returns the size of the source's frames, or None if unknown. :meth:`options` calls it if ``frame_size`` is
    None and the model keeps a frame's aspect ratio.
    """

    request: PlanRequest
    frame_size: Size | None
    frame_shape: Callable[[], Size | None]
    notify: Notify
    device: DeviceProfile | None = None
    plan: DevicePlan | None = None

    def options(self, folder: Path) -> dict[str, Any]:
        """Choose how to export the checkpoint in ``folder``, and report the choice with ``notify``. Raises UserError."""
        model = plan_checkpoint(folder, DEFAULTS["camera"])
        if load_family(model.family, folder).keeps_aspect and (size := self.size):
            model = plan_checkpoint(folder, size)
        roofline = self._plan(model).roofline
        return {
            "precision": self.request.precision if model.precision != "fp32" else roofline.precision,
            "vision_precision": roofline.model.tower.precision,
            "kv": roofline.kv,
        }

    @cached_property
    def size(self) -> Size | None:
        """Return the size of the source's frames, or None if it is unknown."""
        return self.frame_size or self.frame_shape()

    def _plan(self, model: PlannedModel) -> DevicePlan:
        """Make a plan. A requested budget that is out of range is replaced by the nearest one in range."""
        asked = self.request.budget
        budget = None if asked is None else min(max(asked, model.least_budget), model.most_budget)
        self.plan = plan = choose(model, self.device or this_cpu(Machine()), replace(self.request, budget=budget))
        line, (height, width), rate = plan.line(), plan.roofline.model.tower.size, plan.speed.prefill_fps
        predicted = f"reach {figure(rate)} fps"
        if not plan.fits:
            predicted = f"need {line['total_mb'] / 1e3:.1f} GB of {line['usable_mb'] / 1e3:.1f}; use a smaller model"
        elif not plan.keeps_up:
            slower = f"use --fps {figure(0.95 * rate)} or a smaller model"
            predicted += f", {figure(plan.fps - rate)} too few; {slower}"
        self.notify(
            f"chose {line['precision']} weights, {line['vision_precision']} tower, {line['kv']} keys and values, frames of "
            f"{width}x{height}, budget {plan.budget}, {plan.fps:g} fps for {line['device']}; predicted to {predicted}"
        )
        return plan

    def suits(self, bundle: Bundle) -> bool:
        """Return whether a bundle of the checkpoint has the requested options and the chosen frame size."""
        request, spec, vision = self.request, bundle.decoder, bundle.vision
        stored = ((request.precision, spec.precision), (request.kv, spec.kv), (request.vision_precision, vision.precision))
        if not all(asked in (None, kept) for asked, kept in stored):
            return False
        is_sized = self.plan is None or vision.pixels is not None or self.plan.roofline.model.tower.size == vision.size
        return is_sized or not load_family(bundle.family, bundle.path).keeps_aspect

    @property
    def asks(self) -> bool:
        """Return whether any option was given that matters only for an export."""
        return any((self.request.precision, self.request.vision_precision, self.request.kv))

    @property
    def budget(self) -> int | None:
        """Return the planned budget if it is smaller than the default budget, else None."""
        if self.plan is None or self.request.budget is not None:
            return None
        return self.plan.budget if self.plan.budget < default_budget(self.plan.roofline.model) else None


def nearest_published(word: str) -> str | None:
    """Return the smallest published model whose name contains ``word``, or else the one with the most similar name."""
    names = [facts["id"] for facts in published_facts()]
    plain = {name: re.sub("[^a-z0-9]", "", name.lower()) for name in names}
    within = [name for name in names if re.sub("[^a-z0-9]", "", word.lower()) in plain[name]]
    near = difflib.get_close_matches(word.lower(), [name.partition("/")[2].lower() for name in names], n=1, cutoff=0.5)
    return next(iter(within), next((name for name in names if near and name.lower().endswith(near[0])), None))


def resolve_model(
    model: str, progress: Report, notify: Notify, engine: str = DEFAULT_ENGINE, choice: ExportChoice | None = None
) -> str:
    """Return the bundle for ``--model``. Download a hub model first, and export a checkpoint into the cache.

    A checkpoint is exported only if none of its cached bundles suits ``choice`` and runs on ``engine``. Raises UserError if
    several cached bundles match, the engine cannot run the export, or the hub has no such model.
    """
    refuse_address(model)
    folder = Path(model)
    if (name := hub_id(model)) is not None:
        folder = Path(call_in_helper(f"{FETCH}:fetch_start", str(name), progress=progress, notify=notify))
    elif model == "demo" or look(folder) != "folder" or not (folder / "config.json").exists():
        if model != "demo" and look(folder / MANIFEST) == "nothing":
            refuse_files(folder)
            if look(folder) == "nothing" and "/" not in model and (near := nearest_published(model)) is not None:
                raise UserError(f"--model {model}: no such folder; did you mean {near}?")
        return model
    if (folder / MANIFEST).exists():
        return model if name is None else str(folder)
    found, options = find_bundle(folder, engine, model, notify, choice)
    if found is None:
        if name is not None:
            call_in_helper(f"{FETCH}:complete_checkpoint", f"hf:{name}", folder, progress=progress, notify=notify)
        found = cached_bundle(folder, progress, notify, **options)
        if name is not None:
            notify(f"the download in {folder.parents[1]} is no longer needed; run hf cache rm model/{name.repo} to delete it")
    return str(found)


def find_bundle(
    folder: Path, engine: str, model: str, notify: Notify, choice: ExportChoice | None = None
) -> tuple[Path | None, dict[str, Any]]:
    """Return a checkpoint's cached bundle and its export options. The bundle is None if it must be exported first."""
    backend = load_class("engines", engine)
    hint = getattr(backend, "export_hint", "")  # set by engines that cannot run a default export
    options = {} if hint or choice is None else choice.options(folder)
    wanted = cached_path(folder, **options)
    if not hint and is_complete(wanted):
        return wanted, options
    takes = getattr(backend, "takes", lambda bundle: bundle.profile == ONNXRUNTIME)
    siblings = [path for path in cached() if path.name.startswith(wanted.name[:-DIGITS]) and is_complete(path)]
    bundles = {path: Bundle.load(path, verify="size") for path in siblings}
    found = [path for path, bundle in bundles.items() if takes(bundle) and (choice is None or choice.suits(bundle))]
    if len(found) > 1:
        named = "; ".join(f"{path} ({description(bundles[path])})" for path in found)
        raise UserError(f"{model}: several cached bundles match; choose one with --model: {named}")
    if found:
        notify(f"using the cached bundle {found[0].name}: {description(bundles[found[0]])}")
        return found[0], options
    if hint:
        raise UserError(f"{model}: no cached bundle for {engine}; make one: {hint.format(model)}")
    return None, options
