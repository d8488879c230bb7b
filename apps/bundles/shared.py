"""Bundles on the hub: made on one machine, run on another."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from edgevlm.apps.bundles.cache import DIGITS, cache_folder, cached, is_complete, lock_of, locked, plain_name
from edgevlm.apps.bundles.hub import HubError, HubFile, HubId, Repository, explain, remember
from edgevlm.engines.inputs import check_graphs, check_numbers
from edgevlm.errors import BundleError
from edgevlm.progress import Notify, Report
from edgevlm.runtime.bundle import MANIFEST, Bundle, check_target
from edgevlm.runtime.files import atomic_directory
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.model import bundle_folder

CARD = """---
library_name: edgevlm
tags: [edgevlm]
---
A bundle of {source} for [edgevlm](https://github.com/edgevlm/edgevlm): {family}, {precision} weights. Run it:

    edgevlm run --camera 0 --model {repo}
"""


def pull(repository: Repository, progress: Report, notify: Notify, out: Path | None = None, *, force: bool = False) -> Path:
    """The bundle of a repository, in ``out`` or in the cache; every byte is checked against its manifest, once.

    Nothing of it is used before its manifest was found to name plain files that the repository has. A pull that was stopped is
    gone on with. Raises HubError, and BundleError for what is no bundle.
    """
    if out is not None:
        return _pull(repository, out, force, progress, notify)
    target = _cached(repository)
    with locked(lock_of(target), f"another process is pulling {repository.name}; waiting for it", notify):
        if force or not is_complete(target):
            _pull(repository, target, True, progress, notify)
    remember(repository.name, repository.folder)
    return target


def pulled(repository: Repository) -> Path | None:
    """Its bundle in the cache, where it was pulled before."""
    return target if is_complete(target := _cached(repository)) else None


def _cached(repository: Repository) -> Path:
    return cache_folder() / f"{plain_name(repository.name.repo)}-{repository.commit[:DIGITS]}"


def _pull(repository: Repository, target: Path, force: bool, progress: Report, notify: Notify) -> Path:
    snapshot = repository.fetch([MANIFEST], progress, notify)
    if not (snapshot / MANIFEST).exists():
        raise HubError(f"{repository.name} is no bundle: it has no {MANIFEST}", "edgevlm bundles push makes one")
    records, files = Bundle.load(snapshot, verify="manifest").files, repository.files
    if repository.problem is not None:
        raise repository.problem
    for name, record in records.items():
        if name not in files or files[name].bytes != record.bytes:
            raise HubError(f"{repository.name} lacks the {name} that its {MANIFEST} lists", "push the bundle again")
    check = partial(check_target, force=force)
    with atomic_directory(target, check, key=repository.commit, keep=(KeyboardInterrupt, HubError)) as folder:
        shutil.copyfile(snapshot / MANIFEST, folder / MANIFEST)
        missing = {
            folder / name: HubFile(name, record.bytes, record.sha256)
            for name, record in records.items()
            if not (folder / name).exists()
        }
        if missing:
            repository.download(missing, progress)
        Bundle.load(folder, verify="size")
    return target


def checked(bundle: str, progress: Report) -> Bundle:
    """A bundle of which every byte is what its manifest says, with a token there to push it. Raises HubError, BundleError."""
    from huggingface_hub import constants, get_token

    if get_token() is None:
        page = f"{constants.ENDPOINT}/settings/tokens"
        raise HubError("pushing needs a token", f"make one that may write at {page} and set HF_TOKEN")
    return Bundle.load(find(bundle), progress=progress)


def upload(bundle: Bundle, name: HubId, *, public: bool) -> str:
    """Push a bundle in one commit, with the library's progress bars; returns the repository's address.

    What is not there is made: the repository, the branch, a page that describes it. Raises HubError.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    api, about = HfApi(library_name="edgevlm"), {"family": bundle.family, "precision": bundle.decoder.precision, "repo": name}
    try:
        api.create_repo(name.repo, private=not public, exist_ok=True)
        if name.revision != "main":
            api.create_branch(name.repo, branch=name.revision, exist_ok=True)
        adds = [CommitOperationAdd(file, bundle.path / file) for file in (*bundle.files, MANIFEST)]
        if not api.file_exists(name.repo, "README.md", revision=name.revision):
            adds.append(CommitOperationAdd("README.md", CARD.format(source=bundle.source, **about).encode()))
        api.create_commit(name.repo, adds, commit_message=f"Bundle of {bundle.source}", revision=name.revision)
    except Exception as error:
        raise explain(error, name, bundle.path) from None
    return f"{constants.ENDPOINT}/{name.repo}"


def verify(bundles: list[str], progress: Report) -> Iterator[tuple[str, bool]]:
    """A line for each bundle, by default each in the cache, and whether every byte of it is what its manifest says."""
    for folder in [find(each) for each in bundles] or cached():
        try:
            loaded = Bundle.load(folder, progress=progress)
            progress("looking for numbers that are none")
            if loaded.profile == ONNXRUNTIME:
                check_graphs(loaded)
            check_numbers(loaded)
        except BundleError as error:
            yield str(error), False
        else:
            yield f"{folder}: {len(loaded.files)} files are as {MANIFEST} says", True


def find(bundle: str) -> Path:
    """The folder of ``demo``, of a bundle's path, or of its name in the cache."""
    kept = cache_folder() / bundle
    return kept if not Path(bundle).exists() and (kept / MANIFEST).exists() else bundle_folder(bundle)
