"""What a model's name means: ``demo``, a folder, or ``ORG/NAME[@revision]`` on the hub; checkpoints become bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgevlm.apps.bundles.cache import DIGITS, Tell, cached, cached_bundle, cached_path, description, is_complete
from edgevlm.apps.bundles.choice import ExportChoice
from edgevlm.apps.bundles.hub import HubError, Repository, hub_id
from edgevlm.apps.bundles.shared import pull
from edgevlm.errors import UserError
from edgevlm.export.checkpoint import FILES, ConfigOnly, checkpoint_folder
from edgevlm.progress import Report
from edgevlm.runtime.bundle import MANIFEST, Bundle
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.paths import look, refuse_address
from edgevlm.runtime.plugins import load_class


def resolve_model(
    model: str, progress: Report, notice: Tell, engine: str = DEFAULT_ENGINE, choice: ExportChoice | None = None
) -> str:
    """What ``--model`` means: ``demo`` and bundles as they are; for a checkpoint its cached bundle; on the hub either, fetched.

    Of a checkpoint prefers the bundle of ``choice``, else of default options, where ``engine`` runs it, then the one other that
    it runs and that is as was asked for; exports the first where none is cached. Raises UserError where several others are,
    where the engine does not run what would be exported, and for a name that the hub does not give.
    """
    refuse_address(model)
    if (name := hub_id(model)) is None:
        folder = Path(model)
        if model == "demo" or look(folder) != "folder" or (folder / MANIFEST).exists() or not (folder / "config.json").exists():
            return model
        found, options = find_bundle(folder, engine, model, notice, choice)
        return str(found or cached_bundle(folder, progress, notice, **options))
    repository = Repository(name, notice)
    if is_bundle(repository):
        return str(pull(repository, progress, notice))
    folder = fetch_config(repository, progress, notice)
    found, options = find_bundle(folder, engine, model, notice, choice)
    if found is None:
        fetch_checkpoint(repository, progress, notice)
        found = cached_bundle(folder, progress, notice, **options)
    repository.remember()
    return str(found)


def find_bundle(
    folder: Path, engine: str, model: str, notice: Tell, choice: ExportChoice | None = None
) -> tuple[Path | None, dict[str, Any]]:
    """The cached bundle of a checkpoint, None where one is to be exported, and the options to export it with.

    Raises as :func:`resolve_model` does.
    """
    backend = load_class("engines", engine)
    hint = getattr(backend, "export_hint", "")  # of engines that do not run what is exported by default
    options = {} if hint or choice is None else choice.options(folder)
    wanted = cached_path(folder, scaled=False, **options)
    if not hint and is_complete(wanted):
        return wanted, options
    siblings = [path for path in cached() if path.name.startswith(wanted.name[:-DIGITS]) and is_complete(path)]
    bundles = {path: Bundle.load(path, verify="size") for path in siblings}
    found = [path for path, bundle in bundles.items() if _runs(bundle, backend) and (choice is None or choice.suits(bundle))]
    if len(found) > 1:
        named = "; ".join(f"{path} ({description(path)})" for path in found)
        raise UserError(f"{model}: several bundles of it are cached; give one of them as --model: {named}")
    if found:
        notice(f"{found[0].name}: the cached bundle of this checkpoint, {description(found[0])}")
        if choice is not None and choice.plan is not None:
            choice.settle(bundles[found[0]])
        return found[0], options
    if hint:
        raise UserError(f"{model}: no bundle of it that {engine} runs is cached; make one: {hint.format(model)}")
    return None, options


def resolve_checkpoint(model: str, progress: Report, notice: Tell) -> Path:
    """The folder of a checkpoint, downloaded if it is the hub's. Raises UserError for what is none."""
    if (name := hub_id(model)) is None:
        return checkpoint_folder(model)
    repository = Repository(name, notice)
    if is_bundle(repository):
        raise HubError(f"{name} is a bundle already", "run it as it is (--model)")
    fetch_config(repository, progress, notice)
    fetch_checkpoint(repository, progress, notice)
    repository.remember()
    return repository.folder


def resolve_config(model: str, progress: Report, notice: Tell) -> str:
    """``demo``, a bundle's folder or a checkpoint's, of which on the hub no more than config.json is fetched."""
    if (name := hub_id(model)) is None:
        return model
    repository = Repository(name, notice)
    return str((pull if is_bundle(repository) else fetch_config)(repository, progress, notice))


def is_bundle(repository: Repository) -> bool:
    """Whether a repository holds a bundle, and not a checkpoint."""
    there = [name for name in (MANIFEST, "config.json") if (repository.folder / name).exists()]
    return there[0] == MANIFEST if there else MANIFEST in repository.files


def fetch_config(repository: Repository, progress: Report, notice: Tell) -> Path:
    """The folder with config.json in it. Raises HubError where the repository has none."""
    folder = repository.fetch(["config.json"], progress, notice)
    if not (folder / "config.json").exists():
        raise HubError(f"{repository.name} has no config.json", "give the repository of a checkpoint or of a bundle")
    return folder


def fetch_checkpoint(repository: Repository, progress: Report, notice: Tell) -> None:
    """All that an export reads: no pickles, no second copy of the weights. Raises HubError where there are no safetensors."""
    folder = repository.fetch(FILES, progress, notice)
    weights = ConfigOnly(folder).weight_files()
    if repository.problem and not all((folder / file).exists() for file in weights):
        raise repository.problem
    if not any(repository.has(file) for file in weights):
        what = f"{repository.name} has no {weights[0]}; only safetensors are read, since pickled weights can run code"
        raise HubError(what, "look for a conversion of it")
    repository.fetch(weights, progress, notice)


def _runs(bundle: Bundle, backend: Any) -> bool:
    return bool(backend.takes(bundle)) if hasattr(backend, "takes") else bundle.profile == ONNXRUNTIME
