"""Keeps a session on disk: a thread that snapshots it every so often, and once more at its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgevlm import __version__
from edgevlm.errors import UserError
from edgevlm.runtime.atomic import reason
from edgevlm.runtime.snapshots.copies import Copies
from edgevlm.runtime.snapshots.folder import StateFolder
from edgevlm.runtime.snapshots.format import Snapshot
from edgevlm.runtime.snapshots.image import described

if TYPE_CHECKING:
    from edgevlm.runtime.session import Session

Notify = Callable[[str], object]


class Keeper:
    """Snapshots of one session, in a folder that this process alone writes to.

    every: seconds from one to the next; where nothing has changed since the last, none is taken. notify: is told, from any
    thread, in one line, what was resumed or refused, that a snapshot could not be written, and that it can again; the logger
    ``edgevlm`` unless given. source: what is watched, for people; give no secrets.

    Raises UserError for a folder that cannot be used, before anything is loaded.
    """

    def __init__(self, folder: str | Path, every: float = 30.0, notify: Notify | None = None, source: str = "") -> None:
        if not 0 < every < threading.TIMEOUT_MAX:
            raise UserError(f"--state-every {every:g}: give a number of seconds above 0")
        self.every, self.source = every, source
        self.notify: Notify = notify or logging.getLogger("edgevlm").warning
        self.resumed: Snapshot | None = None
        self.written = 0  # snapshots, by this process
        self.longest_ms = 0.0  # that the session was held for one
        self._folder = StateFolder(folder)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: object = None  # the session's version as of the newest snapshot
        self._failing = False

    @property
    def folder(self) -> Path:
        return self._folder.path

    def attach(self, session: Session, identity: dict[str, Any], nbytes: int) -> Snapshot | None:
        """The snapshot for ``session`` to go on from, if there is one; called once, by the session.

        nbytes: of the second buffer. Raises UserError for a folder that holds another session.
        """
        self._session, self._identity = session, identity
        self.resumed, refused = self._folder.resume(identity)
        for line in refused:
            self._tell(f"refused: {line}")
        if self.resumed is not None:
            self._tell(f"resumed from {self.resumed.path.name}: {described(self.resumed.about)}")
        elif refused:
            self._tell(f"nothing in {self._folder.path} can be used: a new stream begins")
        self.copies = Copies(nbytes)
        return self.resumed

    def start(self) -> None:
        """Begin to take snapshots; of the one to go on from, all has been taken, and its file is let go of."""
        if self.resumed is not None:
            self.resumed = replace(self.resumed, arrays={})
        self._last = self._session.version
        self._thread = threading.Thread(target=self._run, name="edgevlm-state", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the last snapshot, if anything has changed, and let go of the folder. Closing it again does nothing."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._snapshot()
        self._folder.close()

    def _run(self) -> None:
        while not self._closing.wait(self.every):
            self._snapshot()

    def _snapshot(self) -> None:
        version = self._session.version
        if version == self._last:
            return
        try:
            path = self._write()
        except (OSError, MemoryError, UserError) as error:
            why = "there is no memory for it" if isinstance(error, MemoryError) else str(error)
            if isinstance(error, OSError):
                why = reason(error, self._folder.path)
            return self._failed(f"no snapshot in {self._folder.path} ({why})")
        self._last = version
        self.written += 1
        if self._failing:
            self._tell(f"snapshots are written again ({path.name})")
        self._failing = False

    def _write(self) -> Path:
        """Where the session is now. Raises OSError, MemoryError."""
        self._session.sync()  # so that little is left to be written while the session is held
        about, arrays, held_ms = self._session.image(self.copies)
        self.longest_ms = max(self.longest_ms, held_ms)
        self._session.sync()
        head = {"edgevlm": __version__, "written": time.time(), "source": self.source, "identity": self._identity}
        return self._folder.write({**head, **about}, arrays)

    def _failed(self, what: str) -> None:
        if self._closing.is_set():
            self._tell(f"{what}: what came since the newest one is not kept")
        elif not self._failing:
            self._tell(f"{what}: the stream goes on, and every {self.every:g} s it is tried again")
        self._failing = True

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # a terminal that went away is no reason to stop
            self.notify(line)
