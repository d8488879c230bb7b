"""Calls that repeat, as a CUDA graph: one launch in place of one for each kernel."""

from __future__ import annotations

from contextlib import suppress

from edgevlm.engines.tensorrt.api import Context
from edgevlm.runtime.cuda.driver import Driver, Graph, Stream


class Replayed:
    """Runs a context. The second call in a row with the same addresses and shapes is recorded, those after it replay that.

    The first goes without, because TensorRT has work to put off until a call that follows a change. A graph is good for one
    version of its context, and a context has one graph: what a graph holds of it is gone when its shapes change. Where a call
    cannot be recorded none is.
    """

    def __init__(self, driver: Driver, stream: Stream, context: Context) -> None:
        self._driver, self._stream, self._context = driver, stream, context
        self._graph: Graph | None = None
        self._version = -1  # of the context when it last ran
        self._refused = False
        self.recorded = self.replayed = 0

    def run(self) -> None:
        """Ask the stream for the call. Raises RuntimeError with TensorRT's words."""
        if self._version != self._context.version:
            self.forget()
            self._version = self._context.version
            self._context.run()
            return
        if self._graph is None and not self._refused:
            self._record()
        if self._graph is None:
            self._context.run()
        else:
            self.replayed += 1
            self._driver.replay(self._graph, self._stream)

    def _record(self) -> None:
        try:
            self._graph = self._driver.record(self._context.run, self._stream)
            self.recorded += 1
        except RuntimeError:
            self._refused = True

    def forget(self) -> None:
        """Drop the graph."""
        if self._graph is not None:
            graph, self._graph = self._graph, None
            graph.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.forget()
