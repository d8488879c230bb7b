"""Models by their name on the Hugging Face hub, ``ORG/NAME[@revision]``, downloaded into the cache of ``huggingface_hub``.

That library knows endpoint, token, proxies, cache and protocol. Transfers are done here: it keeps no part of a file from one
run to the next, and checks no hash.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgevlm.apps.bundles.cache import locked
from edgevlm.errors import UserError
from edgevlm.progress import Notify, Report
from edgevlm.runtime.bundle import MANIFEST, hash_file
from edgevlm.runtime.files import atomic_write, look

TIMEOUT_S = 10.0
PAUSES_S = (1, 2, 4, 8, 8)  # between attempts of which none brought a byte
MB = 1_000_000
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read at import: else the library fetches a list of AI agents first
_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?", re.ASCII)
_PLAIN = re.compile(r"\w[\w.-]*", re.ASCII)  # a file's name without a folder
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubError(UserError):
    """The hub does not give what was asked for. ``what``: the message without its advice."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository's name, and a branch, tag or commit of it."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. digest: SHA-256 of large files, git's SHA-1 of others; the cache names its blob by it."""

    name: str
    bytes: int
    digest: str


def hub_id(model: str) -> HubId | None:
    """Return the repository that ``model`` names; None for a folder, which wins over a repository of its name.

    ``hf:ORG/NAME`` is always a repository. Raises UserError for ``hf:`` without such a name.
    """
    forced = model.startswith("hf:")
    match = _ID.fullmatch(model.removeprefix("hf:"))
    if forced and match is None:
        raise UserError(f"{model}: is no name on the hub; give ORG/NAME or ORG/NAME@REVISION")
    if match is None or (not forced and look(model) != "nothing"):
        return None
    return HubId(match[1], match[2] or "main")


def required_id(name: str) -> HubId:
    """Return the hub repository ``name``, even if a folder has that name. Raises UserError for an invalid name."""
    found = hub_id(name if name.startswith("hf:") else f"hf:{name}")
    assert found is not None
    return found


