"""Questions in progress: each has a thread of its own, and a place in the turnstile from the moment it is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edgevlm.errors import UserError
from edgevlm.runtime.answer import Answer, FinishReason
from edgevlm.runtime.scheduler import Turnstile


class Answers:
    """Starts answers in the order asked, and ends them together."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.running: set[Answer] = set()
        self._turnstile = turnstile
        self._opening = threading.Lock()  # over _closed and what running is given
        self._closed = False

    def check_open(self) -> None:
        """Raise UserError after :meth:`close`."""
        if self._closed:
            raise UserError("the session is closed; open another one")

    def start(self, answer: Answer, work: Callable[[], FinishReason]) -> None:
        """Give ``answer`` the next place, and a thread in which ``work`` runs when its turn has come.

        Raises UserError after :meth:`close`, and when the system starts no more threads.
        """
        with self._opening:
            self.check_open()
            self.running.add(answer)
            ticket = self._turnstile.queue()
        try:
            threading.Thread(target=self._run, args=(answer, ticket, work), name="edgevlm-answer", daemon=True).start()
        except BaseException as error:
            self._turnstile.leave(ticket)
            self.running.discard(answer)
            answer.finish(None, error)
            if isinstance(error, RuntimeError):
                raise UserError(f"a question needs a thread of its own ({error}); end other programs and ask again") from None
            raise

    def _run(self, answer: Answer, ticket: object, work: Callable[[], FinishReason]) -> None:
        error: BaseException | None = None
        reason: FinishReason | None = None
        with self._turnstile.question(ticket):
            try:
                reason = work()
            except BaseException as caught:
                error = caught
        self.running.discard(answer)
        answer.finish(reason, error)

    def cancel(self) -> list[Answer]:
        """Cancel all that run or wait, and wait for none of them."""
        running = list(self.running)
        for answer in running:
            answer.cancel()
        return running

    def close(self) -> bool:
        """Take no more, cancel all and wait for their ends; False if it was closed already."""
        with self._opening:
            already, self._closed = self._closed, True
        for answer in self.cancel():
            answer.settle()
        return not already
