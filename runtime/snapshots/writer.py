"""Write snapshots of a session, in a thread at intervals and once more at the session's end.

The session waits until its state is copied, and continues while the copy is written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm import __version__
from edgevlm.errors import SnapshotError, UserError
from edgevlm.progress import Lost, Notify
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.changes import ChangedEncoder
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.instant import Instant
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.snapshots.directory import SnapshotDirectory, SnapshotKey, is_older
from edgevlm.runtime.snapshots.format import Arrays, OtherFormat, Snapshot, padding
from edgevlm.runtime.store import Store
from edgevlm.runtime.stream import Stream

LATER = (  # fields of the chat and the decoder that earlier versions did not hash
    "adds_special", "repetition_penalty", "no_repeat_ngram_size", "windows", "local_inv_freq", "whole_frames",
)  # fmt: skip


def identity(stream: Stream, chat: Chat, text: TextBudget, encoder: ChangedEncoder | None = None) -> dict[str, Any]:
    """Return a session's settings as JSON values. All except ``name`` must be the same in a resumed session."""
    bundle = stream.model.bundle
    height, width = bundle.vision.size
    return {
        "model": model_hash(bundle),
        "name": bundle.source,
        **({"frame size": f"{width}x{height}"} if bundle.vision.pixels else {}),
        "policy": policy_text(stream.policy),
        "budget": stream.budget,
        "dtype": stream.cache.dtype.name,
        "chunk": stream.chunk,
        "reindexing": stream.positions.reindexing,
        "append": "all" if stream.references is None else str(stream.references.settings),
        "encode": "all" if encoder is None else str(encoder.settings),
        "text budget": [text.conversation, text.question, text.answer],
        "system prompt": hashlib.sha256(chat.prefix_text.encode()).hexdigest()[:16],
    }


