"""The memory of one stream: its cache, policy and positions, and the decoder that appends to the cache."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError, UserError
from edgevlm.runtime.budget import allocate, capture_bytes, check_budget, present_rows
from edgevlm.runtime.cache import Kind, KVCache, Rows, sight_of
from edgevlm.runtime.changes import References
from edgevlm.runtime.chunk import Encoded
from edgevlm.runtime.engine import Decoder, Fetch, FramePattern, Int32, StepResult, arrays_of
from edgevlm.runtime.evidence import FrameTimes, QuestionAttention, SeenRows, seen_rows
from edgevlm.runtime.kv import DTYPES
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Appended, Guidance, Policy, StreamShape, layers_of
from edgevlm.runtime.policies.base import check_attached, check_declared
from edgevlm.runtime.policies.retrieval import Phase, Retrieval
from edgevlm.runtime.positions import Positions, Reindexing, rope_tables
from edgevlm.runtime.settings import AppendChanged
from edgevlm.runtime.stateful import add_prefix, bytes_of, strip_prefix
from edgevlm.runtime.stats import MemoryStats
from edgevlm.runtime.store import Store, StoreUse
from edgevlm.runtime.time_window import NarrowedMemory, NothingHeld, TimeWindow, rows_of

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Tokens = tuple[Float32, Rows]
"""Rows to append, float32 ``[n, width]``, and their metadata without ``seq``."""


class StreamFrame(NamedTuple):
    """A frame that is not yet in the memory. ``features``: float32 ``[tokens_per_frame, width]``. ``seconds``: the times at
    which the frame starts and ends.
    """

    features: Float32
    seconds: Float64


class Stream:
    """The memory of one stream. Prefix, frames and questions are appended to a cache of fixed size.

    The capacity of every layer is prefix + |M| + text budget. A layer never holds more than prefix + |M| rows of memory.
    ``capture_bytes``: the size of the snapshot buffer, which is allocated elsewhere but must fit in memory with the cache.

    If ``append`` is set, only the tokens that changed enter the memory. The ``append.present`` newest frames, called the
    *present*, are held outside the memory. Every question sees the present frames whole, in rows reserved for them. When the
    next frame comes, the changed tokens of the oldest present frame are appended.
    """

    def __init__(
        self,
        model: Model,
        policy: Policy,
        budget: int,
        prefix: Sequence[int],
        text_rows: int,
        reindexing: Reindexing,
        chunk: int = 1,
        snapshots: bool = False,
        store: Store | None = None,
        append: AppendChanged | None = None,
    ) -> None:
        decoder, vision, engine = model.bundle.decoder, model.bundle.vision, model.engine
        self.model, self.policy, self.budget, self.prefix, self.store = model, policy, budget, len(prefix), store
        self.rows_per_frame = model.rows_per_frame
        self._most_text = self.rows_per_frame - vision.tokens_per_frame
        shape = StreamShape(
            decoder.layers, vision.tokens_per_frame, len(prefix), decoder.fading, model.bundle.calibration(),
            thinned=append is not None, text_per_frame=self._most_text,
        )  # fmt: skip
        if policy._stream is not None and policy._stream() is not None:
            raise UserError(
                f"policy {policy.name}: this instance is in use by another session; create one per session, or pass its name"
            )
        policy.attach(budget, shape)
        check_attached(policy)
        needs = policy.needs
        if needs.variant == "st-spattn" and (self._most_text or not decoder.is_causal):
            why = "text between frames" if self._most_text else "window or whole-frame attention"
            raise UserError(f"policy {policy.name} does not support sparse prefill here: {model.bundle.family} has {why}")
        if append is not None and policy.needs_whole_frames:
            raise UserError(f"policy {policy.name} requires whole frames with these settings; remove --append {append}")
        self._changing = threading.RLock()
        self.present: list[StreamFrame] = []
        self._most_present = 0 if append is None else append.present
        self._present_rows = 0 if append is None else present_rows(model, append.present)
        self.references = None if append is None else References(append, vision.tokens_per_frame, decoder.row_width)
        self._guidance = [model.embed(text) for text in needs.guidance]
        text_rows = max(text_rows, sum(map(len, self._guidance)))
        text_rows += self._present_rows
        self.chunk = -(-chunk // vision.group) * vision.group
        check_budget(policy, budget, model.bundle, text_rows, len(prefix), self.rows_per_frame)
        self._set_aside = text_rows
        longest = len(prefix) + int(policy.layer_budgets.max()) + needs.working_rows + text_rows
        self.spare_positions = 0 if isinstance(policy, Retrieval) else model.bundle.limit - longest
        wanted = [len(prefix) + needs.working_rows + text_rows + int(rows) for rows in policy.layer_budgets]
        held = sum(wanted) - len(wanted) * (text_rows + needs.working_rows)
        self.capture_bytes = capture_bytes(decoder, vision, held, self.chunk, DTYPES[decoder.kv].itemsize) if snapshots else 0
        capacities = [engine.capacity(rows) for rows in wanted]
        store_bytes = store.host_limit if store is not None else 0
        self.cache = allocate(model.bundle, capacities, self.chunk, self.capture_bytes, engine.kv_device, store_bytes)
        self.evidence_heads = model.bundle.evidence_heads()
        asked = {*needs.probe_layers, *needs.guidance_layers, self.evidence_heads.layer}
        buffers, probes = self.cache.buffers(), tuple(sorted(asked))
        self._retrieval = policy if isinstance(policy, Retrieval) else None
        if self._retrieval is not None:
            if not engine.by_layer:
                raise UserError(
                    "policies that fetch rows layer by layer require --engine onnxruntime-cpu; use it, or choose another policy"
                )
            if not decoder.is_causal:
                raise UserError(
                    f"policy {policy.name} does not support the attention of {model.bundle.family}; choose another policy"
                )
            self.store = store or Store()
            self._retrieval.open(self.cache, self.store)
        self._sparse = needs.variant == "st-spattn"
        self._probes = probes
        self.decoder: Decoder = engine.bind(buffers, probes, self._sparse)
        self._narrowed: NarrowedMemory | None = None  # set while a question about a time window is answered
        rule: Reindexing = reindexing if policy.bounded else "never"
        layout = vision.positions, vision.grid, vision.tokens_per_second, decoder.axes
        self.positions = Positions(model.bundle.limit, text_rows, rule, *layout)
        self.stats = MemoryStats()
        self.times = FrameTimes()
        self.text_ids: frozenset[int] = frozenset()  # the tokens of texts around frames, including evicted texts
        self.looked: QuestionAttention | None = None
        self.torn = False  # whether an error has left the memory half changed
        self.frames = 0
        self._seq = 0
        if len(prefix):
            self._append_text(engine.embed(np.asarray(prefix, np.int64)), (), Kind.PREFIX)
        policy._stream = weakref.ref(self)

    @property
    def tokens(self) -> int:
        """The number of rows in the fullest layer, without the prefix."""
        return int(self.cache.lengths.max()) - self.prefix

    @property
    def present_bytes(self) -> int:
        """The size in bytes of the present frames and of the references that frames are compared with."""
        return bytes_of(self.references) + sum(part.nbytes for frame in self.present for part in frame)

    def store_use(self) -> StoreUse | None:
        """Return how much memory and disk the store uses, or None without a store."""
        if self.store is None:
            return None
        return StoreUse(self.store.host_bytes, self.store.file_bytes, self.store.index_bytes, replace(self.store.stats))

    def close(self) -> None:
        """Release the policy, and close the store if there is one."""
        self.policy._stream = None
        if self.store is not None:
            self.store.close()

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray]]:
        """Return the state of the memory and the policy for a snapshot: JSON values, and views of arrays."""
        numbers = {"positions": self.positions.mark(), "seq": self._seq, "frames": self.frames, "stats": asdict(self.stats)}
        numbers["text_ids"] = sorted(self.text_ids)
        references = {} if self.references is None else add_prefix("references", self.references.state())
        parts = dict(zip(StreamFrame._fields, map(np.stack, zip(*self.present, strict=True)), strict=False))
        present = add_prefix("present", parts)
        layers = {f"layer{layer}": self.cache.held(layer) for layer in range(self.cache.layers)}
        held = {f"{layer}.{name}": part for layer, parts in layers.items() for name, part in parts.items()}
        times = add_prefix("times", self.times.state())
        return numbers, held | add_prefix("policy", self.policy.state()) | references | present | times

    def restore(self, numbers: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> None:
        """Restore the result of :meth:`state`. Raises ValueError if the model or the settings differ from the snapshot's."""
        for layer in range(self.cache.layers):
            self.cache.load(layer, strip_prefix(f"layer{layer}", arrays))
        self.policy.restore(strip_prefix("policy", arrays))
        self.positions.restore(numbers["positions"])
        self.times.restore(strip_prefix("times", arrays))
        if self.references is not None:
            self.references.restore(strip_prefix("references", arrays))
        present = strip_prefix("present", arrays)
        sizes = (self.model.bundle.vision.tokens_per_frame, self.model.bundle.decoder.row_width), (2,)
        parts = [present[name].reshape(-1, *size) for name, size in zip(StreamFrame._fields, sizes, strict=True) if present]
        self.present = [StreamFrame(*(part.copy() for part in frame)) for frame in zip(*parts, strict=True)]
        if len(self.present) > self._most_present or not all(np.isfinite(frame.seconds).all() for frame in self.present):
            raise ValueError(
                f"invalid shapes of present.features and seconds: {[list(part.shape) for part in present.values()]}"
            )
        self._seq, self.frames = numbers["seq"], numbers["frames"]
        self.text_ids = frozenset(numbers.get("text_ids", ()))
        if max(self.text_ids, default=0) >= self.model.bundle.decoder.vocab:
            raise ValueError(f"text_ids has token {max(self.text_ids)}, outside the vocabulary")
        self.stats = MemoryStats(**numbers["stats"])

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let the ``with`` block change the memory. If the block ends with an error other than UserError, ``torn`` is set.

        Raises CacheError if another thread is using the stream.
        """
        if not self._changing.acquire(blocking=False):
            raise CacheError("the stream is in use by another thread")
        try:
            yield
        except UserError:
            raise
        except BaseException:
            self.torn = True
            raise
        finally:
            self._changing.release()

    def clear_free_rows(self) -> None:
        """Overwrite evicted rows with zeros, if the cache is in host memory."""
        if self.model.engine.kv_device == "host":
            for buffer, length in zip(self.cache.buffers(), self.cache.lengths.tolist(), strict=True):
                for rows in arrays_of(buffer):
                    rows[:, length:] = 0

    def append_frames(self, features: Float32, coming: int = 0, seconds: Float64 | None = None) -> int:
        """Append frames in one or more pieces. Return how many frames were appended.

        ``features``: float32 ``[F, tokens_per_frame, width]``. Here a frame is one grid of tokens; a tower that merges frames
        makes one grid from a group of frames. ``seconds``: the times ``[F, 2]`` of each group's first and last frame, by
        default the group's number. A piece contains as many whole frames as fit before the next compression. If not even one
        frame fits, a piece contains as many frames as one compression makes room for, but at least one. ``coming``: how many
        frames of the chunk are still to come. If frames that are still to come may fit in the last piece, that piece is not
        appended yet. Raises UserError if the budget is used up and the policy never compresses.

        If only changes are appended, a piece contains only the changed tokens, so that more frames fit. The newest frames
        become the *present*: they stay outside the memory, but count as appended.
        """
        with self.changing():
            queue, done = self._queue(features, seconds), 0
            if self.references is not None:
                return self._append_changed(self.references, queue, coming) if len(features) else 0
            while done < len(queue):
                count = self._piece(len(queue) - done + coming)
                if count > len(queue) - done:
                    break
                self.make_room(count * self.rows_per_frame)
                piece, first = queue[done : done + count], self._seq
                rows, result = self._append_vision(piece)
                self.frames += count
                self._inform_policy(first, rows, result, piece)
                done += count
            return done

    def _queue(self, features: Float32, seconds: Float64 | None) -> list[StreamFrame]:
        """Return the frames to append, starting with those in ``present``, and record the times of the new frames."""
        first = self.frames + len(self.present)
        seen = np.arange(first, first + len(features), dtype=np.float64)[:, None].repeat(2, 1) if seconds is None else seconds
        for frame, second in enumerate(seen[:, 0], first):
            self.times.add(frame, float(second))
        return [*self.present, *map(StreamFrame, features, seen)]

    def _append_changed(self, references: References, queue: Sequence[StreamFrame], coming: int) -> int:
        """Append the changed tokens of all but the newest frames. Return how many of the new frames were appended or became
        part of the *present*.

        ``coming``: how many frames of the chunk are still to come. If any frames are still to come, the last piece is not
        appended yet, because these frames may fit in it.
        """
        done, last, held = 0, len(queue) - max(self._most_present - coming, 0), len(self.present)
        while done < last:
            self._make_room_changed(references, queue[done])
            with self._positions_kept() as undo:
                parts, frames, shown, references = self._changed_piece(references, queue[done:last])
                if coming and done + len(shown) == last:
                    undo()
                    break
                first, appended = self._seq, 0
                if parts:
                    embeds, rows = joined(parts)
                    result = self._append_timed(embeds, rows)
            if parts:
                self._inform_policy(first, rows, result, frames)
                appended = int((rows.kind == Kind.VISION).sum())
            self.references = references
            for tokens in shown:
                self.cache.confirm(tokens.reshape(self.model.bundle.vision.grid), self.frames)
                self.frames += 1
            self._compress_for(0)
            done += len(shown)
            self.stats = self.stats.plus(tokens_seen=sum(map(len, shown)), tokens_appended=appended)
        newest = queue[done : done + self._most_present]
        self.present = [StreamFrame(frame.features.copy(), frame.seconds.copy()) for frame in newest]
        return done + len(newest) - held

    def _make_room_changed(self, references: References, frame: StreamFrame) -> None:
        if count := int(references.changed(frame.features).sum()):
            self.make_room(count + self._most_text)

    def _changed_piece(
        self, references: References, queue: Sequence[StreamFrame]
    ) -> tuple[list[Tokens], list[StreamFrame], list[NDArray[np.int64]], References]:
        """Return the changes of the first frame, and of the following frames that fit before the next compression.

        The rows and their positions are the same as if the frames were appended one by one. A frame without changes gets no
        text around it. Returns the rows, the frames that changed, the token that now shows each patch of a frame,
        ``[tokens_per_frame]``, and the updated references.
        """
        parts: list[Tokens] = []
        frames: list[StreamFrame] = []
        shown: list[NDArray[np.int64]] = []
        references = references.copy()
        free, held = 0 if self.policy.needs.single_frames else self._free, 0
        for number, frame in enumerate(queue, self.frames):
            changed = references.changed(frame.features)
            count = np.count_nonzero(changed)
            rows = count + self._most_text if count else 0
            if shown and (held + rows > free or self.positions.due(rows, compressed=False)):
                break
            seq = np.zeros(0, np.int64)
            if rows:
                parts.append(self.rows([frame], number, changed))
                frames.append(frame)
                seq = self._seq + held + np.flatnonzero(parts[-1][1].kind == Kind.VISION)
                held += len(parts[-1][1])
            references.appended(frame.features, changed, seq)
            shown.append(references.seq.copy())
        return parts, frames, shown, references

    def _piece(self, left: int) -> int:
        """Return how many frames to append next: as many as fit now or, if none fits, as many as fit after a compression.

        If the policy never evicts frame 0, that frame is appended alone and prefilled densely.
        """
        kept = self.rows_per_frame if self.policy.needs.keeps_first_frame else 0
        if kept and not self.frames:
            return min(1, left)
        freed = min(self.policy.max_append, int(self.policy.layer_budgets.min()) - kept)
        return min(max(1, self._free // self.rows_per_frame or freed // self.rows_per_frame), left)

    @property
    def _free(self) -> int:
        """Return how many rows of frames fit without a compression."""
        return int((self.policy.layer_budgets - self.cache.lengths).min()) + self.prefix

    def make_room(self, rows: int) -> None:
        """Make room for ``rows`` more rows of frames, if needed.

        Raises UserError if the budget is used up and the policy never compresses.
        """
        if not self.policy.bounded and self.tokens + rows > self.budget:
            held = self.budget // self.rows_per_frame * self.model.bundle.vision.group
            raise UserError(
                f"the {self.policy.name} cache is full: {self.budget} tokens hold {held} frames; "
                "give a larger --budget, or a policy that compresses"
            )
        self._compress_for(rows)

    def _inform_policy(self, first: int, rows: Rows, result: StepResult, frames: Sequence[StreamFrame]) -> None:
        vision, needs = np.flatnonzero(rows.kind == Kind.VISION), self.policy.needs
        queries = {layer: result.probes[layer][:, vision] for layer in needs.probe_layers}
        with self._timed("compress_ms"):
            seen = np.stack([frame.features.mean(0) for frame in frames]) if needs.features else None
            appended = Appended(first + vision, rows.position[vision], queries, rows.frame[vision], seen)
            self.policy.after_append(layers_of(self.cache), appended)
            check_declared(self.policy)

    def rows(self, frames: Sequence[StreamFrame], first: int, tokens: NDArray[np.bool_] | None = None) -> Tokens:
        """Return the rows of some frames and of the texts around them. Advances the positions.

        ``first``: the number of the first frame. ``tokens``: the mask of each frame's tokens to append, bool
        ``[tokens_per_frame]``, by default all.
        """
        parts: list[Tokens] = []
        which = slice(None) if tokens is None else tokens
        row, col = (part.ravel()[which].astype(np.int16) for part in np.indices(self.model.bundle.vision.grid))
        for number, (features, (since, until)) in enumerate(frames, first):
            before, after = self.model.frame_text((since + until) / 2, number)
            parts += self._text_rows(before, number)
            known = Rows.text(self.positions.frame(float(since), tokens), Kind.VISION, number)
            parts.append((features[which], replace(known, row=row, col=col)))
            parts += self._text_rows(after, number)
        return joined(parts)

    def _text_rows(self, text: str, frame: int) -> list[Tokens]:
        if not (ids := self.model.encode(text) if text else []):
            return []
        self.text_ids |= set(ids)
        known = self.model.engine.embed(np.asarray(ids, np.int64))
        embeds = np.zeros((len(ids), self.model.bundle.decoder.row_width), np.float32)
        embeds[:, : known.shape[1]] = known
        return [(embeds, Rows.text(self.positions.take(len(ids)), frame=frame))]

    def _append_vision(self, frames: Sequence[StreamFrame], ahead: int = 0, sparsely: bool = True) -> tuple[Rows, StepResult]:
        """Append frames. ``ahead``: how many frames before these are not in memory. ``sparsely``: whether the sparse graph may
        be used.
        """
        sparsely = sparsely and self._sparse and self.frames > 0
        pattern = frame_pattern(self.cache, self.prefix, self.frames, self.model.bundle.vision.grid) if sparsely else None
        with self._positions_kept():
            embeds, rows = self.rows(frames, self.frames + ahead)
            return rows, self._append_timed(embeds, rows, pattern)

    def _append_timed(self, embeds: Float32, rows: Rows, pattern: FramePattern | None = None) -> StepResult:
        with self._timed("prefill_ms"):
            return self.append(embeds, rows, (), pattern)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.stats = self.stats.plus(**{part: 1e3 * (time.perf_counter() - started)})

    @contextmanager
    def _positions_kept(self) -> Iterator[Callable[[], None]]:
        """Restore the positions if the ``with`` block fails or calls the yielded function."""
        mark = self.positions.mark()
        try:
            yield lambda: self.positions.restore(mark)
        except BaseException:
            self.positions.restore(mark)
            raise

    def _compress_for(self, rows: int) -> None:
        """Compress the memory if ``rows`` more rows would exceed |M|, and re-index its positions if that is due."""
        started, guided = time.perf_counter(), self.stats.guidance_ms
        plan = self.policy.before_append(self.cache, rows, self._guide, self.times)
        check_declared(self.policy)
        if plan is not None:
            evicted = plan.carry_out(self.cache)
            for new in plan.add.values():
                self.positions.next = max(self.positions.next, int(new.rows.position.max()) + 1)
            took = 1e3 * (time.perf_counter() - started) - (self.stats.guidance_ms - guided)
            self.stats = self.stats.plus(evicted=evicted, compressions=1, compress_ms=took)
        if self.positions.due(rows, plan is not None):
            with self._timed("reindex_ms"):
                self.positions.compact(self.cache, self.prefix, self.policy.needs.working_rows)
                if self._retrieval is not None:
                    self._retrieval.compacted()
            self.stats = self.stats.plus(reindexings=1)

    def _guide(self) -> Guidance:
        """Run the guidance texts in one causal pass over the memory without the present frames, then remove the texts."""
        held, layers = self.cache.lengths, self.policy.needs.guidance_layers
        with self._timed("guidance_ms"), self.taken_out():
            probes = self._append_text(np.concatenate(self._guidance), ()).probes
            keys = {layer: self.cache.dequantize("key", layer, slice(int(held[layer]), None)) for layer in layers}
        return Guidance({layer: probes[layer] for layer in layers}, keys, tuple(map(len, self._guidance)))

    @contextmanager
    def question(
        self,
        waiting: Encoded | None = None,
        pictures: Sequence[Float32] = (),
        now: float = 0.0,
        window: TimeWindow | None = None,
        rows: int = 0,
    ) -> Iterator[None]:
        """Let the ``with`` block append a question. On exit, remove the question and restore the positions.

        ``rows``: the maximum number of text rows that the block appends. If ``rows`` and ``pictures`` do not fit in the
        reserved room, the memory is copied to a larger cache. ``waiting``: frames that are not appended yet; the question sees
        them. Room for the waiting frames is made at once, so that a question does not change what is remembered later. With
        ``present`` set, the question sees that many newest frames whole, and of older waiting frames only what changed.
        ``pictures``: arrays ``[1, tokens_per_frame, width]``. The pictures come after all frames, at ``now`` + 1 second,
        ``now`` + 2 seconds and so on; ``now`` is the stream's time. ``window``: the block's rows attend only to rows from this
        time window. Raises NothingHeld if the memory has no rows from ``window``. Raises the same errors as
        :meth:`check_window`, and UserError if a copy of the memory is needed but does not fit.
        """
        features, seconds, coming = waiting or Encoded(np.zeros((0, 0, 0), np.float32), np.zeros((0, 2)))
        references = self.references
        queue = self._queue(features, seconds) if references is not None or len(features) else []
        older = 0 if references is None else max(len(queue) - self._most_present, 0)
        if references is not None and older:
            with self.changing():
                self._make_room_changed(references, queue[0])
        elif references is None and queue:
            with self.changing():
                self.make_room(self.rows_per_frame * (self._piece(len(queue) + coming) if self.policy.bounded else len(queue)))
        rows += len(pictures) * self.rows_per_frame + self._present_rows
        with self._room(rows, len(queue) * self.rows_per_frame), self.taken_out():
            if references is not None and older:
                parts, *_ = self._changed_piece(references, queue[:older])
                if parts:
                    self._append_timed(*joined(parts))
            if queue:
                self._append_vision(queue[older:], older)
            for index, picture in enumerate(pictures, 1):  # pictures are numbered after all frames of the chunk
                self._append_vision([StreamFrame(picture[0], np.full(2, now + index))], self.chunk + index, sparsely=False)
            if window is not None:
                self._narrowed = self._narrow(window, now)
            yield

    @contextmanager
    def _room(self, rows: int, frame_rows: int) -> Iterator[None]:
        """If ``rows`` rows of text do not fit in the reserved room, work on a copy of the memory with more room.

        ``frame_rows``: how many rows of frames are appended in addition to the text. If too few positions are left, the copy's
        positions are renumbered without gaps.
        """
        if rows <= self._set_aside:
            yield
            return
        memory, decoder, position, model = self.cache, self.decoder, self.positions.mark(), self.model
        capacities = [model.engine.capacity(int(held) + rows - self._set_aside) for held in memory.capacities]
        try:
            self.cache = allocate(model.bundle, capacities, 0, device=model.engine.kv_device)
        except UserError:
            raise UserError(f"a question of {rows} tokens does not fit in the free memory now; shorten it") from None
        try:
            for layer in range(memory.layers):
                self.cache.load(layer, memory.held(layer))
            self.decoder = model.engine.bind(self.cache.buffers(), self._probes, self._sparse)
            if self.positions.next + frame_rows + rows > self.positions.limit:
                self.positions.compact(self.cache, self.prefix, self.policy.needs.working_rows)
            yield
        finally:
            self.cache, self.decoder = memory, decoder
            self.positions.restore(position)

    @contextmanager
    def truncated_prefix(self, rows: int) -> Iterator[None]:
        """Cut the prefix to its first ``rows`` tokens until the ``with`` block ends. The memory must hold no frame."""
        held = [{name: part.copy() for name, part in self.cache.held(layer).items()} for layer in range(self.cache.layers)]
        position, seq = self.positions.mark(), self._seq
        self.cache.evict([layer["seq"] < rows for layer in held])
        self.positions.next = self._seq = rows
        try:
            yield
        finally:
            for layer, parts in enumerate(held):
                self.cache.load(layer, parts)
            self.positions.restore(position)
            self._seq = seq

    @contextmanager
    def taken_out(self) -> Iterator[None]:
        """On exit, remove everything that the ``with`` block appended."""
        mark, position, seq, text_ids = self.cache.mark(), self.positions.mark(), self._seq, self.text_ids
        try:
            yield
        finally:
            with self.changing():
                self.text_ids = text_ids
                self._narrowed = None
                self.cache.rollback(mark)
                self.positions.restore(position)
                self._seq = seq

    def check_window(self) -> None:
        """Raise UserError if the policy, model or engine does not support questions about a time window."""
        if isinstance(self.policy, Retrieval):
            raise UserError(f"policy {self.policy.name} does not support time windows; ask without since and until")
        if not self.model.bundle.decoder.is_causal:
            raise UserError(f"{self.model.bundle.family} does not support time windows; ask without since and until")
        if not self.model.engine.by_layer:
            raise UserError("time windows require --engine onnxruntime-cpu; use it, or ask without since and until")

    def _narrow(self, window: TimeWindow, now: float) -> NarrowedMemory:
        self.check_window()
        frames, cache, newest = window.frames(self.times, now), self.cache, self.times.newest
        shown = [rows_of(cache, layer, *frames, newest) for layer in range(cache.layers)]
        vision = [cache.kind(layer) == Kind.VISION for layer in range(cache.layers)]
        of_memory = [vision[layer] & (cache.frame(layer) <= newest) for layer in range(cache.layers)]
        if not any((mask & held).any() for mask, held in zip(shown, of_memory, strict=True)):
            oldest = [int(cache.frame(layer)[held].min()) for layer, held in enumerate(of_memory) if held.any()]
            raise NothingHeld(window, self.times.at(min(oldest)) if oldest else None)
        return NarrowedMemory(cache, shown, frames)

    def append_question(self, embeds: Float32) -> Float32:
        """Append a question. Record the attention of the question's last row, and return the logits of this row,
        ``[vocabulary]``.

        ``embeds``: ``[S, hidden]``.
        """
        result = self._append_text(embeds, (len(embeds) - 1,))
        self.looked = self._look(result)
        return result.logits[0]

    def _look(self, result: StepResult) -> QuestionAttention:
        """Return the attention of a step's last row, which must be the newest row in the memory."""
        heads, vision, narrowed = self.evidence_heads, self.model.bundle.vision, self._narrowed
        layer, query = heads.layer, result.probes[heads.layer][:, -1]
        groups: dict[int, list[int]] = {}  # maps each KV head to its query heads
        for head in heads.heads:
            groups.setdefault(head * self.cache.kv_heads // len(query), []).append(head)

        def seen(head: int) -> list[SeenRows]:
            if narrowed is not None:
                return [narrowed.seen(layer, head)]
            held = [seen_rows(self.cache, layer, head)]
            return [*held, self.policy.working.seen(layer, head)] if isinstance(self.policy, Retrieval) else held

        looked = ((query[of], seen(head)) for head, of in groups.items())
        if narrowed is not None:  # the weights do not apply: they were calibrated without a window
            heads = replace(heads, weights=())
        logits, lossless = result.logits[-1], self.stats.evicted == 0
        return QuestionAttention(looked, heads, vision.grid, vision.group, self.times, logits, lossless)

    def append_text(self, embeds: Float32) -> Float32:
        """Append text rows. Return the last row's logits, ``[vocabulary]``. ``embeds``: ``[S, hidden]``."""
        return self._append_text(embeds, (len(embeds) - 1,)).logits[0]

    def score_text(self, embeds: Float32, rows: Sequence[int]) -> Float32:
        """Append text rows in one call. Return the logits of the rows with the indices ``rows``, ``[len(rows), vocabulary]``.

        ``embeds``: ``[S, hidden]``.
        """
        return self._append_text(embeds, rows).logits

    def probe_text(self, embeds: Float32) -> dict[int, Float32]:
        """Append text rows. Return the rotated queries of these rows in each probed layer, ``[heads, S, head_dim]``.

        ``embeds``: ``[S, hidden]``.
        """
        probes, needs = self._append_text(embeds, ()).probes, self.policy.needs
        return {layer: probes[layer] for layer in {*needs.probe_layers, *needs.guidance_layers}}

    def _append_text(self, embeds: Float32, logit_rows: Sequence[int], kind: int = Kind.TEXT) -> StepResult:
        with self._positions_kept():
            return self.append(embeds, Rows.text(self.positions.take(len(embeds)), kind), logit_rows)

    def append(self, embeds: Float32, rows: Rows, logit_rows: Sequence[int], pattern: FramePattern | None = None) -> StepResult:
        """Append rows, and commit them unless the question is about a time window. The memory must have room for the rows.

        ``embeds``: float32 ``[n, width]``. The stream assigns the rows' ``seq``.
        """
        tables = rope_tables(rows.position, self.model.bundle.inv_freq, self.cache.pair_axis)
        if self._narrowed is not None:
            result = self._narrowed.step(self.decoder, embeds, *tables, logit_rows)
            self._seq += len(rows)
            return result
        sight = sight_of(self.model.bundle.decoder, self.cache, rows)
        self.cache.reserve(len(rows))
        text: Phase = "answer" if len(rows) == 1 else "question"
        phase: Phase = "prefill" if (rows.kind == Kind.VISION).any() else text
        try:
            with _fetching(self._retrieval, *tables, phase) as fetch:
                result = self.decoder.step(embeds, *tables, self.cache.lengths, logit_rows, pattern, fetch=fetch, **sight)
            rows = replace(rows, seq=np.arange(self._seq, self._seq + len(rows), dtype=np.int64))
        except BaseException:
            self.cache.abort()
            raise
        try:
            self.cache.commit(rows)
        except MemoryError:  # a MemoryError is raised before anything is committed
            self.cache.abort()
            raise
        self._seq += len(rows)
        return result


@contextmanager
def _fetching(policy: Retrieval | None, cos: Float32, sin: Float32, phase: Phase) -> Iterator[Fetch | None]:
    """Yield a function that fetches each layer's rows. On exit, move the new rows in front of the fetched rows."""
    if policy is None:
        yield None
        return
    policy.begin(cos, sin)

    def fetch(layer: int, query: Float32) -> Int32:
        if layer:
            policy.working.settle(layer - 1, len(cos))
        return policy.attend(layer, query, phase)

    yield fetch
    policy.working.settle(policy.shape.layers - 1, len(cos))


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate several parts, which are pairs of embeddings and metadata."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([embeds for embeds, _ in parts]), Rows.joined([rows for _, rows in parts])


def frame_pattern(cache: KVCache, prefix: int, frame: int, grid: tuple[int, int]) -> FramePattern:
    """Return the rows in the memory to which new frames attend under PureKV's ST-SpAttn (arXiv 2510.25600, sec. 3.2).

    A token sees the prefix, frame 0, its own frame's tokens up to itself, and the token of the same patch in the previous
    frame. Eviction moves rows from the tail into freed slots, so the same patch may be in a different slot in each head. The
    prefix and frame 0 are never evicted, so they stay in slots ``[0, prefix + tokens_per_frame)`` of every layer and head.
    ``frame``: the number of the call's first frame, 1 or more. ``grid``: the (rows, columns) of a frame's tokens. Raises
    CacheError if frame 0 is not in the slots after the prefix.
    """
    rows, columns = grid
    shared = prefix + rows * columns
    previous = np.full((cache.layers, cache.kv_heads, rows * columns), -1, np.int64)
    for layer in range(cache.layers):
        vision = cache.kind(layer) == Kind.VISION
        first = (vision & (cache.frame(layer) == 0))[:, prefix:shared]
        if frame < 1 or first.size != previous[layer].size or not first.all():
            raise CacheError(f"layer {layer}: ST-SpAttn needs frame 0 in rows {prefix} to {shared}, but it is missing")
        if frame == 1:
            continue  # the previous frame is frame 0, which every token sees
        head, slot = np.nonzero(vision & (cache.frame(layer) == frame - 1))
        place = cache.row(layer)[head, slot].astype(np.int64) * columns + cache.col(layer)[head, slot]
        previous[layer, head, place] = slot
    return FramePattern(shared, previous)
