"""Your own sink: `kind = "./examples/my_sink.py:LogFile"` in a [[sinks]] table of edgevlm.toml."""

from collections.abc import Sequence

from edgevlm.extend import Sink, WatchEvent


class LogFile(Sink):
    """A sink that writes one line per event to a file."""

    def __init__(self, path: str, words: bool = True):
        self.path, self.words = path, words

    def send(self, event: WatchEvent, pictures: Sequence[bytes]) -> None:
        """Write the event to the file. If this raises, the event is sent again later."""
        line = f"{event.camera}: {event.question} {event.state}" if self.words else event.line()
        with open(self.path, "a") as file:
            file.write(line + "\n")
