"""Writes snapshots of a session: a thread that takes one every so often, and one more at the session's end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Protocol

from numpy.typing import NDArray

from edgevlm import __version__
from edgevlm.errors import SnapshotError, UserError
from edgevlm.progress import Notify
from edgevlm.runtime.snapshots.capture import CaptureBuffer, described
from edgevlm.runtime.snapshots.directory import SnapshotDirectory, SnapshotKey
from edgevlm.runtime.snapshots.format import Snapshot
from edgevlm.runtime.store import Store


class Captured(Protocol):
    """A session, as the writer uses it."""

    @property
    def _version(self) -> object:
        """Changes whenever the session does."""

    @property
    def store(self) -> Store | None: ...
    def _capture(self, buffer: CaptureBuffer) -> tuple[dict[str, Any], dict[str, NDArray], float]: ...


class SnapshotWriter:
    """Writes snapshots of one session to a directory that only this process writes to.

    every: seconds between two; unchanged sessions are skipped. notify: called from any thread with one line when a snapshot
    is resumed, refused, cannot be written, or can be written again; by default the logger ``edgevlm``. source: for people;
    without secrets. key: of a SnapshotDirectory.

    Raises UserError for a directory that cannot be used, before anything is loaded.
    """

    def __init__(
        self,
        directory: str | Path,
        every: float = 30.0,
        notify: Notify | None = None,
        source: str = "",
        key: SnapshotKey | None = None,
    ) -> None:
        if not 0 < every < threading.TIMEOUT_MAX:
            raise UserError(f"--state-every {every:g}: give a number of seconds above 0")
        self.every, self.source = every, source
        self.notify: Notify = notify or logging.getLogger("edgevlm").warning
        self.resumed: Snapshot | None = None
        self.written = 0  # snapshots, by this process
        self.longest_ms = 0.0  # that the session was held for one
        self._directory = SnapshotDirectory(directory, key)
        self._closing, self._writing = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._last: object = None  # the session's version as of the newest snapshot
        self._failing = self._unfit = False

    @property
    def folder(self) -> Path | None:
        """Where other files may lie beside the snapshots; None at an address."""
        return self._directory.folder

    def attach(self, session: Captured, identity: dict[str, Any], nbytes: int, take: Callable[[Snapshot], object]) -> None:
        """Resume ``session`` from the newest snapshot that fits; called once, by the session.

        nbytes: of the second buffer. take: restores a snapshot, or raises SnapshotError and keeps nothing of it. Raises
        UserError for a directory that holds another session.
        """
        self._session, self._identity = session, identity
        try:
            self.resumed, refused = self._directory.resume(identity, take)
        except OSError as error:
            storage = self._directory.storage
            raise UserError(f"--state {storage}: cannot be read now ({storage.why(error)}); nothing was written") from None
        for line in refused:
            self._try_notify(f"refused: {line}")
        if self.resumed is not None:
            self._try_notify(f"resumed from {self.resumed.path.name}: {described(self.resumed.about)}")
        elif refused:
            self._try_notify(f"nothing in {self._directory.storage} can be used: a new stream begins")
        self.buffer = CaptureBuffer(nbytes)

    def start(self) -> None:
        """Begin to take snapshots, and close the file that was resumed from."""
        if self.resumed is not None:
            self.resumed = replace(self.resumed, arrays={})
        self._last = self._session._version
        self._thread = threading.Thread(target=self._run, name="edgevlm-state", daemon=True)
        self._thread.start()

    def begin_anew(self) -> None:
        """Take a snapshot now and remove all earlier ones. Raises UserError if it cannot be written; they stay then."""
        with self._writing:
            version = self._session._version
            try:
                self._write(alone=True)
            except OSError as error:
                storage = self._directory.storage
                raise UserError(f"{storage}: {storage.why(error)}; older snapshots are still there") from None
            self._last = version
            self.written += 1

    def unfit(self, error: Exception) -> SnapshotError:
        """Return the error for a session that fails after it was resumed; no more snapshots are taken of it."""
        assert self.resumed is not None
        self._unfit = True
        why = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        return SnapshotError(
            f"{self.resumed.path}: the session resumed from it cannot go on ({why}); move it away; the one before is used then"
        )

    def close(self) -> None:
        """Take a last snapshot if anything has changed, and release the directory. May be called again."""
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
            version = self._session._version
            if version == self._last or self._unfit:
                return
            try:
                path = self._write()
            except Exception as error:  # a plugin's policy may raise anything
                why = f"{type(error).__name__}: {error}"
                if isinstance(error, MemoryError):
                    why = "there is no memory for it"
                elif isinstance(error, OSError):
                    why = self._directory.storage.why(error)
                elif isinstance(error, UserError):
                    why = str(error)
                return self._failed(f"no snapshot in {self._directory.storage} ({why})")
            self._last = version
            self.written += 1
            if self._failing:
                self._try_notify(f"snapshots are written again ({path.name})")
            self._failing = False

    def _write(self, alone: bool = False) -> PurePath:
        """Raises OSError, MemoryError."""
        self._sync()  # so that little is left for the second one, between capture and write
        about, arrays, held_ms = self._session._capture(self.buffer)
        self.longest_ms = max(self.longest_ms, held_ms)
        self._sync()
        head = {"edgevlm": __version__, "written": time.time(), "source": self.source, "identity": self._identity}
        return self._directory.write({**head, **about}, arrays, alone)

    def _sync(self) -> None:
        """Flush the store: it must survive a power cut like the snapshot that refers to it."""
        if self._session.store is not None:
            self._session.store.sync()

    def _failed(self, what: str) -> None:
        if self._closing.is_set():
            self._try_notify(f"{what}: what came since the newest one is not kept")
        elif not self._failing:
            self._try_notify(f"{what}: the stream goes on, and every {self.every:g} s it is tried again")
        self._failing = True

    def _try_notify(self, line: str) -> None:
        with suppress(OSError):  # a terminal that went away is no reason to stop
            self.notify(line)
