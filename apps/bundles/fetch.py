"""What is fetched of a repository on the hub: a bundle, a checkpoint, or as much of either as a plan reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgevlm.apps.bundles.hub import HubError, Repository, hub_id, remember, required_id
from edgevlm.apps.bundles.shared import pull, pulled
from edgevlm.apps.planning.model import planned_files
from edgevlm.export.checkpoint import FILES, ConfigOnly, checkpoint_folder
from edgevlm.progress import Notify, Report
from edgevlm.runtime.bundle import MANIFEST, Bundle

BundleSpace = tuple[str, int]  # a folder, and the bytes that the bundle made of a checkpoint will take there


def fetch_start(name: str, progress: Report, notify: Notify) -> Path:
    """A bundle, complete; of a checkpoint the folder with its config.json. Raises HubError."""
    repository = Repository(required_id(name), notify)
    return (pull if is_bundle(repository) else fetch_config)(repository, progress, notify)


def fetch_rest(name: str, commit: str, space: BundleSpace, progress: Report, notify: Notify) -> None:
    """The rest of a checkpoint that :func:`fetch_start` began to fetch. Raises as :func:`fetch_checkpoint`."""
    fetch_checkpoint(Repository(required_id(name), notify, commit), space, progress, notify)


def resolve_checkpoint(model: str, progress: Report, notify: Notify) -> Path:
    """The folder of a checkpoint, downloaded if it is the hub's. Raises UserError if it is invalid."""
    folder = checkpoint_config(model, progress, notify)
    complete_checkpoint(model, folder, None, progress, notify)
    return folder


def checkpoint_config(model: str, progress: Report, notify: Notify) -> Path:
    """The folder of a checkpoint, of which on the hub no more than config.json is fetched. Raises UserError."""
    if (name := hub_id(model)) is None:
        return checkpoint_folder(model)
    repository = Repository(name, notify)
    if is_bundle(repository):
        raise HubError(f"{name} is a bundle already", "run it as it is (--model)")
    return fetch_config(repository, progress, notify)


def complete_checkpoint(
    model: str, folder: Path, space: Callable[[], BundleSpace] | None, progress: Report, notify: Notify
) -> None:
    """Download the rest of a checkpoint if it is the hub's. Raises as :func:`fetch_checkpoint`."""
    if (name := hub_id(model)) is not None:
        fetch_checkpoint(Repository(name, notify, folder.name), space and space(), progress, notify)
        remember(name, folder)


def resolve_config(model: str, progress: Report, notify: Notify) -> str:
    """``demo``, or the folder of a bundle or checkpoint with what a plan reads in it: no weights are fetched."""
    if (name := hub_id(model)) is None:
        return model
    repository = Repository(name, notify)
    if not is_bundle(repository):
        return str(fetch_config(repository, progress, notify))
    if (there := pulled(repository)) is not None:
        return str(there)
    folder = repository.fetch([MANIFEST], progress, notify)
    return str(repository.fetch(planned_files(Bundle.load(folder, verify="manifest")), progress, notify))


def is_bundle(repository: Repository) -> bool:
    """Whether a repository holds a bundle, and not a checkpoint."""
    there = [name for name in (MANIFEST, "config.json") if (repository.folder / name).exists()]
    return there[0] == MANIFEST if there else MANIFEST in repository.files


def fetch_config(repository: Repository, progress: Report, notify: Notify) -> Path:
    """The folder with config.json in it. Raises HubError where the repository has none."""
    folder = repository.fetch(["config.json"], progress, notify)
    if not (folder / "config.json").exists():
        raise HubError(f"{repository.name} has no config.json", "give the repository of a checkpoint or of a bundle")
    return folder


def fetch_checkpoint(repository: Repository, space: BundleSpace | None, progress: Report, notify: Notify) -> None:
    """All that an export reads: no pickles, no second copy of the weights.

    Raises HubError where there are no safetensors, and where they or a bundle that takes ``space`` do not fit on the disk.
    """
    folder = repository.fetch(FILES, progress, notify)
    weights = ConfigOnly(folder).weight_files()
    if repository.problem and not all((folder / file).exists() for file in weights):
        raise repository.problem
    if not any(repository.has(file) for file in weights):
        what = f"{repository.name} has no {weights[0]}; only safetensors are read, since pickled weights can run code"
        raise HubError(what, "look for a conversion of it")
    if space is not None:
        repository.check_bundle_space(weights, Path(space[0]), space[1])
    repository.fetch(weights, progress, notify)
