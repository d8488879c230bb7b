"""Define the session, which watches frames and answers questions about them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import CacheError, SnapshotError, UserError
from edgevlm.progress import Notify
from edgevlm.runtime.answer import Answer, Draw, FinishReason, LogitsProcessor
from edgevlm.runtime.budget import Pressure, TextBudget, longest_question
from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.chat import Chat, Conversations, Dialogue, Turn
from edgevlm.runtime.chunk import Chunk
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.model import Model
from edgevlm.runtime.opening import check_int, check_time, open_encoder, open_stream
from edgevlm.runtime.plugins import blamed
from edgevlm.runtime.policies import layers_of
from edgevlm.runtime.preprocess import Pixels, Preprocessor
from edgevlm.runtime.sampling import Classified, LogProb, OneOf, Repetition, Sampler
from edgevlm.runtime.scheduler import PERIOD_S
from edgevlm.runtime.settings import AUTO, SessionSettings
from edgevlm.runtime.snapshots.forget import forget
from edgevlm.runtime.snapshots.format import Snapshot
from edgevlm.runtime.snapshots.writer import CaptureBuffer, SnapshotWriter, identity, restore
from edgevlm.runtime.standing import Change, StandingQuestion
from edgevlm.runtime.stateful import add_prefix, bytes_of, strip_prefix
from edgevlm.runtime.stats import SessionStats
from edgevlm.runtime.store import Store
from edgevlm.runtime.stream import Stream
from edgevlm.runtime.taught import never_taught, parse
from edgevlm.runtime.time_window import TimeWindow

T = TypeVar("T")
ROUND_S = 0.5  # the longest time that a round of background questions may hold up frames, in seconds
KNOWN_QUESTIONS = 256


@dataclass(eq=False)
class SessionMemory:
    """A session's stream, unfinished chunk, conversations and counters. ``why``: why ``auto`` chose the policy.

    ``frames``: the number of frames watched. ``chunks``: the number of chunks appended. ``time_s``: the stream's time at the
    newest frame. ``asked``: the number of questions. ``resumed``: how many of the frames came from a snapshot. ``started``: the
    value of ``time.perf_counter`` when this process watched its first frame.
    """

    stream: Stream
    chunk: Chunk
    conversations: Conversations
    why: str = ""
    frames: int = 0
    chunks: int = 0
    time_s: float = 0.0
    asked: int = 0
    resumed: int = 0
    started: float | None = None

    @property
    def fps(self) -> float:
        """The frames per second since this process watched its first frame."""
        elapsed = time.perf_counter() - self.started if self.started else 0.0
        return (self.frames - self.resumed) / elapsed if elapsed else 0.0

    def capture(self) -> tuple[dict[str, Any], dict[str, NDArray]]:
        """Return a snapshot's header and arrays. The arrays are views, so copy them before the session changes."""
        numbers, held = self.stream.state()
        counts, waiting = self.chunk.state()
        turns = {name: list(of) for name, of in self.conversations.turns.items()}
        session = {"frames": self.frames, "chunks": self.chunks, "time_s": self.time_s, "conversations": turns}
        return {"stream": numbers, "chunk": counts, "session": session}, held | add_prefix("chunk", waiting)

    def restore(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray]) -> None:
        """Restore a captured snapshot. If this raises an error, the snapshot does not match the session, and the memory is
        unusable.
        """
        self.stream.restore(about["stream"], arrays)
        self.chunk.restore(about["chunk"], strip_prefix("chunk", arrays))
        session = about["session"]
        self.frames, self.chunks, self.time_s = session["frames"], session["chunks"], session["time_s"]
        turns = session["conversations"].items()
        self.conversations.turns = {name: [(asked, said) for asked, said in of] for name, of in turns}


class HeldFrames(NamedTuple):
    """The frames that have tokens in the memory, oldest first, as arrays ``[k]``.

    ``number``: each frame's number, from 0. Frames that the tower merges have the same number. ``seconds``: when each frame was
    seen. ``tokens``: how many tokens of each frame are left, in the layer and KV head that hold most of them.
    """

    number: NDArray[np.int64]
    seconds: NDArray[np.float64]
    tokens: NDArray[np.int64]


class CallerError(Exception):
    """Raised if a ``logits_processor`` fails or no token can be drawn from its result. ``__cause__`` is the original error."""