class Repository:
    """A repository at one commit, and its ``folder`` in the hub's cache with whatever of it has been downloaded."""

    def __init__(self, name: HubId, notify: Notify, commit: str | None = None) -> None:
        """Ask the hub for the revision's commit, unless it is given or downloaded; offline, use the last one downloaded.

        Raises HubError.
        """
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        self.name = name
        self.home = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model")
        self.problem: HubError | None = None  # why the hub cannot be asked
        self._listed: Mapping[str, HubFile] | None = None
        known = commit or self._known()
        if known is not None and known in (commit, name.revision):
            self.commit = known
            return
        try:
            self.commit, self._listed = self._ask(name.revision, notify)
        except HubError as error:
            if known is None:
                raise
            if not constants.HF_HUB_OFFLINE:
                notify(f"{error.what}; using the copy downloaded before, commit {known[:12]}")
            self.commit, self._listed, self.problem = known, {}, error

    @property
    def folder(self) -> Path:
        """Its files, as links to the cache's blobs."""
        return self.home / "snapshots" / self.commit

    @property
    def files(self) -> Mapping[str, HubFile]:
        """All of its files, as the hub lists them; empty where it cannot be asked."""
        if self._listed is None:
            try:
                _, self._listed = self._ask(self.commit, lambda _: None)
            except HubError as error:
                self._listed, self.problem = {}, error
        return self._listed

    def has(self, name: str) -> bool:
        """Return whether it has such a file; asks the hub only if it is not downloaded."""
        return (self.folder / name).exists() or name in self.files

    def fetch(self, names: Iterable[str], progress: Report, notify: Notify) -> Path:
        """Return its folder, with those of these files that it has. Raises HubError."""
        wanted = [self.files[name] for name in names if not (self.folder / name).exists() and name in self.files]
        if wanted:
            try:
                self._fetch(wanted, progress, notify)
            except OSError as error:
                raise explain(error, self.name, self.home) from None
        return self.folder

    def download(self, files: Mapping[Path, HubFile], progress: Report) -> None:
        """Download each file to its path, resuming ``PATH.part``, and check its hash. Raises HubError. No path may exist."""
        from huggingface_hub import hf_hub_url

        parts = {part_of(path): (path, file) for path, file in files.items()}
        try:
            self._check_space(next(iter(files)).parent, missing_bytes(files))
            before, total = 0, sum(file.bytes for file in files.values())
            for part, (path, file) in parts.items():

                def tell(arrived: int, before: int = before) -> None:
                    progress(f"downloading {self.name} (MB)", (before + arrived) // MB, total // MB)

                _receive(hf_hub_url(self.name.repo, file.name, revision=self.commit), part, file, tell)
                progress(f"checking {file.name}", (before + file.bytes) // MB, total // MB)
                if digest(part, file.digest) != file.digest:
                    part.unlink()
                    what = f"{self.name}: what arrived as {file.name} is not what the hub lists (another hash)"
                    raise HubError(what, "it was changed on the way: run the same command again")
                part.replace(path)
                before += file.bytes
        except Exception as error:
            raise explain(error, self.name, self.home) from None

    def check_bundle_space(self, names: Iterable[str], folder: Path, bundle: int) -> None:
        """Raise HubError unless the disks have room for these files and for a bundle of ``bundle`` bytes in ``folder``."""
        files = {self.home / "blobs" / self.files[name].digest: self.files[name] for name in names if name in self.files}
        self._check_space(self.home, missing_bytes(files), folder, bundle)

    def _check_space(self, folder: Path, download: int, other: Path | None = None, bundle: int = 0) -> None:
        """Count the bundle only where ``other`` is on the disk of ``folder``; an export checks any other disk itself."""
        what = f"{download / 1e6:,.0f} MB are to be downloaded"
        if other is not None and _existing(other).stat().st_dev == _existing(folder).stat().st_dev:
            download, what = download + bundle, f"{what}, the bundle made of them takes {bundle / 1e6:,.0f} MB"
        free = shutil.disk_usage(_existing(folder)).free
        if download > free:
            there = f"{free / 1e6:,.0f} MB are free on the disk of {folder.parents[1]}"
            how = "make room, or name a folder on another disk (HF_HOME for checkpoints, EDGEVLM_CACHE for bundles)"
            raise HubError(f"{self.name}: {what} and {there}", how)

    def _fetch(self, wanted: list[HubFile], progress: Report, notify: Notify) -> None:
        blobs = self.home / "blobs"
        for folder in (blobs, self.folder):
            folder.mkdir(parents=True, exist_ok=True)
        with locked(self.home / ".edgevlm.lock", f"another process is downloading {self.name}; waiting for it", notify):
            missing = {blobs / file.digest: file for file in wanted if not (blobs / file.digest).exists()}
            if missing:
                self.download(missing, progress)
            for file in wanted:
                link, blob = self.folder / file.name, blobs / file.digest
                link.unlink(missing_ok=True)  # of a blob that is gone
                try:
                    link.symlink_to(os.path.relpath(blob, link.parent))
                except PermissionError:  # a file system without links
                    shutil.copyfile(blob, link)

    def _known(self) -> str | None:
        """Return the commit of the revision that is in the cache."""
        from huggingface_hub import try_to_load_from_cache

        found = (
            try_to_load_from_cache(self.name.repo, file, revision=self.name.revision) for file in ("config.json", MANIFEST)
        )
        return next((Path(path).parent.name for path in found if isinstance(path, str)), None)

    def _ask(self, revision: str, notify: Notify) -> tuple[str, Mapping[str, HubFile]]:
        """Return the hub's commit and files of a revision. Only files beside each other count, none in folders."""
        from huggingface_hub import HfApi

        try:
            info = HfApi(library_name="edgevlm").model_info(
                self.name.repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S
            )
            listed = (
                HubFile(each.rfilename, int(each.size or 0), str(each.lfs.sha256 if each.lfs else each.blob_id))
                for each in info.siblings or ()
            )
            files = {file.name: file for file in listed if _PLAIN.fullmatch(file.name)}
            if not _COMMIT.fullmatch(str(info.sha)) or not all(_DIGEST.fullmatch(file.digest) for file in files.values()):
                raise ValueError("names no commit, or files without a hash")
        except Exception as error:
            raise explain(error, self.name, self.home) from None
        if info.id != self.name.repo and _ID.fullmatch(info.id):
            notify(f"{self.name.repo} is called {info.id} now")
        return str(info.sha), files


def remember(name: HubId, folder: Path) -> None:
    """Make a revision mean the commit of this folder while the hub cannot be asked."""
    home, commit = folder.parents[1], folder.name
    if name.revision != commit:
        ref = home / "refs" / name.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(ref) as stream:
            stream.write(commit.encode())


def part_of(path: Path) -> Path:
    """Name the file that holds what has arrived of ``path``."""
    return path.with_name(f"{path.name}.part")


def missing_bytes(files: Mapping[Path, HubFile]) -> int:
    """Count the bytes of these files that have not arrived."""
    parts = [part_of(path) for path in files]
    held = sum(part.stat().st_size for part in parts if part.exists())
    return sum(file.bytes for path, file in files.items() if not path.exists()) - held


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def digest(path: Path, like: str) -> str:
    """Hash a file as ``like`` was: SHA-256, or git's SHA-1 of a small one."""
    from huggingface_hub.utils.sha import git_hash

    return hash_file(path).sha256 if len(like) == 64 else str(git_hash(path.read_bytes()))


def _receive(url: str, part: Path, file: HubFile, tell: Callable[[int], None]) -> None:
    """Append to ``part`` what it lacks of a file; attempts continue as long as any brings a byte."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    failures, headers = 0, build_hf_headers(library_name="edgevlm") | {"Accept-Encoding": "identity"}
    with part.open("ab") as stream:
        if stream.tell() > file.bytes:
            stream.truncate(0)
            stream.seek(0)
        tell(stream.tell())
        while (begin := stream.tell()) < file.bytes:
            wanted = headers | ({"Range": f"bytes={begin}-"} if begin else {})
            try:
                with get_session().stream("GET", url, headers=wanted, follow_redirects=True, timeout=TIMEOUT_S) as response:
                    hf_raise_for_status(response)
                    if begin and not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
                        stream.truncate(0)
                        stream.seek(0)
                    for block in response.iter_bytes():
                        stream.write(block[: file.bytes + 1 - stream.tell()])  # a byte too many, and its hash is another
                        tell(stream.tell())
                        if stream.tell() > file.bytes:
                            break
            except HTTPError as error:
                failures = 0 if stream.tell() > begin else failures + 1
                if failures == len(PAUSES_S) or (isinstance(error, HfHubHTTPError) and error.response.status_code < 500):
                    raise
                time.sleep(PAUSES_S[failures])


def explain(error: Exception, name: HubId, folder: Path) -> HubError:
    """Say in one line what went wrong with a repository, and what to do. folder: where files were being written."""
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, HubError):
        return error
    host = re.sub(r".*@|/.*", "", constants.ENDPOINT.partition("://")[2])
    page, has_token = f"{constants.ENDPOINT}/{name.repo}", get_token() is not None
    response = getattr(error, "response", None)
    status = 0 if response is None else int(response.status_code)
    why = " ".join(str(error).split())[:200] or type(error).__name__  # a server may have written it
    again = "run the same command again"
    token = "with the account of your token" if has_token else "set HF_TOKEN to a token of that account"
    if isinstance(error, errors.OfflineModeIsEnabled):
        found = f"{name} is not downloaded, and HF_HUB_OFFLINE is set", "unset it once, or give a folder"
    elif isinstance(error, errors.RevisionNotFoundError):
        found = f"{name.repo} has no branch, tag or commit {name.revision!r}", f"see {page}/tree/main for those it has"
    elif isinstance(error, errors.GatedRepoError):
        found = f"{name.repo} is gated", f"accept its terms at {page}, {token}, and {again}"
    elif status in (401, 403) and has_token:
        found = (
            f"{host} refuses your token for {name.repo}",
            f"make another at {constants.ENDPOINT}/settings/tokens, set HF_TOKEN",
        )
    elif status in (401, 403, 404):
        found = f"{name.repo} is no folder here, and {host} has no such model", "check its name; if it is private, set HF_TOKEN"
    elif status == 429 and response is not None:
        higher = "" if has_token else ", or set HF_TOKEN for a higher limit"
        found = f"{host} has had too many requests from you", f"{again} {_when(response.headers)}{higher}"
    elif status:
        found = f"{host} answers {status} for {name.repo}", f"{again} later"
    elif isinstance(error, errors.HTTPError):
        found = f"{host} cannot be reached ({why})", f"check the network and {again}"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = f"{name}: the disk of {folder} is full", "make room, and the same command goes on where this one stopped"
    elif isinstance(error, OSError):
        where = f"{error.filename or folder}: cannot be written ({error.strerror or error})"
        found = where, "name another folder in HF_HOME or EDGEVLM_CACHE"
    else:
        found = f"{host} does not answer as the hub does ({why!a})", "check HF_ENDPOINT"
    return HubError(*found)


def _when(headers: Mapping[str, str]) -> str:
    """Read from a response's headers when its rate limit ends."""
    limit = re.search(r";\s*t=(\d+)", headers.get("ratelimit", ""))
    after = headers.get("Retry-After", limit[1] if limit else "")
    return f"in {after} seconds" if after.isdecimal() else "in some minutes"
