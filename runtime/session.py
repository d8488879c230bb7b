"""A session: watch frames, ask questions, from one thread or several."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.answer import Answer, FinishReason, Request, generate
from edgevlm.runtime.auto import AUTO, FALLBACK
from edgevlm.runtime.budget import TextRoom
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.chat import Chat, Conversations
from edgevlm.runtime.chunk import Chunk
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.model import Model
from edgevlm.runtime.opening import check_settings, check_store, check_whole, open_stream
from edgevlm.runtime.policies import Policy, create_policy
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.preprocess import Pixels, Preprocessor
from edgevlm.runtime.pressure import Pressure
from edgevlm.runtime.sampling import Sampler
from edgevlm.runtime.snapshots.copies import Copies
from edgevlm.runtime.snapshots.image import identity, image_of, put_back
from edgevlm.runtime.snapshots.keeper import Keeper
from edgevlm.runtime.stats import Progress, SessionStats
from edgevlm.runtime.store import Store, StoreSettings
from edgevlm.runtime.stream import Stream

T = TypeVar("T")


class Session:
    """One stream within a fixed memory budget.

    All methods may be called from any thread; the work is done by the model's own (``model.scheduler``), questions first. A
    question is answered at the next chunk boundary at the latest: it sees every frame watched before it was asked and none
    after, because ``watch`` waits while a question is open. The memory goes on as if it had not been asked, in the middle of a
    chunk too.
    """

    def __init__(self, model: Model, stream: Stream, chat: Chat, room: TextRoom, auto: str = "") -> None:
        self.model, self.room = model, room
        self._auto = auto  # why ``auto`` is this policy
        self._stream, self._chat = stream, chat
        self._preprocess = Preprocessor(model.bundle.vision)
        self._chunk = Chunk(model.engine, model.bundle.vision, stream.chunk)
        self._conversations = Conversations(chat, model.encode, room.conversation)
        self._asking = threading.Lock()  # over the two that follow
        self._answers: list[Answer] = []  # those not finished are among them
        self._closed = False
        self._owns_model = False
        self._progress = Progress()
        self._ttft_ms = self._tpot_ms = 0.0
        self.notify: Callable[[str], object] = logging.getLogger("edgevlm").warning
        self._pressure = Pressure(stream.chunk, lambda line: self.notify(line), group=model.bundle.vision.group)
        self._keeper: Keeper | None = None
        if stream.store is not None:
            stream.store.notify = lambda line: self.notify(line)
        self._stats = self._measure()

    @classmethod
    def open(
        cls,
        model: Model | str | Path = "demo",
        *,
        policy: str | Policy = AUTO,
        budget: int | None = None,
        chunk: int = 8,
        reindexing: Reindexing = "lazy",
        system: str | None = None,
        room: TextRoom | None = None,
        state: Keeper | str | Path | None = None,
        store: StoreSettings | None = None,
        engine: str = DEFAULT_ENGINE,
    ) -> Session:
        """Allocate the memory of one stream and append the prefix.

        model: ``demo``, a bundle's directory, or a loaded model, which is not closed with the session. policy: ``name`` or
        ``name:setting=value,...`` of the registry, ``auto`` for the one that was found best on this model, or a policy of your
        own, for this session alone. budget: vision tokens per
        layer (|M|), see :func:`default_budget`; for ``full`` the declared capacity. chunk: frames encoded and appended at once.
        reindexing: when kept positions are made dense, ``lazy`` or ``eager``. system: the system prompt, else the chat
        template's own. room: tokens for conversation, question and answer. state: a folder to keep snapshots of the session in
        and to go on from, or the Keeper of one, which is closed with the session (docs/state.md). store: how much a policy that
        retrieves may keep below the device, in host memory and in one file, which lies in that folder or is a temporary one
        (docs/store.md). engine: the backend that loads a model given by name, see ``edgevlm.runtime.plugins``.

        Raises BundleError for a model that cannot be loaded; UserError for a policy, setting or prompt that is not one, for
        a budget or chunk that is less than a frame, passes the model's positions or does not fit in the free memory, for a
        state that is of another session, in use, or cannot be written, and for a store with a policy that retrieves nothing.
        """
        check_settings(budget, chunk, reindexing)
        chosen = policy if isinstance(policy, Policy) else create_policy(FALLBACK if policy == AUTO else policy)
        if policy != AUTO:
            check_store(chosen, store)
        keeper = Keeper(state) if isinstance(state, str | Path) else state
        loaded: Model | str | Path = model
        opening: Future[Session] | None = None
        try:
            loaded = model if isinstance(model, Model) else Model.load(model, engine=engine)
            room = room or TextRoom.fitting(loaded.bundle.limit)
            chat = Chat(loaded.bundle.chat, system)
            opening = loaded.scheduler.submit(
                None, cls._opened, loaded, chosen, budget, chunk, reindexing, chat, room, policy == AUTO, keeper, store,
                urgent=True,
            )  # fmt: skip
            session = opening.result()
            if keeper is not None:
                keeper.start()
        except BaseException:
            if opening is not None and not opening.cancel():  # an interrupt meanwhile: what it opens is closed again
                opening.add_done_callback(lambda done: done.exception() or done.result()._stream.close())
            if keeper is not None:
                keeper.close()
            if isinstance(loaded, Model) and loaded is not model:
                loaded.close()
            raise
        session._owns_model = loaded is not model
        return session

    def prepare(self, frame: NDArray[np.uint8]) -> Pixels:
        """What :meth:`watch` does first with a frame, uint8 RGB ``[H, W, 3]``: resize and normalise it. From any thread.

        Raises UserError for what is not such a frame.
        """
        return Pixels(self._preprocess(frame))

    def watch(self, frame: NDArray[np.uint8] | Pixels, timestamp: float | None = None) -> None:
        """Take in one frame, uint8 RGB ``[H, W, 3]``, seen at ``timestamp`` seconds of the stream (its number, if not given).

        A frame may have been through :meth:`prepare`, in another thread. Every ``chunk`` frames are encoded and appended. Waits
        while a question is being answered. Raises UserError for what is not such a frame, when the capacity of a policy that
        never compresses is used up, and after :meth:`close`.
        """
        pixels = frame.values if isinstance(frame, Pixels) else self._preprocess(frame)
        if pixels.shape != (3, *self.model.bundle.vision.size):
            raise UserError(f"pixels {list(pixels.shape)} were prepared for another model; use this session's prepare()")
        self._run(self._watch, pixels, timestamp)

    def skip(self, timestamp: float) -> None:
        """A frame at ``timestamp`` seconds need not be watched: the stream's time goes on, and nothing else.

        Waits while a question is being answered. Raises UserError after :meth:`close`.
        """
        self._run(self._skip, timestamp)

    def flush(self) -> None:
        """Append the frames of a chunk not yet full. Raises UserError as :meth:`watch` does."""
        self._run(self._flush)

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` on the model's thread, in turn, and wait for it; publishes what the session has done by then."""
        self._check_open()
        return self.model.scheduler.run(self, self._published, work, *arguments)

    def _published(self, work: Callable[..., T], *arguments: Any) -> T:
        self._check_open()
        chunks = self._progress.chunks
        try:
            return work(*arguments)
        finally:
            progress = self._progress
            changed = progress.chunks != chunks or work not in (self._watch, self._skip)
            self._stats = self._measure() if changed else replace(self._stats, frames=progress.frames, fps=progress.fps)

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("the session is closed; open another one")

    def _watch(self, pixels: NDArray[np.float32], timestamp: float | None) -> None:
        if not self._chunk.taken:
            self._chunk.limit = self._pressure.look()
            self.model.engine.spare(self._pressure.short)
        self._progress.watched(timestamp)
        self._chunk.add(pixels, self._progress.time_s)
        if not self._chunk.missing:
            self._flush()

    def _skip(self, timestamp: float) -> None:
        self._progress.time_s = timestamp

    def check(self, question: str) -> None:
        """Raise UserError if ``question`` is longer than its room, holds what stands for the video, or is not Unicode."""
        asked = self.model.encode(self._chat.suffix([], question))
        if self.model.bundle.chat.placeholder_id in asked:
            raise UserError("a question cannot hold the token that stands for the video; leave it out")
        if len(asked) > self.room.question:
            raise UserError(
                f"this question takes {len(asked)} tokens and {self.room.question} are set aside for one; shorten it"
            )

    def ask(
        self,
        question: str,
        conversation: str | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Answer:
        """Ask about everything watched so far; returns at once, iterate the answer for its text.

        The memory afterwards is what it was before, but under a policy that compresses under questions (``snapkv-guided``).
        ``conversation`` names the turns to go on from and to add this one to. max_tokens: of the answer, at most (and unless
        given) its room. Greedy unless ``temperature`` > 0; then top_p keeps the smallest set of tokens whose probability
        reaches it, and seed, 0 or more, fixes the draws.

        Raises UserError for a question that is longer than its room or holds what stands for the video, for sampling settings
        out of range, and after :meth:`close`.
        """
        check_whole(max_tokens=max_tokens, seed=seed)
        if max_tokens is not None and not 1 <= max_tokens <= self.room.answer:
            raise UserError(f"an answer can have 1 to {self.room.answer} tokens here, not {max_tokens}")
        try:
            sampler = Sampler(temperature, top_p, seed)
        except ValueError as error:
            raise UserError(str(error)) from None
        self.check(question)
        answer = Answer(question, self._progress.time_s)
        request = Request(answer, time.perf_counter(), conversation, max_tokens or self.room.answer, sampler)
        with self._asking:
            self._check_open()
            answer._follow(self.model.scheduler.submit(self, self._published, self._answer, request, urgent=True))
            self._answers = [*(each for each in self._answers if not each.finished), answer]
        return answer

    def _answer(self, request: Request) -> FinishReason:
        """A turn that was not cancelled is remembered."""
        answer, policy = request.answer, self._stream.policy
        try:
            answer.time_s = self._progress.time_s
            self._append(to_the_end=bool(policy.needs.question_layers))
            ids = self._conversations.prompt(request.conversation, answer.question)
            reason = generate(request, ids, self.model, self._stream, self._chunk)
            self._ttft_ms, self._tpot_ms = answer.ttft_ms, answer.tpot_ms
            if reason != "cancelled":
                policy.answered(answer.question, answer.so_far)
                if request.conversation is not None:
                    self._conversations.add(request.conversation, (answer.question, answer.so_far))
            return reason
        finally:
            self._progress.asked += 1

    def _append(self, *, to_the_end: bool) -> None:
        """Append what the chunk holds: all, or the pieces that are complete, which go in as they would at the chunk's end."""
        if not self._chunk.taken:
            return
        try:
            whole, coming = not to_the_end, 0 if to_the_end else self._chunk.coming(whole=True)
            features, seconds = self._chunk.features(whole=whole), self._chunk.seconds(whole=whole)
            self._chunk.appended(self._stream.append_frames(features, coming, seconds))
        except BaseException:
            self._chunk.clear()
            raise

    def _flush(self) -> None:
        if self._chunk.taken:
            self._append(to_the_end=True)
            self._chunk.clear()
            self._progress.chunks += 1

    @property
    def stats(self) -> SessionStats:
        """What the session had done by the end of its newest work; a value that does not change afterwards."""
        keeper = self._keeper
        if keeper is None:
            return self._stats
        return replace(self._stats, state_bytes=keeper.copies.nbytes, snapshots=keeper.written, held_ms=keeper.longest_ms)

    def _measure(self) -> SessionStats:
        """On the model's thread."""
        stream, progress = self._stream, self._progress
        return SessionStats(
            frames=progress.frames,
            chunks=progress.chunks,
            fps=progress.fps,
            tokens=stream.tokens,
            cache_bytes=stream.cache.nbytes,
            policy_bytes=stream.policy.state_bytes,
            encode_ms=self._chunk.encode_ms,
            ttft_ms=self._ttft_ms,
            tpot_ms=self._tpot_ms,
            memory=stream.stats,
            store=stream.store_use(),
        )

    @classmethod
    def _opened(
        cls, model: Model, policy: Policy, budget: int | None, chunk: int, reindexing: Reindexing, chat: Chat, room: TextRoom,
        auto: bool, keeper: Keeper | None, store: StoreSettings | None,
    ) -> Session:  # fmt: skip
        """On the model's thread: a session at its start, or where the newest snapshot was taken."""
        stream, why = open_stream(model, policy, budget, chunk, reindexing, chat, room, auto=auto, keeper=keeper, store=store)
        try:
            session = cls(model, stream, chat, room, why)
            if keeper is not None:
                snapshot = keeper.attach(session, identity(stream, chat, room), stream.copy_bytes)
                if snapshot is not None:
                    put_back(snapshot, stream, session._chunk, session._conversations, session._progress)
                session._keeper, session._stats = keeper, session._measure()
            return session
        except BaseException:
            stream.close()
            raise

    def image(self, copies: Copies) -> tuple[dict[str, Any], dict[str, NDArray], float]:
        """Where the session stands, copies of all it holds, and for how many ms they kept it waiting.

        Takes its turn like a question: the next one. A closed session can still do it, until its memory is let go of.
        """
        return self.model.scheduler.run(self, self._image, copies, urgent=True)

    def _image(self, copies: Copies) -> tuple[dict[str, Any], dict[str, NDArray], float]:
        started = time.perf_counter()
        about, arrays = image_of(self._stream, self._chunk, self._conversations, self._progress)
        return about, copies.of(arrays), 1e3 * (time.perf_counter() - started)

    def sync(self) -> None:
        """See onto the disk what lies below the device: what a snapshot of before names outlives a power cut then."""
        if self._stream.store is not None:
            self._stream.store.sync()

    @property
    def version(self) -> tuple[int, int, float]:
        """Something else whenever a frame, one that was passed by too, or a question has changed the session."""
        return self._progress.frames, self._progress.asked, self._progress.time_s

    @property
    def basis(self) -> str:
        """What the policy runs on, one line: why it is this one, under ``auto``, and whether it is calibrated or on presets.

        Empty: neither.
        """
        basis = self._stream.policy.basis
        return "; ".join(filter(None, [self._auto, basis and f"{self.policy}: {basis}"]))

    @property
    def policy(self) -> str:
        """The name of the policy in use, also where ``auto`` was asked for."""
        return self._stream.policy.name

    @property
    def chunk(self) -> int:
        """Frames encoded and appended at once."""
        return self._stream.chunk

    @property
    def budget(self) -> int:
        """Vision tokens that each layer keeps at most."""
        return self._stream.budget

    @property
    def cache(self) -> KVCache:
        """What the session holds, to look at between calls of ``watch``; a question in progress stands in it too."""
        return self._stream.cache

    @property
    def store(self) -> Store | None:
        """Where a retrieval policy keeps what has left the device; None for other policies."""
        return self._stream.store

    @property
    def time_s(self) -> float:
        """The stream's time at the newest frame."""
        return self._progress.time_s

    def cancel(self) -> list[Answer]:
        """Cancel what is being answered and all questions that wait; from any thread. Waits for none of them."""
        with self._asking:
            answers = [answer for answer in self._answers if not answer.finished]
        for answer in answers:
            answer.cancel()
        return answers

    def close(self) -> None:
        """Cancel what is being answered and wait for it, write the last snapshot, close a model that this session loaded.

        A closed session still has its :attr:`stats`; closing it again does nothing.
        """
        with self._asking:
            already, self._closed = self._closed, True
        if already:
            return
        for answer in self.cancel():
            answer.settle()
        if self._keeper is not None:
            self._keeper.close()
        try:
            self.model.scheduler.run(self, self._stream.close, urgent=True)
        except UserError:  # the model was closed before, and its thread has ended
            self._stream.close()
        if self._owns_model:
            self.model.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
