"""Download models from the Hugging Face hub, named ``ORG/NAME[@revision]``, into the cache that all hub programs share.

This module downloads the files itself, because ``huggingface_hub`` cannot resume a download in a later run or check hashes.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from edgevlm.apps.bundles.cache import locked
from edgevlm.apps.proxies import environment_problem, proxy_variables
from edgevlm.errors import UserError
from edgevlm.progress import Notify, Report
from edgevlm.runtime.bundle import MANIFEST, hash_file
from edgevlm.runtime.files import atomic_write, look

TIMEOUT_S = 10.0
PAUSES_S = (1, 2, 4, 8, 8)
"""``PAUSES_S[n]`` is the pause in seconds after n attempts in a row that brought nothing new."""
ATTEMPTS = 64
SLOW_S, SLOW_BYTES = 300.0, 300_000  # give up if fewer than SLOW_BYTES bytes arrive in SLOW_S seconds
MB = 1_000_000
CONFIG = "config.json"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # huggingface_hub reads the variable when imported
_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?", re.ASCII)
_PLAIN = re.compile(r"\w[\w.-]*", re.ASCII)  # a file name without a folder
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubError(UserError):
    """Raised when a request to the hub fails. ``what``: the message without the advice."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what


class HubId(NamedTuple):
    """A repository's name and revision (branch, tag or commit)."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


class HubFile(NamedTuple):
    """A file of a repository. ``digest``: its SHA-256 or, if small, git SHA-1; also its name in the hub's cache."""

    name: str
    bytes: int
    digest: str


def parse_id(name: str) -> HubId:
    """Parse ``ORG/NAME[@REVISION]``, with or without ``hf:``. Raises UserError."""
    if (match := _ID.fullmatch(name.removeprefix("hf:"))) is None:
        raise UserError(f"{name}: is not a hub name; give ORG/NAME or ORG/NAME@REVISION")
    return HubId(match[1], match[2] or "main")


def hub_id(model: str) -> HubId | None:
    """Return the repository with this name, or None for a folder. Existing folders take precedence over repositories.

    ``hf:ORG/NAME`` always names a repository. Raises UserError for ``hf:`` without a repository's name.
    """
    is_name = model.startswith("hf:") or (_ID.fullmatch(model) is not None and look(model) == "nothing")
    return parse_id(model) if is_name else None


