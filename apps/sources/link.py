"""One connection to a camera, in a thread of its own: what it hangs in hangs nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from edgevlm.apps.sources.base import Connection, Grabbed, SourceRefused, mask_credentials
from edgevlm.errors import UserError

Deliver = Callable[["Link", Connection, Grabbed], None]


class Link:
    """Connects, then hands each picture to ``deliver`` until the connection breaks or it is abandoned.

    ``changed`` is notified when it opens and when it is over. A thread inside a library cannot be stopped: an abandoned
    link ends by itself when the library lets go of it, which its own timeouts see to.
    """

    def __init__(self, connect: Callable[[], Connection], deliver: Deliver, changed: threading.Condition) -> None:
        self._connect, self._deliver, self._changed = connect, deliver, changed
        self.opened = self.over = self.abandoned = False
        self.finished = False  # it was a recording, and that has been read to its end
        self.refused = False  # the camera answered, and trying again as before is of no use
        self.problem: str | None = None
        self.keyed = False  # a picture that stands alone has come
        self.holding = False  # its thread waits for the frame's reader, and not for the camera
        self.moved_s = self.opened_s = time.monotonic()  # when it began, opened, or brought a whole picture; when it opened
        self._thread = threading.Thread(target=self._run, name="edgevlm-reader", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def quiet_s(self) -> float:
        """Seconds since it last moved."""
        return 0.0 if self.holding else time.monotonic() - self.moved_s

    def abandon(self) -> None:
        self.abandoned = True

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # whatever a driver or a library throws, the camera is tried again
            self.problem = _words(error)
            self.refused = isinstance(error, SourceRefused)
        finally:
            with self._changed:
                self.over = True
                self._changed.notify_all()

    def _read(self) -> None:
        connection = self._connect()
        try:
            with self._changed:
                self.opened = True
                self.opened_s = self.moved_s = time.monotonic()
                self._changed.notify_all()
            while not self.abandoned and (grabbed := connection.grab()) is not None:
                if not grabbed.corrupt:
                    self.moved_s = time.monotonic()
                self._deliver(self, connection, grabbed)
            self.finished = connection.finished
            self.problem = connection.problem
        finally:
            connection.close()


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (
        mask_credentials(str(error))
        if isinstance(error, UserError)
        else f"{type(error).__name__}: {mask_credentials(str(error))}"
    )