class Session:
    """A session that watches one stream within a fixed memory budget and answers questions about it.

    For example::

        with Session.open("demo", budget="1k") as session:  # or a bundle, a checkpoint, ORG/NAME; closed at the end
            session.watch(frame, seconds)                   # uint8 RGB [H, W, 3]; prepare, skip, flush
            answer = session.ask("how many objects?")       # print it, or iterate it; check, check_window, cancel
            session.on("is somebody there?", print)         # called when the answer changes; classify asks once
            session.memory()                                # frames that are held; forget(since=0, until=60) deletes
            session.save                                    # (folder): Session.open(state=folder) continues from it
            session.stats                                   # also policy, basis, budget, chunk, time_s, waiting, is_torn

    Any thread may call any method, but a forked process may not. The model's own thread (``model.scheduler``) does the work,
    questions first. A question waits at most until the next chunk boundary. A question sees every frame watched before the
    question and no later frame, because ``watch`` waits while a question is open. Asking does not change the memory, even in
    the middle of a chunk.

    The session calls ``notify`` with each one-line notice. By default, notices go to the logger ``edgevlm``. ``rate`` is the
    intended number of frames per second. The sessions of a model share the model's time in proportion to their rates. ``cache``
    and ``store`` may be read while the session is idle.
    """

    def __init__(
        self, model: Model, settings: SessionSettings, chat: Chat, text: TextBudget, writer: SnapshotWriter | None, bgr: bool
    ) -> None:
        """Build the session on the model's thread. Callers use :meth:`open` instead."""
        self.model, self.text_budget, self.rate = model, text, 1 / PERIOD_S
        self.notify: Notify = logging.getLogger("edgevlm").warning
        self._settings, self._chat, self._writer = settings, chat, writer
        self._preprocess = Preprocessor(model.bundle.vision, bgr=bgr)
        self._asking = threading.Lock()
        self._answers: list[Answer] = []  # includes all unfinished answers
        self._standing: list[StandingQuestion] = []
        self._closed = self._reading = False
        self._ttft_ms = self._tpot_ms = 0.0
        self._owned: Model | None = None
        self._known: dict[tuple[str, tuple[str, ...]], tuple[list[int], OneOf]] = {}
        self._memory = self._empty_memory()
        try:
            group, encoder = model.bundle.vision.group, self._chunk.encoder
            self._pressure = Pressure(self.chunk, lambda line: self.notify(line), group=group)
            if writer is not None:
                held = self._stream.capture_bytes + bytes_of(encoder)
                writer.attach(self, identity(self._stream, chat, text, encoder), held, self._restore)
            self._stats = self._measure()
        except BaseException:
            if (memory := getattr(self, "_memory", None)) is not None:
                memory.stream.close()
            raise

    def _empty_memory(self) -> SessionMemory:
        settings, model = self._settings, self.model
        encoder = open_encoder(settings, model, self._writer)
        stream, why = open_stream(settings, model, self._chat, self.text_budget, self._writer)
        choices = model.bundle.choices()
        if why and encoder is not None and settings.encode == AUTO and choices and choices.encode:
            why += f"; encode: {encoder.settings}"
        if stream.store is not None:
            stream.store.notify = lambda line: self.notify(line)
        chunk = Chunk(model.engine, model.bundle, stream.chunk, encoder)
        text = self.text_budget
        most = longest_question(text, stream.spare_positions) if text.most else 0
        return SessionMemory(stream, chunk, Conversations(self._chat, text.conversation, most), why)

    def _restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot. If the snapshot does not fit, empty the session again and raise SnapshotError."""
        try:
            restore(snapshot, self._memory.restore)
            self._memory.resumed = self._memory.frames
            return
        except SnapshotError as error:
            refused = type(error)(str(error))
        self._stream.close()
        del self._memory  # frees the old memory before the new memory is allocated
        self._memory = self._empty_memory()
        raise refused

    @classmethod
    def open(
        cls,
        model: Model | str | Path = "demo",
        settings: SessionSettings | None = None,
        *,
        state: SnapshotWriter | str | Path | None = None,
        bgr: bool = False,
        engine: str = DEFAULT_ENGINE,
        system: str | None = None,
        text_budget: TextBudget | None = None,
        frame_size: tuple[int, int] | None = None,
        **fields: Any,
    ) -> Session:
        """Open a session: allocate the memory of one stream and append the prefix.

        ``model``: ``demo``, the directory of a bundle or a checkpoint, a hub model ``ORG/NAME[@revision]``, or a loaded model,
        which is not closed with the session. A checkpoint is exported once, and a hub model is downloaded once. ``state``: a
        directory to keep snapshots in and to resume from, or a SnapshotWriter, which is closed with the session. ``bgr``:
        whether frames are BGR, as OpenCV reads them, instead of RGB. ``engine``: the backend for a model given by name.
        ``system``: a system prompt that replaces the chat template's. ``text_budget``: the token limits for conversation,
        question and answer. ``frame_size``: the frames' (height, width), for models that keep the aspect ratio (Qwen's); by
        default, the size given at export. Frames of a different size are resized.

        ``settings``: a :class:`~edgevlm.runtime.settings.SessionSettings`. Keyword arguments override the fields of
        ``settings``. ``policy``: ``name``, ``name:setting=value,...``, ``./mine.py:Mine``, your own class or instance (for this
        session only), or ``auto``, the best policy measured on this model. ``budget``: the number of vision tokens that each
        layer keeps (|M|), or text like "6k". ``chunk``: the number of frames encoded and appended at once, by default 8.
        ``reindexing``: when to renumber the kept tokens' positions without gaps: ``lazy`` when needed, ``eager`` at every
        compression. ``append``: ``all`` appends every token of each frame; ``changed[:tau=T,refresh=N,present=N]`` appends only
        tokens that changed since their patch was last appended. Questions see the newest N frames whole (by default, one).
        ``append="auto"`` is ``changed``, unless calibration chose whole frames or the policy needs them. ``encode``: ``all``
        encodes every patch of each frame; ``changed[:interval=K,threshold=T]`` encodes only patches that changed since they
        were last encoded, and encodes every K-th frame whole. ``encode="auto"`` is the calibrated choice, or ``changed`` if the
        bundle has none. ``store_bytes``, ``host_bytes``: the limits of a retrieval policy's file and host memory, like "8G".
        ``max_question_tokens``: the maximum length of a question and its earlier turns, by default 8192; ignored if
        ``text_budget`` is given. The memory for a long question is allocated when the question is asked.

        Raises BundleError for a model that cannot be loaded. Raises UserError for an invalid setting or prompt. Raises
        UserError if the budget or chunk is too small for a frame, or too large for the model's positions or the free memory.
        Raises UserError for a ``state`` that cannot be written, is in use or belongs to a different session. Raises UserError
        for store limits if the policy has no store.
        """
        settings = SessionSettings.checked(settings, **fields)
        writer = SnapshotWriter(state) if isinstance(state, str | Path) else state
        loaded: Model | str | Path = model
        opening: Future[Session] | None = None
        try:
            loaded = model if isinstance(model, Model) else Model.load(model, engine=engine)
            used = loaded if frame_size is None else loaded.for_frames(_checked_size(frame_size))
            if writer is not None and writer.kept(used.in_fp32().bundle):
                used = used.in_fp32()
            text = text_budget or replace(TextBudget.fitting(used.bundle.limit), most=settings.max_question_tokens)
            chat = Chat(used.bundle.chat, used.tokenizer, system)
            opening = used.scheduler.submit(None, cls, used, settings, chat, text, writer, bgr, urgent=True)
            session = opening.result()
            if writer is not None:
                writer.start()
        except BaseException:
            if opening is not None and not opening.cancel():  # after an interrupt, close the session once it is open
                opening.add_done_callback(_close_opened)
            if writer is not None:
                writer.close()
            if isinstance(loaded, Model) and loaded is not model:
                loaded.close()
            raise
        session._owned = loaded if loaded is not model else None
        return session

    def prepare(self, frame: NDArray[np.uint8]) -> Pixels:
        """Resize and normalise a frame, uint8 ``[H, W, 3]``, for a later :meth:`watch`, in the calling thread.

        Raises UserError if the frame's shape or dtype is wrong.
        """
        return Pixels(self._preprocess(frame), (frame.shape[0], frame.shape[1]))

    def watch(self, frame: NDArray[np.uint8] | Pixels, timestamp: float | None = None) -> None:
        """Watch one frame, uint8 RGB ``[H, W, 3]``, or a frame from :meth:`prepare`.

        ``timestamp``: the frame's time in the stream, in seconds; by default, the frame's number, from 0. Frames are encoded
        and appended ``chunk`` at a time. This method waits while a question is being answered. An interrupted call adds the
        frame completely or not at all. Raises UserError for a wrong shape or dtype, for a ``timestamp`` before the stream's
        time, and after :meth:`close`. Raises UserError if the memory is full and the policy never compresses.
        """
        pixels = self._pixels(frame)
        if timestamp is not None:
            check_time(timestamp)
        self._run(self._add_frame, pixels, timestamp)

    def _pixels(self, frame: NDArray[np.uint8] | Pixels) -> Pixels:
        pixels = frame if isinstance(frame, Pixels) else self.prepare(frame)
        if pixels.values.shape != (3, *self.model.bundle.vision.size):
            raise UserError(f"pixels {list(pixels.values.shape)} were prepared for another model; use this session's prepare()")
        return pixels

    def skip(self, timestamp: float) -> None:
        """Advance the stream's time to ``timestamp`` seconds without a frame. Waits while a question is being answered.

        Raises UserError for a ``timestamp`` before the stream's time, and after :meth:`close`.
        """
        check_time(timestamp)
        self._run(self._skip_to, timestamp)

    def flush(self) -> None:
        """Append the watched frames without waiting for a full chunk. Raises UserError if the memory is full and the policy
        never compresses, and after :meth:`close`.
        """
        self._run(self._append_chunk)

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a function on the model's thread when it is this session's turn, and return its result."""
        self._check_open()
        return self.model.scheduler.run(self, self._step, work, *arguments, period=1 / self.rate)

    def _step(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a function on the model's thread and update the stats. Errors name the engine or policy that caused them."""
        self._check_open()
        self._check_memory()
        memory, chunks = self._memory, self._memory.chunks
        try:
            engine = self.model.engine
            with blamed(f"engine {type(engine).__name__}", engine), blamed(f"policy {self.policy}", self._stream.policy):
                return work(*arguments)
        except CallerError as error:
            failed: Any = error.__cause__
            raise failed from failed.__cause__
        except (ArithmeticError, CacheError, LookupError, TypeError, ValueError) as error:
            if self._writer is None or self._writer.resumed is None:
                raise
            raise self._writer.unfit(error) from error
        finally:
            changed = memory.chunks != chunks or work not in (self._add_frame, self._skip_to)
            self._stats = self._measure() if changed else replace(self._stats, frames=memory.frames, fps=memory.fps)

    def _check_open(self) -> None:
        self.model.scheduler.check_process()
        if self._closed:
            raise UserError("the session is closed; open another one")

    def _check_memory(self) -> None:
        if self.is_torn:
            raise UserError("an error left the memory inconsistent; open the session again")

    def _add_frame(self, pixels: Pixels, timestamp: float | None) -> None:
        chunk, memory = self._chunk, self._memory
        if not (chunk.taken or self._reading):
            chunk.limit = self._pressure.look()
            self.model.engine.release_memory(self._pressure.short)
        now = float(memory.frames if timestamp is None else timestamp)
        self._check_later(now)
        memory.started, memory.time_s = memory.started or time.perf_counter(), now
        memory.frames += 1
        chunk.add(pixels.values, memory.time_s, pixels.size)
        if chunk.taken >= chunk.limit:
            self._append_chunk()

    def _check_later(self, timestamp: float) -> None:
        if self._memory.frames and timestamp < self._memory.time_s:
            what = f"timestamp {timestamp:g} s is before {self._memory.time_s:g} s"
            raise UserError(f"{what}; give timestamps in order, or open another session")

    def _skip_to(self, timestamp: float) -> None:
        self._check_later(timestamp)
        self._memory.time_s = float(timestamp)

    def _append_chunk(self) -> None:
        if self._chunk.taken:
            self._append_pieces(complete=False)
            self._chunk.clear()
            self._memory.chunks += 1

    def _append_pieces(self, *, complete: bool = True) -> None:
        """Append the chunk's frames. ``complete``: leave out frames that would be encoded or appended differently once the
        chunk is full.
        """
        chunk = self._chunk
        try:
            if chunk.taken:
                features, seconds, coming = chunk.encode(complete=complete)
                chunk.appended(self._stream.append_frames(features, coming if complete else 0, seconds))
        except BaseException:
            chunk.clear()
            raise

    def check(self, question: str | Dialogue, choices: Sequence[str] = ()) -> None:
        """Raise UserError if a question is longer than its budget, contains the video's placeholder, or is not Unicode.

        With ``choices``, also raises UserError for choices that :meth:`classify` cannot distinguish.
        """
        if choices:
            self._classifier(str(question), choices)
            return
        self._check_length(question, self.max_question_tokens)

    def _check_length(self, question: str | Dialogue, most: int) -> int:
        if (tokens := len(self._chat.suffix([], question))) > most:
            raise UserError(f"this question has {tokens} tokens, but only {most} fit; shorten it")
        return tokens

    def most_pictures(self, question: str | Dialogue) -> int:
        """Return how many pictures can accompany a question. Raises the same errors as :meth:`check`."""
        tokens, text, frame = (
            self._check_length(question, self.max_question_tokens),
            self.text_budget,
            self.model.rows_per_frame,
        )
        return text.pictures + (max(self.max_question_tokens - tokens, 0) // frame if text.most else 0)

    def ask(
        self,
        question: str | Dialogue,
        conversation: str | None = None,
        *,
        history: Sequence[Turn] = (),
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logprobs: int | None = None,
        choices: Sequence[str] = (),
        logits_processor: LogitsProcessor | None = None,
        pictures: Sequence[NDArray[np.uint8] | Pixels] = (),
        since: float | None = None,
        until: float | None = None,
    ) -> Answer:
        """Ask about everything watched so far. Returns an answer at once; print it, or iterate over its growing text.

        A question does not change the memory, with one exception: see "What a question changes" in docs/guide/asking.md.
        ``question``: a text, or a :class:`Dialogue` of the caller's own turns, with tools and their results. ``conversation``:
        the name of a conversation to start or continue. ``history``: earlier turns (question, answer), oldest first, instead of
        a named conversation. ``max_tokens``: the answer's maximum length, by default the whole budget for answers.
        ``temperature``: 0 decodes greedily. Above temperature 0, a token can be drawn only if it is one of the ``top_k``
        likeliest and in the smallest set whose probability reaches ``top_p``. It must also be at least ``min_p`` times as
        likely as the likeliest token. ``seed``, 0 or more, makes the draws repeatable. ``repetition_penalty``: a penalty for
        tokens of the prompt and the answer; 1 means none, and the default is the model's (generation_config.json).
        ``presence_penalty``, ``frequency_penalty``: OpenAI's penalties for tokens of the answer. ``logprobs``: record the
        log-probability of each token and of this many likeliest tokens, before penalties and temperature. ``choices``: answer
        with one of these texts, and report the ``probabilities`` of all choices; ``max_tokens`` and penalties do not apply.
        ``logits_processor``: a function that the model's thread calls for each token, with the ids so far and the logits
        ``[vocabulary]``; ignored with ``choices``. The next token is drawn from the logits that ``logits_processor`` returns;
        minus infinity excludes a token. ``pictures``: up to :meth:`most_pictures` frames for this question only, placed after
        the watched frames. ``since``, ``until``: attend only to frames from this period, in seconds of the stream.

        If the memory holds no frame from ``since`` to ``until``, reading the answer raises NothingHeld. Raises UserError for a
        question that is longer than its budget or contains the video's placeholder, and for sampling settings out of range.
        Also raises UserError for choices that cannot be distinguished or are longer than an answer, for too many pictures, and
        after :meth:`close`. Raises UserError for a period that ends before it begins, and if the policy, model or engine does
        not support periods.
        """
        self._check_open()
        window, budget = self.check_window(since, until), self.text_budget
        if self.model.is_demo and isinstance(question, str) and parse(question) is None:
            self.notify(never_taught(question))
        check_int(max_tokens=max_tokens, seed=seed, top_k=top_k, logprobs=logprobs)
        if max_tokens is not None and not 1 <= max_tokens <= budget.answer:
            raise UserError(f"an answer can have 1 to {budget.answer} tokens here, not {max_tokens}")
        sampler, chat = Sampler(temperature, top_p, seed, top_k, min_p), self.model.bundle.chat
        penalty = chat.repetition_penalty if repetition_penalty is None else repetition_penalty
        repetition = Repetition(penalty, chat.no_repeat_ngram_size, presence_penalty, frequency_penalty)
        if isinstance(question, Dialogue) and (conversation is not None or history):
            raise UserError("a dialogue already contains its turns; remove conversation and history")
        asked = question if isinstance(question, Dialogue) else Dialogue.of(history, question)
        if len(pictures) > (most := self.most_pictures(asked.without(max(asked.turns - 1, 0)))):
            raise UserError(f"only {most} pictures fit with this question, not {len(pictures)}; remove some")
        if choices:
            logits_processor = OneOf(self.model, choices)
        if isinstance(logits_processor, OneOf):
            max_tokens = logits_processor.max_tokens
            if max_tokens > budget.answer:
                raise UserError(f"a choice has {max_tokens} tokens, but an answer at most {budget.answer}; shorten it")
        one_of = logits_processor if isinstance(logits_processor, OneOf) else None
        shown, answer = [self._pixels(picture) for picture in pictures], Answer(asked.text, self.time_s)

        def draw(logits: NDArray[np.float32]) -> int:
            token = drawn(logits)
            if logprobs is not None:
                answer.found.logprobs.append(LogProb.of(logits, token, logprobs))
            return token

        def drawn(logits: NDArray[np.float32]) -> int:
            if one_of is not None:
                return sampler(one_of(answer.found.token_ids, logits))
            logits = repetition(answer.found.token_ids, logits)
            if logits_processor is None:
                return sampler(logits)
            try:
                return sampler(logits_processor(answer.found.token_ids, logits))
            except Exception as error:
                raise CallerError from error

        with self._asking:
            self._check_open()
            request = answer, asked, draw, repetition, one_of, max_tokens or budget.answer, conversation, shown, window
            answer._follow(self.model.scheduler.submit(self, self._step, self._answer, *request, urgent=True))
            self._answers = [*(each for each in self._answers if not each.finished), answer]
        return answer

    def check_window(self, since: float | None = None, until: float | None = None) -> TimeWindow | None:
        """Return a question's time window, or None for the whole stream. Raises UserError if the window is invalid or not
        supported.
        """
        if since is None and until is None:
            return None
        window = _checked_window(since, until)
        self._stream.check_window()
        return window

    def _answer(
        self,
        answer: Answer,
        asked: Dialogue,
        draw: Draw,
        repetition: Repetition,
        choices: OneOf | None,
        max_tokens: int,
        conversation: str | None,
        pictures: Sequence[Pixels],
        window: TimeWindow | None,
    ) -> FinishReason:
        """Generate the answer and, unless it was cancelled, add the turn to its conversation. Leaves the memory unchanged."""
        model, memory = self.model, self._memory
        answer.found.queued_ms = 1e3 * (time.perf_counter() - answer._asked_at)
        answer.found.time_s, memory.asked = memory.time_s, memory.asked + 1
        self._append_pieces()
        text_only = not (memory.frames or pictures or window)
        question = asked if conversation is None else answer.question
        further = max(len(pictures) - self.text_budget.pictures, 0) * model.rows_per_frame
        ids = memory.conversations.prompt(conversation, question, text_only=text_only, taken=further)
        answer.found.dropped_turns = memory.conversations.dropped
        seen = [] if text_only else self._chat.prefix + [model.bundle.chat.placeholder_id] * max(1, repetition.ngram)
        seen += ids
        shown = [model.engine.encode(picture.values[None]) for picture in pictures]
        with ExitStack() as stack:
            before = [model.closing]
            if text_only:  # without a video, the prompt continues the stream's prefix
                known = zip(ids, self._chat.prefix, strict=False)
                prefix = min(len(list(takewhile(lambda pair: pair[0] == pair[1], known))), len(ids) - 1)
                stack.enter_context(memory.stream.truncated_prefix(prefix))
                before, ids = [], ids[prefix:]
            answer.found.prompt_tokens = len(ids) + len(pictures) * model.rows_per_frame
            embeds = np.concatenate([*before, model.engine.embed(np.asarray(ids, np.int64))])
            rows = len(embeds) + max_tokens
            stack.enter_context(memory.stream.question(memory.chunk.encode(), shown, answer.found.time_s, window, rows))
            repetition.prompt = [*memory.stream.text_ids, *seen]
            reason = answer._generate(memory.stream, embeds, draw, choices, max_tokens, self._give_way)
        if pictures:
            answer.found.looked = None  # the answer may come from the pictures instead of the memory
        self._ttft_ms, self._tpot_ms = answer.found.ttft_ms, answer.found.tpot_ms
        if reason != "cancelled" and conversation is not None:
            memory.conversations.add(conversation, (answer.question, answer.so_far))
        return reason

    def _give_way(self) -> None:
        """Let other sessions work between two pieces of a long question. Meanwhile, this session may only add frames to its
        chunk.
        """
        self._reading = True
        try:
            self.model.scheduler.give_way(self, lambda task: task.arguments[0] == self._add_frame and self._chunk.has_place)
        finally:
            self._reading = False

    def classify(self, questions: Sequence[tuple[str, Sequence[str]]], *, watch: bool = False) -> list[Classified]:
        """Return how likely each choice is to be the answer to its question. Questions are about everything watched so far.

        ``questions``: pairs of a question and its choices. Each question takes one decoder step and generates no text. An
        unfinished chunk is encoded once for all questions. The memory does not change. ``watch``: whether to let users'
        questions go first, and use at most WATCH_FRACTION of the model's time. With ``watch``, the first question is always
        answered; the others are skipped after ROUND_S seconds, or when a user's question waits. Raises the same errors as
        :meth:`ask`, and UserError for choices that start with the same token.
        """
        self._check_open()
        asked = [self._classifier(question, choices) for question, choices in questions]
        return self.model.scheduler.run(self, self._step, self._classify, asked, watch, urgent=not watch, watch=watch)

    def _classifier(self, question: str, choices: Sequence[str]) -> tuple[list[int], OneOf]:
        key = question, tuple(choices)
        if key not in self._known:
            self._check_length(question, self.text_budget.question)
            one_of = OneOf(self.model, choices)
            one_of.check_first_tokens()
            if len(self._known) >= KNOWN_QUESTIONS:
                self._known = {}
            self._known[key] = self._chat.suffix([], question), one_of
        return self._known[key]

    def _classify(self, asked: Sequence[tuple[list[int], OneOf]], watch: bool) -> list[Classified]:
        model, memory, stream = self.model, self._memory, self._stream
        found: list[Classified] = []
        began = time.perf_counter()
        self._append_pieces()
        with stream.question(memory.chunk.encode()):
            for ids, choices in asked:
                if watch and found and (time.perf_counter() - began > ROUND_S or model.scheduler.urgent_waiting):
                    break
                rows = np.concatenate([model.closing, model.engine.embed(np.asarray(ids, np.int64))])
                with stream.taken_out():
                    probabilities = choices.at_once(stream.append_question(rows))
                assert stream.looked is not None
                found.append(Classified(memory.time_s, probabilities, stream.looked))
        memory.asked += 1
        return found

    def on(self, question: str, callback: Callable[[Change], object], every: float = 1.0) -> StandingQuestion:
        """Call ``callback`` with a :class:`~edgevlm.runtime.standing.Change` when the answer changes between yes and no.

        A separate thread asks every ``every`` seconds, as long as frames arrive. The answer is no at first, becomes yes when
        the probability of yes reaches 0.6, and becomes no again below 0.4. To stop asking, call ``cancel()`` of the returned
        object, or close the session. Raises the same errors as :meth:`check`.
        """
        self.check(question, ("yes", "no"))
        standing = StandingQuestion(self, question, callback, every)
        with self._asking:
            self._check_open()
            standing.start()
            self._standing = [*filter(StandingQuestion.is_alive, self._standing), standing]
        return standing

    def memory(self) -> HeldFrames:
        """Return which frames have tokens in the memory. If only changes are appended, the newest frame is not yet included."""
        self._check_open()
        return self.model.scheduler.run(self, self._step, self._held_frames, urgent=True)

    def _held_frames(self) -> HeldFrames:
        stream, tokens = self._stream, Counter[int]()
        for layer in layers_of(stream.cache):
            for head, frames in zip(layer.kind == Kind.VISION, layer.frame, strict=True):
                tokens |= Counter(frames[head].tolist())
        number = np.array(sorted(tokens), np.int64)
        seconds = np.array([stream.times.at(frame) for frame in number.tolist()])
        return HeldFrames(number, seconds, np.array([tokens[frame] for frame in number.tolist()], np.int64))

    def save(self, folder: str | Path) -> None:
        """Write a snapshot of the session to ``folder``; ``Session.open(state=folder)`` continues from it.

        The snapshot replaces older snapshots in ``folder``. Raises UserError if the folder cannot be written or is in use.
        Raises UserError if the policy has a store; open that session with ``state`` instead.
        """
        if self.store is not None:
            raise UserError(f"save: {self.policy} keeps rows in a file; open the session with state= instead")
        self._check_open()
        about = identity(self._stream, self._chat, self.text_budget, self._chunk.encoder)
        SnapshotWriter(folder, begin_again=True).write_once(self, about)

    def forget(self, since: float | None = None, until: float | None = None) -> int:
        """Delete the frames seen from ``since`` to ``until``, in seconds of the stream.

        Returns the number of rows lost in the layer that lost the most. Tokens whose patch was visible in the period leave the
        memory, even if they are older. All conversations are deleted. A new snapshot replaces all earlier snapshots. Later rows
        that attended to deleted rows still reflect the deleted frames. Raises UserError for a period that ends before it begins
        and for a policy that keeps rows in a store. If the new snapshot cannot be written, raises UserError and keeps the old
        snapshots.
        """
        forgotten = self._run(self._forget, _checked_window(since, until))
        if self._writer is not None:
            self._writer.begin_anew()
        return forgotten

    def _forget(self, window: TimeWindow) -> int:
        self._append_chunk()
        memory, stream = self._memory, self._stream
        about, views = memory.capture()
        arrays = {name: array.copy() for name, array in views.items()}
        forgotten = forget(about, arrays, window, stream.policy.needs.keeps_first_frame)
        held = int(stream.cache.lengths.sum())
        with stream.changing():
            memory.restore(about, arrays)
            stream.stats = stream.stats.plus(evicted=held - int(stream.cache.lengths.sum()))
        memory.conversations.turns = {}
        stream.clear_free_rows()
        memory.asked += 1
        return forgotten

    def _capture(self, buffer: CaptureBuffer) -> tuple[dict[str, Any], dict[str, NDArray], float]:
        """Return a snapshot's header, copies of the session's arrays, and how long copying blocked the session, in ms.

        Copying has the same priority as a question. A closed session can still be copied, until its memory is freed.
        """

        def captured() -> tuple[dict[str, Any], dict[str, NDArray], float]:
            self._check_memory()
            started = time.perf_counter()
            about, arrays = self._memory.capture()
            return about, buffer.copy(arrays), 1e3 * (time.perf_counter() - started)

        return self.model.scheduler.run(self, captured, urgent=True)

    @property
    def _version(self) -> tuple[int, int, float]:
        """A value that changes whenever a frame is watched, time is skipped or a question is asked."""
        return self._memory.frames, self._memory.asked, self._memory.time_s

    def _measure(self) -> SessionStats:
        """Compute the session's statistics on the model's thread."""
        memory, stream, encoder = self._memory, self._stream, self._chunk.encoder
        return SessionStats(
            frames=memory.frames,
            chunks=memory.chunks,
            fps=memory.fps,
            tokens=stream.tokens,
            cache_bytes=stream.cache.nbytes,
            policy_bytes=bytes_of(stream.policy),
            present_bytes=stream.present_bytes,
            encode_ms=memory.chunk.encode_ms,
            encoded=1.0 if encoder is None else encoder.encoded,
            tower_bytes=bytes_of(encoder),
            ttft_ms=self._ttft_ms,
            tpot_ms=self._tpot_ms,
            memory=stream.stats,
            store=stream.store_use(),
        )

    @property
    def stats(self) -> SessionStats:
        """The session's statistics after its last call, as an immutable object."""
        writer = self._writer
        if writer is None:
            return self._stats
        return replace(self._stats, state_bytes=writer.buffer.nbytes, snapshots=writer.written, held_ms=writer.longest_ms)

    @property
    def _stream(self) -> Stream:
        return self._memory.stream

    @property
    def _chunk(self) -> Chunk:
        return self._memory.chunk

    @property
    def max_question_tokens(self) -> int:
        """The maximum length of a question in tokens, including its earlier turns if ``text_budget.most`` is set."""
        return longest_question(self.text_budget, self._stream.spare_positions)

    @property
    def chat(self) -> Chat:
        """The renderer of the session's prompts."""
        return self._chat

    @property
    def cache(self) -> KVCache:
        """The session's KV cache."""
        return self._memory.stream.cache

    @property
    def store(self) -> Store | None:
        """The retrieval policy's store, or None."""
        return self._memory.stream.store

    @property
    def waiting(self) -> int:
        """The number of watched frames that are not yet in the memory because their chunk is not full."""
        return self._chunk.waiting

    @property
    def basis(self) -> str:
        """The reason why ``auto`` chose the policy, and whether the policy is calibrated or uses presets; may be empty."""
        basis = getattr(self._stream.policy, "basis", "")
        return "; ".join(filter(None, [self._memory.why, basis and f"{self.policy}: {basis}"]))

    @property
    def policy(self) -> str:
        """The name of the policy in use, which ``auto`` may have chosen."""
        return self._stream.policy.name

    @property
    def chunk(self) -> int:
        """The number of frames encoded and appended at once."""
        return self._stream.chunk

    @property
    def budget(self) -> int:
        """The maximum number of vision tokens that each layer keeps."""
        return self._stream.budget

    @property
    def is_torn(self) -> bool:
        """Return whether an error has left the memory half changed, so that the session must be opened again."""
        return self._stream.torn

    @property
    def time_s(self) -> float:
        """The stream's time at the newest frame."""
        return self._memory.time_s

    def cancel(self) -> list[Answer]:
        """Cancel the running answer and all waiting questions, from any thread, without waiting for their end."""
        self.model.scheduler.check_process()
        with self._asking:
            answers = [answer for answer in self._answers if not answer.finished]
        for answer in answers:
            answer.cancel()
        return answers

    def close(self) -> None:
        """Cancel running answers, write the last snapshot, and close the model if this session loaded it.

        A closed session keeps its :attr:`stats`. Closing a session again, or in a forked process, does nothing.
        """
        if self.model.scheduler.is_forked:
            return
        with self._asking:
            already, self._closed = self._closed, True
        if already:
            return
        for standing in self._standing:
            standing.cancel()
        for answer in self.cancel():
            answer.settle()
        if self._writer is not None:
            self._writer.close()
        try:
            self.model.scheduler.run(self, self._stream.close, urgent=True)
        except UserError:  # the model is already closed and its thread has ended
            self._stream.close()
        if self._owned is not None:
            self._owned.close()

    def __repr__(self) -> str:
        name, tokens = self.model.name, self._stats.tokens
        if self._closed:
            return f"Session({name}, closed)"
        memory = self._memory
        held = f"{tokens} of {self.budget} tokens, {memory.frames} frames, {memory.time_s:.1f} s"
        return f"Session({name}, {self.policy}, {held})"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked_window(since: float | None, until: float | None) -> TimeWindow:
    for each in (since, until):
        if each is not None:
            check_time(each)
    window = TimeWindow(-math.inf if since is None else since, math.inf if until is None else until)
    if window.until < window.since:
        raise UserError(f"until {until:g} s is before since {since:g} s")
    return window


def _checked_size(size: object) -> tuple[int, int]:
    if not (isinstance(size, tuple) and len(size) == 2 and all(isinstance(side, int | np.integer) for side in size)):
        raise UserError(f"frame_size must be (height, width) in pixels, not {size!r}")
    return int(size[0]), int(size[1])


def _close_opened(opening: Future[Session]) -> None:
    """Free a session whose opening was interrupted. Runs on the model's thread."""
    if opening.exception() is None:
        opening.result()._stream.close()
