"""A session: watch frames, ask questions, from one thread or several."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from edgevlm.errors import UserError
from edgevlm.runtime.answer import Answer, FinishReason
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.chat import Chat, Turn
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy, create_policy
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.sampling import Sampler
from edgevlm.runtime.stream import MemoryStats, Stream
from edgevlm.runtime.turnstile import Turnstile

MAX_CONVERSATIONS = 64
DEFAULT_BUDGET = 6000  # vision tokens per layer


@dataclass(frozen=True, slots=True)
class TextRoom:
    """Tokens set aside at start for each part of a question's turn; the sum with the closing rows is the text room."""

    conversation: int
    question: int
    answer: int

    @classmethod
    def fitting(cls, position_limit: int) -> TextRoom:
        """256 tokens each, or a sixteenth of a small model's positions."""
        part = min(256, position_limit // 16)
        return cls(part, part, part)


@dataclass(frozen=True, slots=True)
class SessionStats:
    """What a session has done so far.

    frames watched, and fps since the first of them; tokens of memory held in the fullest layer; cache_bytes allocated once at
    start, policy_bytes that the policy now keeps beside them; ttft_ms (from ask to the first token) and tpot_ms (each further
    one) of the newest answer.
    """

    frames: int
    chunks: int
    fps: float
    tokens: int
    cache_bytes: int
    policy_bytes: int
    encode_ms: float
    ttft_ms: float
    tpot_ms: float
    memory: MemoryStats


def text_room(model: Model, room: TextRoom) -> int:
    """Rows beside the memory that a question may take: conversation, question, closing rows and answer."""
    return room.conversation + room.question + room.answer + len(model.closing)


def default_budget(model: Model, policy: Policy, most: int) -> int:
    """Half of the model's positions, DEFAULT_BUDGET tokens at most, in whole frames; all that fits (``most``) for full."""
    per_frame = model.bundle.vision.tokens_per_frame
    budget = min(DEFAULT_BUDGET, model.bundle.limit // 2, most) if policy.bounded else most
    return max(budget // per_frame, 1) * per_frame


class Session:
    """One stream within a fixed memory budget.

    ``watch`` belongs to one thread; ``ask`` may come from any. A question is answered at the next chunk boundary at the latest:
    it sees every frame watched before it was asked and none after, because ``watch`` waits while a question is open.
    """

    def __init__(self, model: Model, stream: Stream, chat: Chat, chunk: int, room: TextRoom) -> None:
        self.model, self.room, self.chunk = model, room, chunk
        self._stream, self._chat = stream, chat
        self._preprocess = Preprocessor(model.bundle.vision)
        self._pending = np.empty((chunk, 3, *model.bundle.vision.size), np.float32)
        self._held_back = 0  # frames in _pending
        self._turnstile = Turnstile()
        self._conversations: dict[str, list[Turn]] = {}
        self._running: set[Answer] = set()
        self._owns_model = False
        self._frames = self._chunks = 0
        self._encode_ms = self._ttft_ms = self._tpot_ms = 0.0
        self._started: float | None = None  # when the first frame came
        self._time_s = 0.0

    @classmethod
    def open(
        cls,
        model: Model | str | Path = "demo",
        *,
        policy: str | Policy = "infinipot-v",
        budget: int | None = None,
        chunk: int = 8,
        reindexing: Reindexing = "lazy",
        system: str | None = None,
        room: TextRoom | None = None,
    ) -> Session:
        """Allocate the memory of one stream and append the prefix.

        policy: ``name`` or ``name:setting=value,...`` of the registry, or a policy of your own, for this session alone.
        budget: vision tokens per layer (|M|), see :func:`default_budget`; for ``full`` the declared capacity. chunk: frames
        encoded and appended at once.
        Raises UserError when the budget is less than a frame or passes the model's positions.
        """
        if chunk < 1:
            raise UserError(f"a chunk of {chunk} frames is too small; give 1 or more")
        loaded = model if isinstance(model, Model) else Model.load(model)
        room = room or TextRoom.fitting(loaded.bundle.limit)
        chat = Chat(loaded.bundle.chat, system)
        prefix = loaded.encode(chat.prefix)
        chosen = policy if isinstance(policy, Policy) else create_policy(policy)
        if budget is None:
            ahead = chunk * loaded.bundle.vision.tokens_per_frame * chosen.appends_first
            budget = default_budget(loaded, chosen, loaded.bundle.limit - len(prefix) - text_room(loaded, room) - ahead)
        stream = Stream(loaded, chosen, budget, prefix, text_room(loaded, room), reindexing, chunk)
        session = cls(loaded, stream, chat, chunk, room)
        session._owns_model = loaded is not model
        return session

    def watch(self, frame: NDArray[np.uint8], time_s: float | None = None) -> None:
        """Take in one frame, uint8 RGB ``[H, W, 3]``, seen at ``time_s`` seconds of the stream.

        Every ``chunk`` frames are encoded and appended. Waits while a question is being answered.
        """
        pixels = self._preprocess(frame)
        with self._turnstile.watcher():
            self._pending[self._held_back] = pixels
            self._held_back += 1
            self._frames += 1
            self._started = self._started or time.perf_counter()
            self._time_s = float(self._frames) if time_s is None else time_s
            if self._held_back == self.chunk:
                self._flush()

    def flush(self) -> None:
        """Append the frames of a chunk not yet full."""
        with self._turnstile.watcher():
            self._flush()

    def ask(
        self,
        question: str,
        *,
        conversation: str | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Answer:
        """Ask about everything watched so far; returns at once, iterate the answer for its text.

        The memory afterwards is what it was before, but under a policy that compresses under questions (``snapkv-guided``).
        ``conversation`` names the turns to go on from and to add this one to. Greedy unless ``temperature`` > 0. Raises
        UserError for a question longer than its room.
        """
        if max_tokens is not None and not 1 <= max_tokens <= self.room.answer:
            raise UserError(f"an answer can have 1 to {self.room.answer} tokens here, not {max_tokens}")
        try:
            sampler = Sampler(temperature, top_p, seed)
        except ValueError as error:
            raise UserError(str(error)) from None
        asked = len(self.model.encode(self._chat.suffix([], question)))
        if asked > self.room.question:
            raise UserError(f"this question takes {asked} tokens and {self.room.question} are set aside for one; shorten it")
        answer = Answer(question, self._time_s)
        ticket = self._turnstile.queue()
        thread = threading.Thread(
            target=self._answer,
            args=(answer, ticket, time.perf_counter(), conversation, max_tokens or self.room.answer, sampler),
            name="edgevlm-answer",
            daemon=True,
        )
        self._running.add(answer)
        thread.start()
        return answer

    def _answer(
        self, answer: Answer, ticket: object, asked: float, conversation: str | None, max_tokens: int, sampler: Sampler
    ) -> None:
        error: BaseException | None = None
        reason: FinishReason | None = None
        with self._turnstile.question(ticket):
            try:
                self._flush()
                answer.time_s = self._time_s
                reason = self._generate(answer, asked, conversation, max_tokens, sampler)
                self._ttft_ms, self._tpot_ms = answer.ttft_ms, answer.tpot_ms
                if reason != "cancelled":
                    self._stream.policy.answered(answer.question, answer.so_far)
                    if conversation is not None:
                        self._remember(conversation, (answer.question, answer.so_far))
            except BaseException as caught:
                error = caught
        self._running.discard(answer)
        answer.finish(reason, error)

    def _generate(
        self, answer: Answer, asked: float, conversation: str | None, max_tokens: int, sampler: Sampler
    ) -> FinishReason:
        engine, stops = self.model.engine, self.model.bundle.chat.stop_ids
        detokenise = DecodeStream(skip_special_tokens=True)
        ids = self._prompt(conversation, answer.question)
        embeds = np.concatenate([self.model.closing, engine.embed(np.asarray(ids, np.int64))])
        with self._stream.question():
            append = self._stream.append_question
            while True:
                if answer.cancelled:
                    return "cancelled"
                token = sampler(append(embeds))
                now = time.perf_counter()
                if not answer.token_ids:
                    answer.ttft_ms, first = 1e3 * (now - asked), now
                if token in stops:
                    return "stop"
                answer.token_ids.append(token)
                if len(answer.token_ids) > 1:
                    answer.tpot_ms = 1e3 * (now - first) / (len(answer.token_ids) - 1)
                if piece := detokenise.step(self.model.tokenizer, token):
                    answer.push(piece)
                if len(answer.token_ids) == max_tokens:
                    return "length"
                embeds, append = engine.embed(np.asarray([token], np.int64)), self._stream.append_text

    def _prompt(self, conversation: str | None, question: str) -> list[int]:
        """Suffix ids, with as many of the newest turns as the conversation's room takes; older ones are forgotten."""
        turns = self._conversations.get(conversation, []) if conversation is not None else []
        alone = len(self.model.encode(self._chat.suffix([], question)))
        while True:
            ids = self.model.encode(self._chat.suffix(turns, question))
            if len(ids) - alone <= self.room.conversation or not turns:
                return ids
            del turns[0]

    def _remember(self, conversation: str, turn: Turn) -> None:
        """Add a turn; the conversation unused for longest is forgotten when there are too many."""
        turns = self._conversations.pop(conversation, [])
        self._conversations[conversation] = [*turns, turn]
        if len(self._conversations) > MAX_CONVERSATIONS:
            del self._conversations[next(iter(self._conversations))]

    def _flush(self) -> None:
        if self._held_back == 0:
            return
        count, self._held_back = self._held_back, 0
        started = time.perf_counter()
        features = self.model.engine.encode(self._pending[:count])
        self._encode_ms += 1e3 * (time.perf_counter() - started)
        self._stream.append_frames(features)
        self._chunks += 1

    @property
    def stats(self) -> SessionStats:
        stream = self._stream
        elapsed = time.perf_counter() - self._started if self._started else 0.0
        return SessionStats(
            frames=self._frames,
            chunks=self._chunks,
            fps=self._frames / elapsed if elapsed else 0.0,
            tokens=stream.tokens,
            cache_bytes=stream.cache.nbytes,
            policy_bytes=stream.policy.state_bytes,
            encode_ms=self._encode_ms,
            ttft_ms=self._ttft_ms,
            tpot_ms=self._tpot_ms,
            memory=stream.stats,
        )

    @property
    def basis(self) -> str:
        """Whether the policy runs on what was measured of the model or on presets, one line; empty: neither."""
        basis = self._stream.policy.basis
        return basis and f"{self._stream.policy.name}: {basis}"

    @property
    def cache(self) -> KVCache:
        """What the session holds, to look at between calls of ``watch``; a question in progress stands in it too."""
        return self._stream.cache

    @property
    def time_s(self) -> float:
        """The stream's time at the newest frame."""
        return self._time_s

    def close(self) -> None:
        """Cancel what is being answered and wait for it; a model that this session loaded is closed with it."""
        for answer in list(self._running):
            answer.cancel()
            answer.settle()
        if self._owns_model:
            self.model.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