class Repository:
    """A hub repository at one commit."""

    def __init__(self, name: HubId, notify: Notify, commit: str | None = None) -> None:
        """Ask the hub for the revision's commit, unless the commit is known. Offline, use the last downloaded commit.

        Raises HubError.
        """
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.file_download import repo_folder_name

        self.name, self._notify = name, notify
        self.home = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type="model")
        self.problem: HubError | None = None  # why the hub cannot be reached
        self._listed: Mapping[str, HubFile] | None = None
        kept = (try_to_load_from_cache(name.repo, file, revision=name.revision) for file in (CONFIG, MANIFEST))
        known = commit or next((Path(path).parent.name for path in kept if isinstance(path, str)), None)
        self.commit = known or name.revision
        if known is not None and known in (commit, name.revision):
            return
        self._ask(name.revision)
        if self.problem is not None and known is None:
            raise self.problem
        if self.problem is not None and not constants.HF_HUB_OFFLINE:
            notify(f"{self.problem.what}; using the earlier download, commit {self.commit[:12]}")

    @property
    def folder(self) -> Path:
        """The folder of the repository's downloaded files, in the hub's cache."""
        return self.home / "snapshots" / self.commit

    @property
    def files(self) -> Mapping[str, HubFile]:
        """All files that the hub lists for this repository; empty if the hub cannot be reached."""
        return self._ask(self.commit) if self._listed is None else self._listed

    @property
    def is_bundle(self) -> bool:
        """Return whether the repository holds a bundle rather than a checkpoint."""
        there = [name for name in (MANIFEST, CONFIG) if (self.folder / name).exists()]
        return there[0] == MANIFEST if there else MANIFEST in self.files

    def fetch(self, names: Iterable[str], progress: Report) -> Path:
        """Download those of the named files that the repository has, and return their folder. Raises HubError."""
        wanted = [self.files[name] for name in names if not (self.folder / name).exists() and name in self.files]
        if not wanted:
            return self.folder
        blobs = self.home / "blobs"
        try:
            for folder in (blobs, self.folder):
                folder.mkdir(parents=True, exist_ok=True)
            waiting = f"another process is downloading {self.name}; waiting for it"
            with locked(blobs, waiting, self._notify):
                self.download({blobs / file.digest: file for file in wanted}, progress)
                for file in wanted:
                    link, blob = self.folder / file.name, blobs / file.digest
                    link.unlink(missing_ok=True)  # the link may point to a deleted blob
                    try:
                        link.symlink_to(os.path.relpath(blob, link.parent))
                    except PermissionError:  # the file system has no symbolic links
                        shutil.copyfile(blob, link)
        except OSError as error:
            raise explain(error, self.name, self.home) from None
        return self.folder

    def download(self, files: Mapping[Path, HubFile], progress: Report) -> None:
        """Download each file to its path, resuming from ``PATH.part``, and check its hash. Raises HubError."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils.sha import git_hash

        parts = {path.with_name(f"{path.name}.part"): file for path, file in files.items() if not path.exists()}
        before, total = 0, sum(file.bytes for file in parts.values())
        needed = total - sum(part.stat().st_size for part in parts if part.exists())
        try:
            if parts and needed > (free := shutil.disk_usage(next(iter(parts)).parent).free):
                what = f"needs {needed / MB:,.0f} MB, but only {free / MB:,.0f} MB are free on the disk of"
                raise HubError(f"{self.name}: {what} {self.home}", "free up space, or set HF_HOME to a folder on another disk")
            for part, file in parts.items():

                def tell(arrived: int, before: int = before) -> None:
                    progress(f"downloading {self.name} (MB)", (before + arrived) // MB, total // MB)

                _receive(hf_hub_url(self.name.repo, file.name, revision=self.commit), part, file, tell)
                before += file.bytes
                progress(f"checking {file.name}", before // MB, total // MB)
                if file.digest != (hash_file(part).sha256 if len(file.digest) == 64 else git_hash(part.read_bytes())):
                    part.unlink()
                    what = f"{self.name}: the downloaded {file.name} does not match the hub's hash"
                    raise HubError(what, "run the same command again")
                part.replace(part.with_suffix(""))
        except Exception as error:
            raise explain(error, self.name, self.home) from None

    def remember(self) -> None:
        """Store the revision's commit for offline use."""
        if self.name.revision != self.commit:
            ref = self.home / "refs" / self.name.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(ref) as stream:
                stream.write(self.commit.encode())

    def _ask(self, revision: str) -> Mapping[str, HubFile]:
        """Ask the hub for a revision's commit and top-level files. On failure, store the error in :attr:`problem`."""
        from huggingface_hub import HfApi

        self._listed = {}
        try:
            info = HfApi(library_name="edgevlm").model_info(
                self.name.repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S
            )
            listed = [
                HubFile(each.rfilename, int(each.size or 0), str(each.lfs.sha256 if each.lfs else each.blob_id))
                for each in info.siblings or ()
                if _PLAIN.fullmatch(each.rfilename)
            ]
            if not all(_HASH.fullmatch(found) for found in (str(info.sha), *(file.digest for file in listed))):
                raise ValueError("lists no commit, or files without a hash")
        except Exception as error:
            self.problem = explain(error, self.name, self.home)
            return self._listed
        if info.id != self.name.repo and _ID.fullmatch(info.id) and revision == self.name.revision:
            self._notify(f"{self.name.repo} was renamed to {info.id}")
        self.commit, self._listed = str(info.sha), {file.name: file for file in listed}
        return self._listed


