"""The memory of one stream: cache, policy and positions, and the decoder that appends to it. Single-threaded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.engines.base import FramePattern, StepResult
from edgevlm.errors import UserError
from edgevlm.runtime.cache import Rows
from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Appended, Guidance, Policy, StreamShape
from edgevlm.runtime.policies.base import nested, within
from edgevlm.runtime.positions import Positions, Reindexing, rope_tables
from edgevlm.runtime.room import allocate, check_budget
from edgevlm.runtime.st_spattn import frame_pattern
from edgevlm.runtime.state.copies import copy_bytes
from edgevlm.runtime.stats import MemoryStats

Float32 = NDArray[np.float32]


class Stream:
    """Appends prefix, frames and questions to a cache of fixed size.

    capacity of every layer = prefix + |M| + text room; at no moment does a layer hold more than prefix + |M| rows of memory.
    A policy that ``appends_first`` has a chunk of frames more in both. copy_bytes: of a second buffer for ``snapshots``, which
    must fit beside the cache; it is not made here.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        budget: int,
        prefix: Sequence[int],
        text_room: int,
        reindexing: Reindexing,
        chunk: int = 1,
        snapshots: bool = False,
    ) -> None:
        decoder, vision = model.bundle.decoder, model.bundle.vision
        self.model, self.policy, self.budget, self.prefix = model, policy, budget, len(prefix)
        calibration = model.bundle.calibration()
        shape = StreamShape(decoder.layers, vision.tokens_per_frame, len(prefix), model.bundle.family, calibration)
        policy.attach(budget, shape)
        needs = policy.needs
        self._guidance = [] if needs.raw_layers else [self._embed(text) for text in needs.guidance]
        text_room = max(text_room, sum(map(len, self._guidance)))
        self.chunk, ahead = chunk, chunk * vision.tokens_per_frame if policy.appends_first else 0
        check_budget(policy, budget, model.bundle, text_room, len(prefix), ahead)
        self.inv_freq = model.bundle.inv_freq
        if needs.raw_layers:
            self._project(needs.guidance, 0)  # a bundle that cannot is refused now
        capacities = [len(prefix) + int(rows) + ahead + text_room for rows in policy.layer_budgets]
        held = sum(capacities) - len(capacities) * text_room
        self.copy_bytes = copy_bytes(decoder, vision, held, chunk, np.dtype(np.float32).itemsize) if snapshots else 0
        self.cache = allocate(decoder, capacities, self.inv_freq, chunk, vision, self.copy_bytes)
        asked = {*needs.probe_layers, *needs.guidance_layers, *needs.question_layers}
        buffers, probes = self.cache.buffers(), tuple(sorted(asked))
        self.decoder = model.engine.bind(buffers, probes)
        self.sparse = None if needs.variant == "whole" else model.engine.bind(buffers, probes, needs.variant)
        rule: Reindexing = "eager" if policy.appends_first else reindexing
        unbounded: Reindexing = "lazy" if needs.question_layers else "never"
        self.positions = Positions(model.bundle.limit, text_room, rule if policy.bounded else unbounded)
        self.stats = MemoryStats()
        self.frames = 0
        self._seq = 0
        rows, columns = vision.grid
        self._row = np.repeat(np.arange(rows, dtype=np.int16), columns)
        self._col = np.tile(np.arange(columns, dtype=np.int16), rows)
        self._append(model.engine.embed(np.asarray(prefix, np.int64)), Kind.PREFIX, ())

    @property
    def tokens(self) -> int:
        """Rows of memory held in the fullest layer, the prefix left out."""
        return int(self.cache.lengths.max()) - self.prefix

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray]]:
        """Where the stream stands, as JSON has it, and what memory and policy hold: views, not copies."""
        numbers = {"position": self.positions.next, "seq": self._seq, "frames": self.frames, "stats": asdict(self.stats)}
        layers = {f"layer{layer}": self.cache.held(layer) for layer in range(self.cache.layers)}
        held = {f"{layer}.{name}": part for layer, parts in layers.items() for name, part in parts.items()}
        return numbers, held | nested("policy", self.policy.state())

    def restore(self, numbers: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> None:
        """Go on from what :meth:`state` was of a stream of the same model and settings."""
        for layer in range(self.cache.layers):
            self.cache.load(layer, within(arrays, f"layer{layer}"))
        self.policy.restore({name: part.copy() for name, part in within(arrays, "policy").items()}, self.cache)
        self.positions.next, self._seq, self.frames = numbers["position"], numbers["seq"], numbers["frames"]
        self.stats = MemoryStats(**numbers["stats"])

    def append_frames(self, features: Float32, coming: int = 0) -> int:
        """Append frames ``[F, tokens_per_frame, hidden]``, in pieces of whole frames, or in chunks.

        A piece is what fits as it is, else what one compression makes room for, and one frame at least: the least budget is a
        frame. ``coming`` more frames of the chunk will follow: the piece that they fill up waits for them. Returns how many
        were appended. Raises UserError when an unbounded policy's capacity is used up.
        """
        done = 0
        while done < len(features):
            count = self._piece(features[done:], coming)
            if count > len(features) - done:
                break
            self._prepare(count * features.shape[1])
            self._append_piece(features[done : done + count])
            done += count
            if self.policy.appends_first:
                self._make_room(0)
        return done

    def _piece(self, features: Float32, coming: int) -> int:
        """Frames of the next piece, of the ``coming`` too."""
        return min(self._frames_at_once(features.shape[1]), len(features) + coming)

    def _prepare(self, rows: int) -> None:
        """See to it that ``rows`` rows of frames can be appended; of what has been prepared for there is nothing more to do."""
        if not self.policy.bounded and self.tokens + rows > self.budget:
            per_frame = self.model.bundle.vision.tokens_per_frame
            raise UserError(
                f"the {self.policy.name} cache is full: {self.budget} tokens hold {self.budget // per_frame} frames; "
                "give a larger --budget, or a policy that compresses"
            )
        if self.policy.appends_first:
            self._reindex_when_due(rows, compressed=False)
        else:
            self._make_room(rows)

    def _frames_at_once(self, per_frame: int) -> int:
        """Frames that fit as it is, else those that one compression makes room for.

        Frame 0 goes in alone, densely, if later ones see it for good.
        """
        if self.policy.appends_first:
            return self.chunk
        budgets, kept = self.policy.layer_budgets, per_frame if self.policy.keeps_first_frame else 0
        if kept and not self.frames:
            return 1
        free = int((budgets - self.cache.lengths).min()) + self.prefix
        return max(1, free // per_frame or min(self.policy.room, int(budgets.min()) - kept) // per_frame)

    def _append_piece(self, piece: Float32) -> None:
        """Append frames ``[F, tokens_per_frame, hidden]`` that there is room for, and tell the policy."""
        first, position = self._seq, self.positions.next
        result = self._append_vision(piece)
        self.frames += len(piece)
        rows = np.arange(piece.shape[0] * piece.shape[1])
        queries = {layer: result.probes[layer] for layer in self.policy.needs.probe_layers}
        appended = Appended(first + rows, (position + rows).astype(np.int32)[:, None], queries)
        started = time.perf_counter()
        self.policy.after_append(self.cache, appended)
        self.stats.compress_ms += 1e3 * (time.perf_counter() - started)

    def _append_vision(self, piece: Float32) -> StepResult:
        count, per_frame, hidden = piece.shape
        frame = np.repeat(np.arange(self.frames, self.frames + count, dtype=np.int32), per_frame)
        started = time.perf_counter()
        sparsely = self.sparse is not None and self.frames > 0
        pattern = frame_pattern(self.cache, self.prefix, self.frames, self.model.bundle.vision.grid) if sparsely else None
        row, col = np.tile(self._row, count), np.tile(self._col, count)
        result = self._append(piece.reshape(-1, hidden), Kind.VISION, (), frame, row, col, pattern)
        self.stats.prefill_ms += 1e3 * (time.perf_counter() - started)
        return result

    def _make_room(self, rows: int) -> None:
        """Compress before an append that would cross |M|, and re-index when it is due."""
        started = time.perf_counter()
        guided = self.stats.guidance_ms
        plan = self.policy.before_append(self.cache, rows, self._guide)
        if plan is not None:
            self.stats.evicted += self.cache.evict(plan.keep)
            for layer, new in plan.add.items():
                self.cache.append(layer, new.key, new.value, new.rows)
                self.positions.next = max(self.positions.next, int(new.rows.position.max()) + 1)
            self.stats.compressions += 1
            guided = self.stats.guidance_ms - guided
            self.stats.compress_ms += 1e3 * (time.perf_counter() - started) - guided
        self._reindex_when_due(rows, compressed=plan is not None)

    def _reindex_when_due(self, rows: int, *, compressed: bool) -> None:
        if self.positions.due(rows, compressed):
            started = time.perf_counter()
            self.positions.compact(self.cache, self.prefix)
            self.stats.reindexings += 1
            self.stats.reindex_ms += 1e3 * (time.perf_counter() - started)

    def _guide(self) -> Guidance:
        """The guidance texts after the memory: one causal forward that is rolled back, or projections that leave nothing."""
        started, needs = time.perf_counter(), self.policy.needs
        guidance = self._project(needs.guidance, self.positions.next) if needs.raw_layers else self._forward_guidance()
        self.stats.guidance_ms += 1e3 * (time.perf_counter() - started)
        return guidance

    def _forward_guidance(self) -> Guidance:
        held, layers = self.cache.lengths, self.policy.needs.guidance_layers
        with self.question():
            probes = self._append(np.concatenate(self._guidance), Kind.TEXT, ()).probes
            keys = {layer: self.cache.key(layer)[:, held[layer] :].copy() for layer in layers}
        return Guidance({layer: probes[layer] for layer in layers}, keys, tuple(map(len, self._guidance)))

    def _project(self, texts: Sequence[str], start: int) -> Guidance:
        """Queries and keys of the texts' raw embeddings in every layer, each text at positions from ``start`` on."""
        rows = [self._embed(text) for text in texts]
        tables = [rope_tables(np.arange(start, start + len(of), dtype=np.int32), self.inv_freq) for of in rows]
        found = [self.model.engine.project(of, *table) for of, table in zip(rows, tables, strict=True)]
        queries, keys = (
            {layer: np.concatenate([each[part][layer] for each in found], 1) for layer in self.policy.needs.raw_layers}
            for part in (0, 1)
        )
        return Guidance(queries, keys, tuple(map(len, rows)))

    def _embed(self, text: str) -> Float32:
        return self.model.engine.embed(np.asarray(self.model.encode(text), np.int64))

    @contextmanager
    def question(self, frames: Float32 | None = None, coming: int = 0) -> Iterator[None]:
        """Whatever is appended inside is taken out at the end, position counter included.

        frames: ``[F, tokens_per_frame, hidden]``, of a piece that ``coming`` more belong to, to be seen inside and appended for
        good later. Room is made for the whole piece, now and not then, so that the memory is the same afterwards.
        """
        if frames is not None and len(frames):
            count = self._piece(frames, coming) if self.policy.bounded else len(frames)
            self._prepare(count * frames.shape[1])
        mark, position, seq, evicted = self.cache.mark(), self.positions.next, self._seq, self.stats.evicted
        try:
            if frames is not None and len(frames):
                self._append_vision(frames)
            yield
        finally:
            if self.stats.evicted == evicted:
                self.cache.rollback(mark)
            else:
                self.cache.evict([self.cache.seq(layer) < seq for layer in range(self.cache.layers)])
            self.positions.next, self._seq = position, seq

    def append_question(self, embeds: Float32) -> Float32:
        """Append a question's rows ``[S, hidden]``, and let a policy that asks for it compress the memory under them.

        Returns the last row's logits, ``[vocabulary]``: as of before that. What was evicted does not come back.
        """
        result, layers = self._append(embeds, Kind.TEXT, (len(embeds) - 1,)), self.policy.needs.question_layers
        if layers:
            started = time.perf_counter()
            keep = self.policy.under_question(self.cache, {layer: result.probes[layer] for layer in layers})
            if any(mask is not None for mask in keep):
                self.stats.evicted += self.cache.evict(keep)
                self.stats.compressions += 1
            self.stats.compress_ms += 1e3 * (time.perf_counter() - started)
        return result.logits[0]

    def append_text(self, embeds: Float32) -> Float32:
        """Append text rows ``[S, hidden]`` and return the last row's logits, ``[vocabulary]``."""
        return self._append(embeds, Kind.TEXT, (len(embeds) - 1,)).logits[0]

    def score_text(self, embeds: Float32, rows: Sequence[int]) -> Float32:
        """Append text rows ``[S, hidden]`` in one call; the logits of the ``rows`` named, ``[len(rows), vocabulary]``."""
        return self._append(embeds, Kind.TEXT, rows).logits

    def probe_text(self, embeds: Float32) -> dict[int, Float32]:
        """Append text rows ``[S, hidden]``; the rotated queries ``[heads, S, head_dim]`` of the policy's layers."""
        return self._append(embeds, Kind.TEXT, ()).probes

    def _append(
        self,
        embeds: Float32,
        kind: Kind,
        logit_rows: Sequence[int],
        frame: NDArray[np.int32] | None = None,
        row: NDArray[np.int16] | None = None,
        col: NDArray[np.int16] | None = None,
        pattern: FramePattern | None = None,
    ) -> StepResult:
        """Append and publish rows ``[S, hidden]``, through the sparse prefill graph when there is a pattern."""
        count = len(embeds)
        position = self.positions.next
        self.cache.reserve(count)
        try:
            positions = self.positions.take(count)
            cos, sin = rope_tables(positions, self.inv_freq)
            if pattern is None or self.sparse is None:
                result = self.decoder.step(embeds, cos, sin, self.cache.lengths, logit_rows)
            else:
                result = self.sparse.step(embeds, cos, sin, self.cache.lengths, logit_rows, pattern)
        except BaseException:
            self.cache.abort()
            self.positions.next = position
            raise
        self.cache.commit(
            Rows(
                kind=np.full(count, kind, np.uint8),
                seq=np.arange(self._seq, self._seq + count, dtype=np.int64),
                frame=np.full(count, -1, np.int32) if frame is None else frame,
                row=np.zeros(count, np.int16) if row is None else row,
                col=np.zeros(count, np.int16) if col is None else col,
                position=positions[:, None],
            )
        )
        self._seq += count
        return result
