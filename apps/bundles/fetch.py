"""Fetch bundles, checkpoints or only their configs from the hub, and push bundles to the hub."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from edgevlm.apps.bundles.cache import DIGITS, cache_folder, find, is_complete, locked, plain_name
from edgevlm.apps.bundles.hub import CONFIG, HubError, HubFile, Repository, explain, hub_id, parse_id
from edgevlm.export.checkpoint import FILES, SINGLE, ConfigOnly, checkpoint_folder
from edgevlm.export.foreign import ADAPTER, refuse_files
from edgevlm.progress import Notify, Report
from edgevlm.runtime.bundle import MANIFEST, Bundle, check_target
from edgevlm.runtime.files import atomic_directory

CARD = """---
library_name: edgevlm
tags: [edgevlm]
---
A bundle of {source} for [edgevlm](https://github.com/edgevlm/edgevlm): {family}, {precision} weights. Run it:

    edgevlm run --camera 0 --model {repo}
"""


def fetch_start(name: str, progress: Report, notify: Notify) -> Path:
    """Download a bundle, or a checkpoint's config.json; return the folder. Raises HubError."""
    repository = Repository(parse_id(name), notify)
    return pull(repository, progress, notify) if repository.is_bundle else fetch_config(repository, progress)


def resolve_config(model: str, progress: Report, notify: Notify) -> str:
    """Return ``demo`` or a folder unchanged; for a hub model, download its bundle or config.json and return the folder."""
    return model if hub_id(model) is None else str(fetch_start(model, progress, notify))


def resolve_checkpoint(model: str, progress: Report, notify: Notify) -> Path:
    """Return a checkpoint's folder; download the checkpoint if it is on the hub. Raises UserError."""
    folder = checkpoint_config(model, progress, notify)
    complete_checkpoint(model, folder, progress, notify)
    return folder


def checkpoint_config(model: str, progress: Report, notify: Notify) -> Path:
    """Return a checkpoint's folder; if the checkpoint is on the hub, download only config.json. Raises UserError."""
    if (name := hub_id(model)) is None:
        return checkpoint_folder(model)
    repository = Repository(name, notify)
    if repository.is_bundle:
        raise HubError(f"{name} is already a bundle", "run it with --model")
    return fetch_config(repository, progress)


def fetch_config(repository: Repository, progress: Report) -> Path:
    folder = repository.fetch([CONFIG], progress)
    if not (folder / CONFIG).exists():
        repository.fetch([ADAPTER], progress)
        refuse_files(folder, repository.files, repository.name)
        raise HubError(f"{repository.name} has no {CONFIG}", "use the repository of a checkpoint or a bundle")
    return folder


def complete_checkpoint(model: str, folder: str | Path, progress: Report, notify: Notify) -> None:
    """Download what an export needs from a hub checkpoint: no pickles, and only one copy of the weights.

    Raises HubError if the checkpoint has no safetensors, or if the files do not fit on the disk.
    """
    if (name := hub_id(model)) is None:
        return
    repository = Repository(name, notify, Path(folder).name)
    folder = repository.fetch(FILES, progress)
    weights = [SINGLE] if SINGLE in repository.files else ConfigOnly(folder).weight_files()
    missing = [file for file in weights if not (folder / file).exists()]
    if missing and repository.problem:
        raise repository.problem
    if missing == weights and not any(file in repository.files for file in weights):
        refuse_files(folder, repository.files, repository.name)
        what = f"{repository.name} has no {weights[0]}; only safetensors are supported, because pickled weights can run code"
        raise HubError(what, "look for a safetensors version")
    repository.fetch(weights, progress)
    repository.remember()


def pull(repository: Repository, progress: Report, notify: Notify, out: Path | None = None, *, force: bool = False) -> Path:
    """Download a bundle to ``out`` or the cache, resuming an earlier download, and check every byte against its manifest.

    Raises HubError, and BundleError if the repository is not a bundle.
    """
    if out is not None:
        return _pull(repository, out, force, progress)
    target = cache_folder() / f"{plain_name(repository.name.repo)}-{repository.commit[:DIGITS]}"
    with locked(target, f"another process is pulling {repository.name}; waiting for it", notify):
        if force or not is_complete(target):
            _pull(repository, target, True, progress)
    repository.remember()
    return target


def _pull(repository: Repository, target: Path, force: bool, progress: Report) -> Path:
    snapshot = repository.fetch([MANIFEST], progress)
    if not (snapshot / MANIFEST).exists():
        raise HubError(f"{repository.name} is not a bundle: it has no {MANIFEST}", "upload one with edgevlm bundles push")
    records, files = Bundle.load(snapshot, verify="manifest").files, repository.files
    if repository.problem is not None:
        raise repository.problem
    for name, record in records.items():
        if name not in files or files[name].bytes != record.bytes:
            raise HubError(f"{repository.name}: {name} is missing or does not match {MANIFEST}", "push the bundle again")
    check = partial(check_target, force=force)
    with atomic_directory(target, check, key=repository.commit, keep=(KeyboardInterrupt, HubError)) as folder:
        shutil.copyfile(snapshot / MANIFEST, folder / MANIFEST)
        wanted = {folder / name: HubFile(name, record.bytes, record.sha256) for name, record in records.items()}
        repository.download(wanted, progress)
        Bundle.load(folder, verify="size")
    return target


def push(bundle: str, to: str, progress: Report, *, public: bool) -> str:
    """Check every byte of a bundle, push it in one commit and return the repository's address. Raises HubError and BundleError.

    Creates the repository, the branch and a description page if they do not exist.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token

    name = parse_id(to)
    if get_token() is None:
        page = f"{constants.ENDPOINT}/settings/tokens"
        raise HubError("pushing requires a token", f"create one with write access at {page} and set HF_TOKEN")
    found, api = Bundle.load(find(bundle), progress=progress), HfApi(library_name="edgevlm")
    try:
        api.create_repo(name.repo, private=not public, exist_ok=True)
        if name.revision != "main":
            api.create_branch(name.repo, branch=name.revision, exist_ok=True)
        adds = [CommitOperationAdd(file, found.path / file) for file in (*found.files, MANIFEST)]
        if not api.file_exists(name.repo, "README.md", revision=name.revision):
            card = CARD.format(source=found.source, family=found.family, precision=found.decoder.precision, repo=name)
            adds.append(CommitOperationAdd("README.md", card.encode()))
        api.create_commit(name.repo, adds, commit_message=f"Bundle of {found.source}", revision=name.revision)
    except Exception as error:
        raise explain(error, name, found.path) from None
    return f"{constants.ENDPOINT}/{name.repo}"