def model_hash(bundle: Bundle) -> str:
    """Return the SHA-256 of a bundle's contents. The frame size is not hashed if the bundle takes frames of any size."""
    later = {each.name: each.default for part in (bundle.chat, bundle.decoder) for each in fields(part) if each.name in LATER}
    by_size = ("size", "grid", "tokens_per_frame", "changed") if bundle.vision.pixels else ("pixels",)
    described = {
        "family": bundle.family,
        "files": {name: asdict(record) for name, record in bundle.files.items()},
        "decoder": {name: value for name, value in asdict(bundle.decoder).items() if value != later.get(name, ...)},
        "vision": {name: value for name, value in asdict(bundle.vision).items() if name not in by_size},
        "chat": {name: value for name, value in asdict(bundle.chat).items() if value != later.get(name, ...)},
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def policy_text(policy: Policy) -> str:
    """Return a policy as ``name:setting=value,...``, with only the settings that differ from their defaults."""
    if not is_dataclass(policy):
        return policy.name
    changed = (field.name for field in fields(policy) if getattr(policy, field.name) != field.default)
    settings = ",".join(f"{name}={getattr(policy, name)}" for name in changed)
    return f"{policy.name}:{settings}" if settings else policy.name


def restore(snapshot: Snapshot, take: Callable[[Mapping[str, Any], Arrays], object]) -> None:
    """Restore a snapshot by passing its header and arrays to ``take``. Raises SnapshotError if ``take`` fails."""
    about = snapshot.about
    try:
        take(about, snapshot.arrays)
    except MemoryError:
        raise
    except Exception as error:  # any part of the snapshot may be incompatible
        by = "" if about["edgevlm"] == __version__ else f"was written by edgevlm {about['edgevlm'][:40]} and "
        raise OtherFormat(f"{by}does not match this session ({_brief(error)})") from None


class CaptureBuffer:
    """A buffer for copies of a session's arrays. The stream waits while arrays are copied, but not while they are written.

    The buffer's memory pages are allocated up front. The buffer grows if the arrays do not fit.
    """

    def __init__(self, nbytes: int) -> None:
        self._block = np.ones(nbytes, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def copy(self, arrays: Arrays) -> dict[str, NDArray]:
        """Return contiguous copies of the arrays, valid until the next call."""
        needed = sum(array.nbytes + padding(array.nbytes) for array in arrays.values())
        if needed > self.nbytes:
            self._block = np.ones(needed, np.uint8)
        copies, start = {}, 0
        for name, array in arrays.items():
            copies[name] = self._block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(copies[name], array)
            start += array.nbytes + padding(array.nbytes)
        return copies


class Captured(Protocol):
    """The part of a session that the snapshot writer uses. ``_version`` changes whenever the session's state changes."""

    @property
    def _version(self) -> object: ...
    @property
    def store(self) -> Store | None: ...
    def _capture(self, buffer: CaptureBuffer) -> tuple[dict[str, Any], dict[str, NDArray], float]: ...


class SnapshotWriter:
    """A writer of one session's snapshots to a directory that no other process writes to.

    ``every``: the seconds between snapshots. A snapshot is skipped if the session has not changed. ``notify``: a function that
    any thread calls with one line when a snapshot is resumed or refused, or when writing fails or works again. By default, the
    line is logged. ``source``: the name of the session's source, without secrets. ``key``: the key that encrypts the snapshots.
    ``begin_again``: whether to start a new session if the snapshots belong to a different session. By default, :meth:`attach`
    then raises UserError, as it does for snapshots of any source but ``source`` and :attr:`continues`.

    Raises UserError if the directory cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        every: float = 30.0,
        notify: Notify | None = None,
        source: str = "",
        key: SnapshotKey | None = None,
        begin_again: bool = False,
    ) -> None:
        if not 0 < every < threading.TIMEOUT_MAX:
            raise UserError(f"--state-every {every:g}: give a number of seconds above 0")
        self.every, self.source, self.begin_again = every, source, begin_again
        self.continues: str | None = None  # a second source whose snapshots may be resumed
        self.notify: Notify = notify or logging.getLogger("edgevlm").warning
        self.resumed: Snapshot | None = None
        self.written = 0
        self.longest_ms = 0.0  # the longest time that the session has waited for a snapshot
        self._directory = SnapshotDirectory(directory, key)
        self._storage, self.folder = self._directory.storage, self._directory.folder
        if not getattr(self._storage, "has_locks", True):
            self._try_notify(
                f"--state {self._storage}: its disk does not support locks (a network disk?); let no other program use it"
            )
        self._closing, self._writing = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: object = None  # the session's ``_version`` in the newest snapshot
        self._failing = self._unfit = False

    def kept(self, bundle: Bundle) -> Mapping[str, Any]:
        """Return the newest valid snapshot's identity if the snapshot was made with this model, else an empty mapping."""
        with suppress(OSError):  # :meth:`attach` reports the same error
            if self._newest.get("model") == model_hash(bundle):
                return self._newest
        return {}

    @cached_property
    def _newest(self) -> Mapping[str, Any]:
        return next((kept.about["identity"] for _, kept in self._directory.verified() if isinstance(kept, Snapshot)), {})

    def attach(self, session: Captured, identity: dict[str, Any], nbytes: int, take: Callable[[Snapshot], object]) -> None:
        """Resume a session from the newest usable snapshot. Raises UserError if the directory holds a different session.

        ``nbytes``: the size of the capture buffer. ``take``: a function that restores a snapshot. If the snapshot does not
        match the session, it raises SnapshotError and changes nothing.
        """
        self._session, self._identity = session, identity

        def checked(snapshot: Snapshot) -> None:
            was = snapshot.about.get("source", "")
            if was and self.source and not self.begin_again and was not in (self.source, self.continues):
                how = f"choose another folder, or add --state-from '{was}' to continue it"
                raise UserError(f"--state {self._storage}: holds the memory of {was}, not of {self.source}; {how}")
            take(snapshot)

        try:
            self.resumed, refused = self._directory.resume(identity, checked, self.begin_again)
        except OSError as error:
            why = self._storage.why(error)
            raise UserError(f"--state {self._storage}: cannot be read now ({why}); nothing was written") from None
        for line in refused:
            self._try_notify(f"refused: {line}")
        if self.resumed is not None:
            self._try_notify(f"resumed from {self.resumed.path.name}: {described(self.resumed.about)}", str)
        elif refused:
            kept = "; snapshots of another version or session are kept as *.other" if self._storage.others() else ""
            self._try_notify(f"no usable snapshot in {self._storage}: starting a new stream{kept}")
        self.buffer = CaptureBuffer(nbytes)

    def begins_again(self, bundle: Bundle, policy: Policy) -> bool:
        """Return whether a new stream may begin instead of resuming the newest snapshot. Raises OSError."""
        found, wanted = self._newest, {"model": model_hash(bundle), "name": bundle.source}
        return self.begin_again or not found or (is_older(found, wanted) and found["policy"] == policy_text(policy))

    def start(self) -> None:
        """Start taking snapshots at intervals, and close the snapshot that was resumed."""
        if self.resumed is not None:
            self.resumed = replace(self.resumed, arrays={})
        self._last = self._session._version
        thread = threading.Thread(target=self._run, name="edgevlm-state", daemon=True)
        thread.start()
        self._thread = thread

    def begin_anew(self) -> None:
        """Write a snapshot now, and delete all earlier snapshots. If writing fails, nothing is deleted. Raises UserError."""
        with self._writing:
            try:
                self._write(alone=True)
            except OSError as error:
                why = self._storage.why(error)
                raise UserError(f"{self._storage}: {why}; older snapshots were not deleted") from None

    def write_once(self, session: Captured, identity: dict[str, Any]) -> None:
        """Replace the directory's snapshots with a snapshot of this session, and release the directory. Raises UserError."""
        self._session, self._identity, self.buffer = session, identity, CaptureBuffer(0)
        try:
            self.begin_anew()
        finally:
            self._directory.close()

    def unfit(self, error: Exception) -> SnapshotError:
        """Stop taking snapshots of a resumed session that failed, and return the error to raise."""
        assert self.resumed is not None
        self._unfit = True
        return SnapshotError(
            f"{self.resumed.path}: the session resumed from it cannot continue ({_brief(error)}); "
            "move it away to use the previous snapshot"
        )

    def close(self) -> None:
        """Write a last snapshot if the session has changed, and release the directory. Closing a writer again does nothing."""
        self._closing.set()
        try:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
                self._snapshot()
        finally:
            self._directory.close()

    def _run(self) -> None:
        while not self._closing.wait(self.every):
            self._snapshot()

    def _snapshot(self) -> None:
        with self._writing:
            if self._session._version == self._last or self._unfit:
                return
            try:
                path = self._write()
            except OSError as error:
                self._failed(self._storage.why(error))
            except MemoryError:
                self._failed("out of memory")
            except UserError as error:
                self._failed(str(error))
            except Exception as error:  # a plugin's policy may raise any exception
                self._failed(_brief(error))
            else:
                if self._failing:
                    self._try_notify(f"writing snapshots resumed ({path.name})")
                self._failing = False

    def _write(self, alone: bool = False) -> PurePath:
        version = self._session._version
        self._sync()  # so that the sync after the capture has little left to write
        about, arrays, held_ms = self._session._capture(self.buffer)
        self.longest_ms = max(self.longest_ms, held_ms)
        self._sync()
        now = Instant.now()
        head = {"edgevlm": __version__, "written": now.wall, "source": self.source, "identity": self._identity, "boot": now[:2]}
        path = self._directory.write({**head, **about}, arrays, alone)
        self._last = version
        self.written += 1
        return path

    def _sync(self) -> None:
        """Flush the store to disk, because snapshots refer to the store's blocks."""
        if self._session.store is not None:
            self._session.store.sync()

    def _failed(self, why: str) -> None:
        what = f"cannot write a snapshot to {self._storage} ({why})"
        if self._closing.is_set():
            self._try_notify(f"{what}: changes since the newest one are lost")
        elif not self._failing:
            self._try_notify(f"{what}: the stream continues; retrying every {self.every:g} s")
        self._failing = True

    def _try_notify(self, line: str, kind: type[str] = Lost) -> None:
        with suppress(OSError):  # the terminal may be closed
            self.notify(kind(line))


def described(about: Mapping[str, Any]) -> str:
    """Return one line with a snapshot's number of frames, stream time and age."""
    session, age = about["session"], Instant.now().since(written_at(about))
    return f"{session['frames']:,} frames up to {session['time_s']:.1f} s, written {ago(age)} ago"


def written_at(about: Mapping[str, Any]) -> Instant:
    boot, boot_s = about.get("boot", ("", 0.0))
    return Instant(boot, boot_s, about["written"])


def ago(seconds: float) -> str:
    """Return a duration as text, such as ``90 s``, ``12 min``, ``5 h`` or ``3 days``."""
    for least, size, unit in ((172_800, 86_400, "days"), (7200, 3600, "h"), (120, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
