"""Run a TensorRT decoder on one stream's cache in device memory.

There are three kinds of calls: for one token, for a chunk's rows and for a question's rows. Keys and values are read in place
from the cache. docs/internals/engines.md describes the graphs' inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgevlm.engines.inputs import check_pattern, check_step
from edgevlm.engines.tensorrt.api import EngineCalls, Loaded, Workspace
from edgevlm.engines.tensorrt.jobs import DECODER_CALLS, ONE, QUESTION, ROWS, USUAL_QUESTION, Dims, pieces
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import Fetch, Float32, FramePattern, Int32, KVBuffer, Sight, StepResult
from edgevlm.runtime.graph_profiles import TENSORRT_10_3

UNUSED = "unused queries"  # the memory block for the queries of layers that are not probed


class TensorRTDecoder:
    """Runs a decoder with TensorRT. See :class:`edgevlm.runtime.engine.Decoder`.

    During a step, nothing else may write to the device buffers, and work queued earlier on other CUDA streams must be finished.
    """

    def __init__(
        self, workspace: Workspace, bundle: Bundle, loaded: Loaded, buffers: Sequence[KVBuffer], probes: Sequence[int]
    ) -> None:
        self._workspace, self._spec, self._loaded = workspace, bundle.decoder, loaded
        self._buffers, self._probes = tuple(buffers), tuple(probes)
        self._writes_rows = bundle.profile == TENSORRT_10_3  # the graph outputs new rows, to be copied into the cache
        self._capacity = np.array([buffer.shape[2] for buffer in buffers], np.int64)
        self._most = {name: loaded.most("inputs_embeds", kind)[1] for kind, name in enumerate(DECODER_CALLS)}
        columns = np.arange(self._capacity.max(), dtype=np.int32)  # shared by all decoders of a backend
        with workspace.lock:
            self._columns = workspace.at("columns", columns.nbytes)
            workspace.driver.copy_in(self._columns, columns, workspace.stream)
            workspace.stream.synchronize()
        self._calls: dict[str, EngineCalls] = {}

    def step(
        self,
        embeds: Float32,
        cos: Float32,
        sin: Float32,
        past_len: Int32,
        logit_rows: Sequence[int] = (-1,),
        pattern: FramePattern | None = None,
        rows: Sequence[Sequence[Int32]] | None = None,
        fetch: Fetch | None = None,
        sight: Sight | None = None,
    ) -> StepResult:
        """Append rows, in several calls if there are too many for one.

        Raises CacheFull or CacheError without changing the cache.
        """
        check_step(self._spec, self._capacity, embeds, cos, sin, past_len, logit_rows)
        check_pattern(self._spec, len(embeds), past_len, pattern, sparse=False)
        assert (rows, fetch, sight) == (None, None, None), "a whole graph attends to all rows"
        count = len(embeds)
        wanted = [row % count for row in logit_rows]
        kind = self._kind(count, len(set(wanted)))
        logits = np.empty((len(wanted), self._spec.vocab), np.float32)
        probes: dict[int, list[Float32]] = {layer: [] for layer in self._probes}
        with self._workspace.lock:
            for piece in pieces(count, self._most[kind]):
                asked = sorted({row for row in wanted if piece.start <= row < piece.stop})
                local = np.array([row - piece.start for row in asked] or [piece.stop - piece.start - 1], np.int64)
                inputs = {"inputs_embeds": self._wide(embeds[piece]), "cos": cos[piece][None], "sin": sin[piece][None]}
                found = self._run(kind, inputs | {"logit_rows": local}, past_len + np.int64(piece.start))
                for place, row in enumerate(wanted):
                    if row in asked:
                        logits[place] = found["logits"][0, asked.index(row)]
                for layer in self._probes:
                    probes[layer].append(found[f"query{layer}"].reshape(-1, self._spec.heads, self._spec.head_dim))
        return StepResult(logits, {layer: _by_head(parts) for layer, parts in probes.items()})

    def _kind(self, rows: int, logit_rows: int) -> str:
        if logit_rows > 1:
            return QUESTION
        if rows == 1:
            return ONE
        return QUESTION if rows <= USUAL_QUESTION or self._most[ROWS] < rows <= self._most[QUESTION] else ROWS

    def _wide(self, embeds: Float32) -> Float32:
        """Append zeros to rows that have no DeepStack features. The result is ``[1, S, row_width]``."""
        wide = np.zeros((1, len(embeds), self._spec.row_width), np.float32)
        wide[0, :, : embeds.shape[1]] = embeds
        return wide

    def _run(self, kind: str, inputs: dict[str, NDArray], past: NDArray[np.int64]) -> dict[str, NDArray]:
        spec, calls = self._spec, self._call(kind)
        rows, total = inputs["inputs_embeds"].shape[1], past + inputs["inputs_embeds"].shape[1]
        for layer, read in enumerate(np.maximum(past, 1) if self._writes_rows else total):
            calls.shape(f"columns{layer}", (int(read),))
        outputs: dict[str, Dims] = {"logits": (1, len(inputs["logit_rows"]), spec.vocab)}
        outputs |= {f"query{layer}": (1, rows, spec.heads * spec.head_dim) for layer in self._probes}
        self._leave(calls, rows)
        try:
            calls.call(inputs | {"total_len": total.astype(np.int32)}, outputs)
        except RuntimeError as error:
            raise RuntimeError(f"{rows} rows after {past.min()} to {past.max()} cached rows: {error}") from error
        if self._writes_rows:
            self._write_rows(calls, rows, past)
        return calls.fetch(outputs)

    def _leave(self, calls: EngineCalls, rows: int) -> None:
        spec = self._spec
        for layer in range(spec.layers):
            if f"query{layer}" in self._loaded.dtypes and layer not in self._probes:
                calls.output(f"query{layer}", (1, rows, spec.heads * spec.head_dim), UNUSED)
            if self._writes_rows:
                for part in ("key", "value"):
                    calls.output(f"new_{part}{layer}", (1, spec.kv_heads, rows, spec.head_dim))

    def _write_rows(self, calls: EngineCalls, rows: int, past: NDArray[np.int64]) -> None:
        """Copy a call's new keys and values into each layer's buffers, after the ``past`` rows that are already there."""
        driver, stream, heads = self._workspace.driver, self._workspace.stream, self._spec.kv_heads
        for layer, buffer in enumerate(self._buffers):
            row = self._spec.head_dim * buffer.dtype.itemsize
            for part, address in (("key", buffer.key_address), ("value", buffer.value_address)):
                new = calls.output(f"new_{part}{layer}", (1, heads, rows, self._spec.head_dim))
                to = address + int(past[layer]) * row
                driver.copy_rows(to, buffer.shape[2] * row, new, rows * row, rows * row, heads, stream)

    def _call(self, kind: str) -> EngineCalls:
        if kind not in self._calls:
            calls = self._calls[kind] = EngineCalls(self._workspace, self._loaded, DECODER_CALLS.index(kind))
            for layer, buffer in enumerate(self._buffers):
                calls.bind(f"columns{layer}", self._columns)
                for part, address in (("key", buffer.key_address), ("value", buffer.value_address)):
                    calls.bind(f"{part}{layer}", address)
                    if not self._writes_rows:
                        calls.bind(f"{part}{layer}_out", address)
        return self._calls[kind]


def _by_head(parts: list[Float32]) -> Float32:
    """Join pieces ``[n, heads, head_dim]`` into ``[heads, S, head_dim]``."""
    return np.ascontiguousarray(np.concatenate(parts).transpose(1, 0, 2))
