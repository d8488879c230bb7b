"""Where events are sent: standard output, a webhook, a broker, ...; each a class with the methods of :class:`Sink`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edgevlm.apps.watches.events import Event


class Sink:
    """A receiver of events. One thread calls it, in the order of the events.

    Another package's is found by an entry point in the group ``edgevlm.sinks``. The options of its table in edgevlm.toml are
    keyword arguments of its constructor, which raises UserError for wrong ones and sends nothing.
    """

    def send(self, event: Event, pictures: Sequence[bytes]) -> None:
        """Return once the receiver has the event; ``event.line()`` is its JSON. Raises for any failure: it is tried again."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of connections."""


class Stdout(Sink):
    """JSON lines on standard output."""

    def send(self, event: Event, pictures: Sequence[bytes]) -> None:
        print(event.line(), file=sys.stdout, flush=True)