def _receive(url: str, part: Path, file: HubFile, tell: Callable[[int], None]) -> None:
    """Download the rest of a file and append it to ``part``. Raises HTTPError.

    Makes up to ``ATTEMPTS`` attempts, but gives up if the transfer is slow or if ``len(PAUSES_S)`` attempts in a row bring no
    new bytes.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    failures, headers = 0, build_hf_headers(library_name="edgevlm") | {"Accept-Encoding": "identity"}
    with part.open("ab") as stream:
        enough, end = stream.tell() + SLOW_BYTES, time.monotonic() + SLOW_S
        for attempt in range(1, ATTEMPTS + 1):
            tell(begin := stream.tell())
            if begin >= file.bytes:
                return
            problem: HTTPError | None = None
            wanted = headers | ({"Range": f"bytes={begin}-"} if begin else {})
            try:
                with get_session().stream("GET", url, headers=wanted, follow_redirects=True, timeout=TIMEOUT_S) as response:
                    hf_raise_for_status(response)
                    if begin and not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
                        stream.truncate(0)
                        stream.seek(0)
                    for block in response.iter_bytes():
                        stream.write(block[: file.bytes + 1 - stream.tell()])  # a file that is too long fails the hash check
                        tell(stream.tell())
                        if stream.tell() > file.bytes:
                            return
                        if stream.tell() >= enough:
                            enough, end = stream.tell() + SLOW_BYTES, time.monotonic() + SLOW_S
                        if time.monotonic() > end:
                            break
            except HTTPError as error:
                problem = error
            if stream.tell() >= file.bytes:
                return
            if time.monotonic() > end:
                raise HTTPError(f"less than {SLOW_BYTES // 1000} kB arrived in {SLOW_S:g} s")
            failures = 0 if stream.tell() > begin else failures + 1
            refused = isinstance(problem, HfHubHTTPError) and problem.response.status_code < 500
            if refused or failures == len(PAUSES_S) or attempt == ATTEMPTS:
                if problem is not None:
                    raise problem
                return  # the caller's hash check will report the error
            time.sleep(PAUSES_S[failures])


def explain(error: Exception, name: HubId, folder: Path) -> HubError:
    """Describe an error and its fix in one line. ``folder``: where the download was written."""
    from huggingface_hub import constants, errors

    if isinstance(error, HubError):
        return error
    host = re.sub(r".*@|/.*", "", constants.ENDPOINT.partition("://")[2])
    page, again = f"{constants.ENDPOINT}/{name.repo}", "run the same command again"
    status = int(getattr(getattr(error, "response", None), "status_code", 0))
    why = " ".join(str(error).split())[:200] or type(error).__name__  # the error text may come from a server
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubError(f"{name} is not downloaded, and HF_HUB_OFFLINE is set", "unset it once, or give a folder")
    if isinstance(error, errors.GatedRepoError):
        return HubError(f"{name.repo} is gated", f"accept its terms at {page}, set HF_TOKEN to your token, and {again}")
    if status in (401, 403, 404):
        what = f"{name} is neither a local folder nor a model or revision on {host}"
        return HubError(what, f"check its name at {page}; if it is private, set HF_TOKEN")
    if status:
        return HubError(f"{host} returned status {status} for {name.repo}", f"{again} later")
    if isinstance(error, errors.HTTPError):
        by = f", through the proxy in {names}" if (names := proxy_variables("https")) else ""
        return HubError(f"{host} cannot be reached ({why}){by}", f"check the network and {again}")
    if problem := environment_problem(error):
        return HubError(*problem.split("; ", 1))
    if isinstance(error, OSError):
        where = f"{error.filename or folder}: cannot be written ({error.strerror or error})"
        return HubError(where, "free up space, or set HF_HOME or EDGEVLM_CACHE to another folder; downloaded parts are kept")
    return HubError(f"{host} does not answer like the Hugging Face hub ({why!a})", "check HF_ENDPOINT")
