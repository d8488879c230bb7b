"""What a model's name means: ``demo``, a folder, or ``ORG/NAME[@revision]`` on the hub; checkpoints become bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgevlm.apps.bundles.cache import DIGITS, cached, cached_bundle, cached_path, description, is_complete
from edgevlm.apps.bundles.choice import ExportChoice
from edgevlm.apps.bundles.hub import hub_id, remember
from edgevlm.errors import UserError
from edgevlm.progress import Notify, Report
from edgevlm.runtime.bundle import MANIFEST, Bundle
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.files import look, refuse_address
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.helper_process import call_in_helper
from edgevlm.runtime.plugins import load_class

FETCH = "edgevlm.apps.bundles.fetch"  # run by a helper process: the hub's client is large


def resolve_model(
    model: str, progress: Report, notify: Notify, engine: str = DEFAULT_ENGINE, choice: ExportChoice | None = None
) -> str:
    """Return the bundle that ``--model`` means; what the hub has is downloaded, and a checkpoint exported into the cache.

    A cached bundle is used if ``engine`` runs it: the one with the options of ``choice`` (default options without it), else
    the only other one that suits. Raises UserError where several suit, where the engine does not run what would be exported,
    and where the hub has no such model.
    """
    refuse_address(model)
    folder = Path(model)
    if (name := hub_id(model)) is not None:
        folder = Path(call_in_helper(f"{FETCH}:fetch_start", str(name), progress=progress, notify=notify))
    elif model == "demo" or look(folder) != "folder" or not (folder / "config.json").exists():
        return model
    if (folder / MANIFEST).exists():
        return model if name is None else str(folder)
    found, options = find_bundle(folder, engine, model, notify, choice)
    if found is None:
        if name is not None:
            call_in_helper(f"{FETCH}:complete_checkpoint", f"hf:{name}", folder, progress=progress, notify=notify)
        found = cached_bundle(folder, progress, notify, **options)
    if name is not None:
        remember(name, folder)
    return str(found)


def find_bundle(
    folder: Path, engine: str, model: str, notify: Notify, choice: ExportChoice | None = None
) -> tuple[Path | None, dict[str, Any]]:
    """Return a checkpoint's cached bundle, None where one is to be exported, and the options to export it with."""
    backend = load_class("engines", engine)
    hint = getattr(backend, "export_hint", "")  # of engines that do not run what is exported by default
    options = {} if hint or choice is None else choice.options(folder)
    wanted = cached_path(folder, gptq=False, **options)
    if not hint and is_complete(wanted):
        return wanted, options
    takes = getattr(backend, "takes", lambda bundle: bundle.profile == ONNXRUNTIME)
    siblings = [path for path in cached() if path.name.startswith(wanted.name[:-DIGITS]) and is_complete(path)]
    bundles = {path: Bundle.load(path, verify="size") for path in siblings}
    found = [path for path, bundle in bundles.items() if takes(bundle) and (choice is None or choice.suits(bundle))]
    if len(found) > 1:
        named = "; ".join(f"{path} ({description(bundles[path])})" for path in found)
        raise UserError(f"{model}: several bundles of it are cached; give one of them as --model: {named}")
    if found:
        notify(f"{found[0].name}: the cached bundle of this checkpoint, {description(bundles[found[0]])}")
        return found[0], options
    if hint:
        raise UserError(f"{model}: no bundle of it that {engine} runs is cached; make one: {hint.format(model)}")
    return None, options
