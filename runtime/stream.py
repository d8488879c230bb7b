"""The memory of one stream: cache, policy and positions, and the decoder that appends to it. Single-threaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError, UserError
from edgevlm.runtime.budget import allocate, capture_bytes, check_budget, present_rows
from edgevlm.runtime.cache import Kind, Rows
from edgevlm.runtime.changes import References, unit_features
from edgevlm.runtime.engine import Decoder, FramePattern, Int32, LayerDecoder, StepResult, arrays_of
from edgevlm.runtime.evidence import FrameTimes, QuestionAttention, SeenRows, seen_rows
from edgevlm.runtime.framing import Embedded, Framing, frame_pattern
from edgevlm.runtime.kv import DTYPES
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Appended, Guidance, Policy, StreamShape
from edgevlm.runtime.policies.retrieval import Phase, Retrieval
from edgevlm.runtime.positions import Positions, Reindexing, rope_tables
from edgevlm.runtime.settings import AppendChanged
from edgevlm.runtime.stateful import add_prefix, strip_prefix
from edgevlm.runtime.stats import MemoryStats
from edgevlm.runtime.store import Store, StoreUse
from edgevlm.runtime.time_window import NarrowedMemory, NothingHeld, TimeWindow, rows_of

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


class Present(NamedTuple):
    """The newest frame, outside the memory: features float32 ``[tokens_per_frame, width]``, first and last seconds ``[2]``."""

    features: Float32
    seconds: Float64


class QueuedFrame(NamedTuple):
    """A frame of which nothing is in the memory, with its ``unit`` features, as :class:`References` compares them."""

    features: Float32
    seconds: Float64
    unit: Float32


class ChangedPiece(NamedTuple):
    """What changed in frames that are appended in one call."""

    rows: list[Embedded]  # of the frames in which anything changed
    features: list[Float32]  # and theirs
    tokens: list[NDArray[np.int64]]  # of each frame, the token that shows each patch from then on, [tokens_per_frame]
    references: References  # from then on


class Stream:
    """Appends prefix, frames and questions to a cache of fixed size.

    capacity of every layer = prefix + |M| + text budget; at no moment does a layer hold more than prefix + |M| rows of memory.
    capture_bytes: of a second buffer for ``snapshots``, which must fit beside the cache; it is not made here.

    append: only the tokens that changed enter the memory. The newest frame is then the *present*: held outside the memory, seen
    whole by every question, in rows set aside beside the question's; what changed in it is appended when the next one comes.
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
        self.rows_per_frame, self.framing = model.rows_per_frame, Framing(model.bundle, model.embed)
        self._most_text = self.rows_per_frame - vision.tokens_per_frame
        shape = StreamShape(
            decoder.layers, vision.tokens_per_frame, len(prefix), decoder.fading, model.bundle.calibration(),
            thinned=append is not None, text_per_frame=self._most_text,
        )  # fmt: skip
        policy.attach(budget, shape)
        needs = policy.needs
        if needs.variant == "st-spattn" and self._most_text:
            raise UserError(f"{policy.name} cannot prefill sparsely here: {model.bundle.family} has text between its frames")
        if append is not None and policy.needs_whole_frames:
            raise UserError(f"{policy.name} takes whole frames with these settings: leave out --append {append}")
        self._changing = threading.RLock()
        self.present: Present | None = None
        self.references = None if append is None else References(append, vision.tokens_per_frame, decoder.row_width)
        self._guidance = [model.embed(text) for text in needs.guidance]
        text_rows = max(text_rows, sum(map(len, self._guidance)))
        text_rows += present_rows(model) if append is not None else 0
        self.chunk = -(-chunk // vision.group) * vision.group
        check_budget(policy, budget, model.bundle, text_rows, len(prefix), self.rows_per_frame)
        self.inv_freq = model.bundle.inv_freq
        wanted = [len(prefix) + policy.working_rows + text_rows + int(rows) for rows in policy.layer_budgets]
        held = sum(wanted) - len(wanted) * (text_rows + policy.working_rows)
        self.capture_bytes = capture_bytes(decoder, vision, held, self.chunk, DTYPES[decoder.kv].itemsize) if snapshots else 0
        capacities = [engine.capacity(rows) for rows in wanted]
        store_bytes = store.host_limit if store is not None else 0
        self.cache = allocate(model.bundle, capacities, self.chunk, self.capture_bytes, engine.kv_device, store_bytes)
        self.evidence_heads = model.bundle.evidence_heads()
        asked = {*needs.probe_layers, *needs.guidance_layers, self.evidence_heads.layer}
        buffers, probes = self.cache.buffers(), tuple(sorted(asked))
        self._by_layer: LayerByLayer | None = None
        if isinstance(policy, Retrieval):
            self.store = store or Store()
            policy.open(self.cache, self.store)
            self._by_layer = LayerByLayer(engine.bind_layers(buffers), policy, probes)
        self.decoder: Decoder = self._by_layer or engine.bind(buffers, probes)
        self.sparse = engine.bind(buffers, probes, needs.variant) if needs.variant == "st-spattn" else None
        self._narrowed: NarrowedMemory | None = None  # while a question about a window of time is answered
        self._layers: LayerDecoder | None = None  # for such questions, bound by the first
        rule: Reindexing = reindexing if policy.bounded else "never"
        self.positions = Positions(model.bundle.limit, text_rows, rule, self.framing.layout)
        self.stats = MemoryStats()
        self.times = FrameTimes()
        self.looked: QuestionAttention | None = None
        self.torn = False  # an error has left the memory half changed
        self.frames = 0
        self._seq = 0
        if len(prefix):
            self._append_text(engine.embed(np.asarray(prefix, np.int64)), (), Kind.PREFIX)

    @property
    def tokens(self) -> int:
        """Rows of memory held in the fullest layer, without the prefix."""
        return int(self.cache.lengths.max()) - self.prefix

    @property
    def present_bytes(self) -> int:
        """Bytes of the present, and of the references that frames are compared with."""
        references = 0 if self.references is None else self.references.state_bytes
        return references + sum(part.nbytes for part in self.present or ())

    def store_use(self) -> StoreUse | None:
        """What the store holds; None without one."""
        if self.store is None:
            return None
        return StoreUse(self.store.host_bytes, self.store.file_bytes, self.store.index_bytes, replace(self.store.stats))

    def close(self) -> None:
        """Close the store, if there is one."""
        if self.store is not None:
            self.store.close()

    def state(self) -> tuple[dict[str, Any], dict[str, NDArray]]:
        """For a snapshot: numbers, as JSON has them, and views of what memory and policy hold."""
        numbers = {"positions": self.positions.mark(), "seq": self._seq, "frames": self.frames, "stats": asdict(self.stats)}
        references = {} if self.references is None else add_prefix("references", self.references.state())
        present = {} if self.present is None else add_prefix("present", self.present._asdict())
        layers = {f"layer{layer}": self.cache.held(layer) for layer in range(self.cache.layers)}
        held = {f"{layer}.{name}": part for layer, parts in layers.items() for name, part in parts.items()}
        times = add_prefix("times", self.times.state())
        return numbers, held | add_prefix("policy", self.policy.state()) | references | present | times

    def restore(self, numbers: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> None:
        """Restore what :meth:`state` returned for a stream of the same model and settings. Raises ValueError."""
        for layer in range(self.cache.layers):
            self.cache.load(layer, strip_prefix(f"layer{layer}", arrays))
        self.policy.restore(strip_prefix("policy", arrays))
        self.positions.restore(numbers["positions"])
        self.times.restore(strip_prefix("times", arrays))
        if self.references is not None:
            self.references.restore(strip_prefix("references", arrays))
        present = strip_prefix("present", arrays)
        self.present = Present(*(present[name].copy() for name in Present._fields)) if present else None
        sizes = (self.model.bundle.vision.tokens_per_frame, self.model.bundle.decoder.row_width), (2,)
        if self.present and not (
            tuple(part.shape for part in self.present) == sizes and np.isfinite(self.present.seconds).all()
        ):
            raise ValueError(f"the present is {[list(part.shape) for part in self.present]}")
        self._seq, self.frames = numbers["seq"], numbers["frames"]
        self.stats = MemoryStats(**numbers["stats"])

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the memory for good inside: an error tears it, except a UserError, which comes before any change.

        Raises CacheError where another thread is inside.
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
        """Overwrite what rows that left the memory left in the host's memory."""
        if self.model.engine.kv_device == "host":
            for buffer, length in zip(self.cache.buffers(), self.cache.lengths.tolist(), strict=True):
                for rows in arrays_of(buffer):
                    rows[:, length:] = 0

    def append_frames(self, features: Float32, coming: int = 0, seconds: Float64 | None = None) -> int:
        """Append frames ``[F, tokens_per_frame, width]``, in pieces of whole frames, or in chunks.

        A frame here is what has a grid of tokens: a group of frames, where the tower merges some. seconds: ``[F, 2]``, when the
        first and the last of each were seen; their number, if not given.
        A piece is what fits as it is, else what one compression makes room for, and one frame at least: the least budget is a
        frame. ``coming`` more frames of the chunk will follow: the piece that they fill up waits for them. Returns how many
        were appended. Raises UserError when an unbounded policy's capacity is used up.

        Where only what changed is appended, a piece is what changed in the frames that fit as it is, each by itself; the frame
        after the last piece is held back as the present, and counts.
        """
        with self.changing():
            seconds, done = self._seconds(features, seconds), 0
            if self.references is not None:
                return self._append_changed(self.references, self._queue(features, seconds), coming) if len(features) else 0
            while done < len(features):
                count = self._piece(features[done:], coming)
                if count > len(features) - done:
                    break
                self.make_room(count * self.rows_per_frame)
                piece, first = features[done : done + count], self._seq
                tokens, result = self._append_vision(piece, seconds[done : done + count])
                self.frames += count
                self._inform_policy(tokens.at(first), result, piece)
                done += count
            return done

    def _queue(self, features: Float32, seconds: Float64) -> list[QueuedFrame]:
        """The frames that are not in the memory: the present, and these."""
        if self.present is not None:
            features = np.concatenate([self.present.features[None], features])
            seconds = np.concatenate([self.present.seconds[None], seconds])
        return [QueuedFrame(*frame) for frame in zip(features, seconds, unit_features(features), strict=True)]

    def _append_changed(self, references: References, queue: Sequence[QueuedFrame], coming: int) -> int:
        """Append what changed in all frames but the newest; returns how many of them, without the present, wait no longer.

        With more ``coming``, the frames of the last piece wait: others may join them.
        """
        done, last, held = 0, len(queue) if coming else len(queue) - 1, self.present is not None
        while done < last:
            self._make_room_changed(references, queue[done])
            with self._positions_kept() as undo:
                piece = self._changed_piece(references, queue[done:last])
                if coming and done + len(piece.tokens) == last:
                    undo()
                    break
                rows = Embedded.joined(piece.rows) if piece.rows else None
                first, result = self._seq, None if rows is None else self._append_timed(rows)
            if rows is not None and result is not None:
                self._inform_policy(rows.at(first), result, piece.features)
            self.references = references = piece.references
            for tokens in piece.tokens:
                self.cache.confirm(tokens.reshape(self.model.bundle.vision.grid), self.frames)
                self.frames += 1
            self._compress_for(0)
            done += len(piece.tokens)
            appended = 0 if rows is None else int((rows.rows.kind == Kind.VISION).sum())
            self.stats = self.stats.plus(tokens_seen=sum(map(len, piece.tokens)), tokens_appended=appended)
        self.present = Present(queue[done].features.copy(), queue[done].seconds.copy())
        return done + 1 - held

    def _make_room_changed(self, references: References, frame: QueuedFrame) -> None:
        if count := int(references.changed(frame.unit).sum()):
            self.make_room(count + self._most_text)

    def _changed_piece(self, references: References, queue: Sequence[QueuedFrame]) -> ChangedPiece:
        """What changed in the first frame, which there is room for, and in those after it that need no further room.

        So rows and positions are those of frames that are appended one by one. A frame without changes has no text either.
        """
        piece = ChangedPiece([], [], [], references.copy())
        free, held = 0 if self.policy.takes_single_frames else self._free, 0
        for number, frame in enumerate(queue, self.frames):
            changed = piece.references.changed(frame.unit)
            count = np.count_nonzero(changed)
            rows = count + self._most_text if count else 0
            if piece.tokens and (held + rows > free or self.positions.due(rows, compressed=False)):
                break
            seq = np.zeros(0, np.int64)
            if rows:
                made = self.framing.rows(frame.features[None], frame.seconds[None], number, self.positions, changed)
                seq = self._seq + held + np.flatnonzero(made.rows.kind == Kind.VISION)
                held += len(made)
                piece.rows.append(made)
                piece.features.append(frame.features)
            piece.references.appended(frame.unit, changed, seq)
            piece.tokens.append(piece.references.seq.copy())
        return piece

    def _seconds(self, features: Float32, seconds: Float64 | None) -> Float64:
        """First and last second of each frame after the present, ``[F, 2]``; noted for evidence."""
        first = self.frames + (self.present is not None)
        number = first + np.arange(len(features), dtype=np.float64)
        seen = np.repeat(number[:, None], 2, 1) if seconds is None else seconds
        for frame, second in enumerate(seen[:, 0], first):
            self.times.add(frame, float(second))
        return seen

    def _piece(self, features: Float32, coming: int) -> int:
        """Frames of the next piece, of those to come too: as many as fit, or as one compression makes room for.

        Frame 0 goes in by itself, densely, if later ones see it for good.
        """
        left, budgets = len(features) + coming, self.policy.layer_budgets
        kept = self.rows_per_frame if self.policy.keeps_first_frame else 0
        if kept and not self.frames:
            return min(1, left)
        freed = min(self.policy.max_append, int(budgets.min()) - kept)
        return min(max(1, self._free // self.rows_per_frame or freed // self.rows_per_frame), left)

    @property
    def _free(self) -> int:
        """Rows of frames that can be appended without a compression."""
        return int((self.policy.layer_budgets - self.cache.lengths).min()) + self.prefix

    def make_room(self, rows: int) -> None:
        """Make room for ``rows`` more rows of frames; does nothing if there already is.

        Raises UserError when an unbounded policy's capacity is used up.
        """
        if not self.policy.bounded and self.tokens + rows > self.budget:
            held = self.budget // self.rows_per_frame * self.model.bundle.vision.group
            raise UserError(
                f"the {self.policy.name} cache is full: {self.budget} tokens hold {held} frames; "
                "give a larger --budget, or a policy that compresses"
            )
        self._compress_for(rows)

    def _inform_policy(self, rows: Rows, result: StepResult, frames: Sequence[Float32] | Float32) -> None:
        """frames: features ``[tokens_per_frame, width]`` of each frame that the rows belong to."""
        vision, needs = np.flatnonzero(rows.kind == Kind.VISION), self.policy.needs
        queries = {layer: result.probes[layer][:, vision] for layer in needs.probe_layers}
        with self._timed("compress_ms"):
            seen = np.stack([frame.mean(0) for frame in frames]) if needs.features else None
            appended = Appended(rows.seq[vision], rows.position[vision], queries, rows.frame[vision], seen)
            self.policy.after_append(self.cache, appended)

    def _append_vision(
        self, piece: Float32, seconds: Float64, ahead: int = 0, sparsely: bool = True
    ) -> tuple[Embedded, StepResult]:
        """ahead: how many frames these come after the next. sparsely: through the sparse graph, where the policy has one."""
        sparsely = sparsely and self.sparse is not None and self.frames > 0
        pattern = frame_pattern(self.cache, self.prefix, self.frames, self.model.bundle.vision.grid) if sparsely else None
        with self._positions_kept():
            tokens = self.framing.rows(piece, seconds, self.frames + ahead, self.positions)
            return tokens, self._append_timed(tokens, pattern)

    def _append_timed(self, tokens: Embedded, pattern: FramePattern | None = None) -> StepResult:
        with self._timed("prefill_ms"):
            return self.append(tokens, (), pattern)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.stats = self.stats.plus(**{part: 1e3 * (time.perf_counter() - started)})

    @contextmanager
    def _positions_kept(self) -> Iterator[Callable[[], None]]:
        """Take positions back where the block raises, or calls the function that it is given."""
        mark = self.positions.mark()
        try:
            yield lambda: self.positions.restore(mark)
        except BaseException:
            self.positions.restore(mark)
            raise

    def _compress_for(self, rows: int) -> None:
        """Compress before an append that would cross |M|, and re-index when it is due."""
        started, guided = time.perf_counter(), self.stats.guidance_ms
        plan = self.policy.before_append(self.cache, rows, self._guide)
        if plan is not None:
            evicted = self.cache.evict(plan.keep)
            for layer, new in plan.add.items():
                self.cache.append(layer, new.key, new.value, new.rows)
                self.positions.next = max(self.positions.next, int(new.rows.position.max()) + 1)
            took = 1e3 * (time.perf_counter() - started) - (self.stats.guidance_ms - guided)
            self.stats = self.stats.plus(evicted=evicted, compressions=1, compress_ms=took)
        if self.positions.due(rows, plan is not None):
            with self._timed("reindex_ms"):
                self.positions.compact(self.cache, self.prefix, self.policy.working_rows)
                self.policy.compacted()
            self.stats = self.stats.plus(reindexings=1)

    def _guide(self) -> Guidance:
        """The guidance texts after the memory: one causal forward that is rolled back."""
        held, layers = self.cache.lengths, self.policy.needs.guidance_layers
        with self._timed("guidance_ms"), self.question():
            probes = self._append_text(np.concatenate(self._guidance), ()).probes
            keys = {layer: self.cache.dequantize("key", layer, slice(int(held[layer]), None)) for layer in layers}
        return Guidance({layer: probes[layer] for layer in layers}, keys, tuple(map(len, self._guidance)))

    @contextmanager
    def question(
        self,
        frames: Float32 | None = None,
        coming: int = 0,
        seconds: Float64 | None = None,
        pictures: Sequence[Float32] = (),
        now: float = 0.0,
        window: TimeWindow | None = None,
    ) -> Iterator[None]:
        """Take out whatever is appended inside, position counter included, on exit.

        frames: ``[F, tokens_per_frame, width]``, of a piece that ``coming`` more belong to, to be seen inside and appended for
        good later. Room is made for the whole piece, now and not then, so that the memory is the same afterwards.
        Where there is a present, the newest of it and these is seen whole, and of the others what changed.
        pictures: ``[1, tokens_per_frame, width]`` each, seen after all frames, a second apart from a second after ``now`` on.
        now: the stream's time. window: what is appended inside sees only rows of that time. Raises NothingHeld where there
        are none, and UserError as :meth:`check_window` does.
        """
        queue: list[QueuedFrame] = []
        if self.references is not None:
            shape = 0, self.model.bundle.vision.tokens_per_frame, self.model.bundle.decoder.row_width
            waiting = np.zeros(shape, np.float32) if frames is None else frames
            queue = self._queue(waiting, self._seconds(waiting, seconds))
            if len(queue) > 1:
                with self.changing():
                    self._make_room_changed(self.references, queue[0])
        elif frames is not None and len(frames):
            count = self._piece(frames, coming) if self.policy.bounded else len(frames)
            with self.changing():
                self.make_room(count * self.rows_per_frame)
        with self._taken_out():
            if self.references is not None and queue:
                piece, newest = self._changed_piece(self.references, queue[:-1]), queue[-1]
                if piece.rows:
                    self._append_timed(Embedded.joined(piece.rows))
                self._append_vision(newest.features[None], newest.seconds[None], len(queue) - 1)
            elif frames is not None and len(frames):
                self._append_vision(frames, self._seconds(frames, seconds))
            after = self.chunk + 1  # frames that may come before the pictures
            for index, picture in enumerate(pictures):
                self._append_vision(picture, np.full((1, 2), now + 1 + index), ahead=after + index, sparsely=False)
            if window is not None:
                self._narrowed = self._narrow(window, now)
            yield

    @contextmanager
    def truncated_prefix(self, rows: int) -> Iterator[None]:
        """Temporarily keep only the first ``rows`` prefix tokens, of a memory without frames; restore the rest on exit."""
        layers = range(self.cache.layers)
        held = [{name: part.copy() for name, part in self.cache.held(layer).items()} for layer in layers]
        position, seq = self.positions.mark(), self._seq
        self.cache.evict([self.cache.seq(layer) < rows for layer in layers])
        self.positions.next = self._seq = rows
        try:
            yield
        finally:
            for layer in layers:
                self.cache.load(layer, held[layer])
            self.positions.restore(position)
            self._seq = seq

    @contextmanager
    def _taken_out(self) -> Iterator[None]:
        mark, position, seq = self.cache.mark(), self.positions.mark(), self._seq
        try:
            yield
        finally:
            with self.changing():
                if self._narrowed is not None:
                    self._narrowed.restore()
                    self._narrowed = None
                self.cache.rollback(mark)
                self.positions.restore(position)
                self._seq = seq

    def check_window(self) -> None:
        """Raise UserError where questions cannot be about a window of time."""
        if isinstance(self.policy, Retrieval):
            raise UserError(f"{self.policy.name} chooses by the question what is looked at; ask without since and until")
        if self.model.engine.kv_device != "host":
            advice = "ask without since and until, or run on --engine onnxruntime-cpu"
            raise UserError(f"windows of time need the cache in the host's memory; {advice}")

    def _narrow(self, window: TimeWindow, now: float) -> NarrowedMemory:
        self.check_window()
        frames, cache, newest = window.frames(self.times, now), self.cache, self.times.newest
        shown = [rows_of(cache, layer, *frames, newest) for layer in range(cache.layers)]
        vision = [cache.kind(layer) == Kind.VISION for layer in range(cache.layers)]
        of_memory = [vision[layer] & (cache.frame(layer) <= newest) for layer in range(cache.layers)]
        if not any((mask & held).any() for mask, held in zip(shown, of_memory, strict=True)):
            oldest = [int(cache.frame(layer)[held].min()) for layer, held in enumerate(of_memory) if held.any()]
            raise NothingHeld(window, self.times.at(min(oldest)) if oldest else None)
        narrowed = NarrowedMemory(cache, shown, frames)
        if not narrowed.even and self._layers is None:
            try:
                self._layers = self.model.engine.bind_layers(cache.buffers())
            except BaseException:
                narrowed.restore()
                raise
        return narrowed

    def append_question(self, embeds: Float32) -> Float32:
        """Append a question's rows ``[S, hidden]``, note where the last one looks, and return its logits, ``[vocabulary]``."""
        result = self._append_text(embeds, (len(embeds) - 1,))
        self.looked = self._look(result)
        return result.logits[0]

    def classify(self, embeds: Float32) -> tuple[Float32, QuestionAttention]:
        """Return what :meth:`append_question` does, and where the last row looks; the rows are taken out again."""
        with self._taken_out():
            result = self._append_text(embeds, (len(embeds) - 1,))
            return result.logits[0], self._look(result)

    def _look(self, result: StepResult) -> QuestionAttention:
        """Where the last row of a step looks; it must be the newest row."""
        layer = self.evidence_heads.layer
        query = result.probes[layer][:, -1]
        group = len(query) // self.cache.kv_heads
        by_head: dict[int, list[int]] = {}
        for head in self.evidence_heads.heads:
            by_head.setdefault(head // group, []).append(head)

        def seen(head: int) -> list[SeenRows]:
            if self._narrowed is not None:
                return [self._narrowed.seen(layer, head)]
            held = [seen_rows(self.cache, layer, head)]
            return [*held, self.policy.working.seen(layer, head)] if isinstance(self.policy, Retrieval) else held

        vision, groups = self.model.bundle.vision, ((query[heads], seen(head)) for head, heads in by_head.items())
        heads, logits = self.evidence_heads, result.logits[-1]
        if self._narrowed is not None:  # the rule was calibrated on whole memories
            heads = replace(heads, weights=())
        return QuestionAttention(groups, heads, vision.grid, vision.group, self.times, logits, self.stats.evicted == 0)

    def append_text(self, embeds: Float32) -> Float32:
        """Append text rows ``[S, hidden]`` and return the last row's logits, ``[vocabulary]``."""
        return self._append_text(embeds, (len(embeds) - 1,)).logits[0]

    def score_text(self, embeds: Float32, rows: Sequence[int]) -> Float32:
        """Append text rows ``[S, hidden]`` in one call; return the logits of ``rows``, ``[len(rows), vocabulary]``."""
        return self._append_text(embeds, rows).logits

    def probe_text(self, embeds: Float32) -> dict[int, Float32]:
        """Append text rows ``[S, hidden]``; return the rotated queries ``[heads, S, head_dim]`` of the policy's layers."""
        probes, needs = self._append_text(embeds, ()).probes, self.policy.needs
        return {layer: probes[layer] for layer in {*needs.probe_layers, *needs.guidance_layers}}

    def _append_text(self, embeds: Float32, logit_rows: Sequence[int], kind: int = Kind.TEXT) -> StepResult:
        """Append rows of text ``[S, hidden]`` that belong to no frame."""
        with self._positions_kept():
            return self.append(Embedded(embeds, Rows.text(self.positions.take(len(embeds)), kind)), logit_rows)

    def append(self, tokens: Embedded, logit_rows: Sequence[int], pattern: FramePattern | None = None) -> StepResult:
        """Append and commit rows that there is room for, through the sparse prefill graph when there is a pattern."""
        tables = rope_tables(tokens.rows.position, self.inv_freq, self.cache.pair_axis)
        if self._narrowed is not None:
            decoder = self.decoder if self._narrowed.even else None
            probes = (self.evidence_heads.layer,)
            result = self._narrowed.step(decoder, self._layers, tokens.embeds, *tables, logit_rows, probes)
            self._seq += len(tokens)
            return result
        self.cache.reserve(len(tokens))
        if self._by_layer is not None:
            text: Phase = "answer" if len(tokens) == 1 else "question"
            self._by_layer.phase = "prefill" if (tokens.rows.kind == Kind.VISION).any() else text
        try:
            if pattern is None or self.sparse is None:
                result = self.decoder.step(tokens.embeds, *tables, self.cache.lengths, logit_rows)
            else:
                result = self.sparse.step(tokens.embeds, *tables, self.cache.lengths, logit_rows, pattern)
            rows = tokens.at(self._seq)
        except BaseException:
            self.cache.abort()
            raise
        try:
            self.cache.commit(rows)
        except MemoryError:  # before the call had begun
            self.cache.abort()
            raise
        self._seq += len(tokens)
        return result


class LayerByLayer:
    """A :class:`~edgevlm.runtime.engine.Decoder` of per-layer graphs: a retrieval policy fetches rows for each layer.

    ``phase``: that of the next rows. ``probes``: layers whose queries a step returns.
    """

    def __init__(self, layers: LayerDecoder, policy: Retrieval, probes: Sequence[int] = ()) -> None:
        self._layers, self._policy, self._probes = layers, policy, frozenset(probes)
        self.phase: Phase = "prefill"

    def step(
        self,
        embeds: Float32,
        cos: Float32,
        sin: Float32,
        past_len: Int32,
        logit_rows: Sequence[int] = (-1,),
        pattern: FramePattern | None = None,
    ) -> StepResult:
        """Append rows as the protocol has it; they are causal among themselves and see the working set before them."""
        policy, probes = self._policy, {}
        policy.begin(cos, sin)
        query: Float32 | None = self._layers.begin(embeds, cos, sin, logit_rows)
        for layer, past in enumerate(past_len):
            assert query is not None  # but for the last layer's, there is a next
            if layer in self._probes:
                probes[layer] = query.copy()
            fetched = policy.attend(layer, query, self.phase)
            query = self._layers.attend(layer, (past + fetched).astype(np.int32))
            policy.working.settle(layer, len(embeds))
        return StepResult(self._layers.logits(), probes)
