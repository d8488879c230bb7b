"""One policy sits one exam: it watches the stream under a budget, then answers; what it kept is compared with the evidence."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.accuracy.streamqa import Exam, Question
from edgevlm.calib.footprint import Footprint
from edgevlm.runtime.budget import TextRoom
from edgevlm.runtime.cache import KVCache
from edgevlm.runtime.engine import Engine, Float32
from edgevlm.runtime.kinds import Kind
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.session import Session

CHUNK = 8  # frames encoded and appended at once, as a session does by default
ROOM = TextRoom(80, 80, 80)  # more than what is asked and answered here takes, and no position that a stream needs


class SharedFeatures:
    """An engine but for this: each chunk of a stream is encoded once, for all the sessions that watch it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[bytes, Float32] = {}

    def encode(self, pixels: Float32) -> Float32:
        key = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
        if key not in self._known:
            self._known[key] = self._engine.encode(pixels)
        return self._known[key]

    def forget(self) -> None:
        """Another stream begins."""
        self._known.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True, slots=True)
class Result:
    """One question. quarter: of the stream, in which its evidence was last seen, 1 the oldest; gap: how many frames ago.

    moved: bytes that retrieval brought up for it.

    held: share of the evidence tokens still in the memory; any: whether one of them is, 0 or 1; both averaged over layers and
    KV heads, None without evidence.
    """

    kind: str
    text: str
    answer: str
    right: bool
    quarter: int | None
    held: float | None
    any: float | None
    ttft_ms: float
    gap: int | None = None
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Sitting:
    """``kept``: per token of the stream the share of layers and KV heads that hold it. bytes: of cache and policy at most."""

    results: list[Result]
    kept: NDArray[np.float64]
    tokens: int
    bytes: int
    compressions: int
    compress_ms: float

    def record(self, with_kept: bool) -> dict[str, Any]:
        """What the journal keeps; ``kept`` in hundredths, if at all."""
        fields = {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "compressions": self.compressions,
            "compress_ms": round(self.compress_ms, 3),
            "results": [_rounded(asdict(result)) for result in self.results],
        }
        return fields | {"kept": np.rint(100 * self.kept).astype(int).tolist()} if with_kept else fields


def sit(model: Model, exam: Exam, policy: Policy, tokens: int, reindexing: Reindexing = "lazy", chunk: int = CHUNK) -> Sitting:
    """Watch, then ask everything. Raises UserError when ``tokens`` is no budget for this policy."""
    with Session.open(model, policy=policy, budget=tokens, reindexing=reindexing, chunk=chunk, room=ROOM) as session:
        footprint = watch(session, policy, exam)
        held = held_tokens(session.cache, exam.owners.size)
        memory = session.stats.memory
        compress_ms = memory.compress_ms + memory.guidance_ms + memory.reindex_ms
        results = [ask(session, exam, question, held) for question in exam.questions]
    return Sitting(results, held.mean((0, 1)), tokens, footprint.peak, memory.compressions, compress_ms)


def watch(session: Session, policy: Policy, exam: Exam) -> Footprint:
    """The whole stream; what cache and policy take is measured after each chunk."""
    footprint = Footprint()
    for number, frame in enumerate(exam.frames):
        session.watch(frame)
        if (number + 1) % session.chunk == 0:
            footprint.measure(session.cache, policy)
    session.flush()
    footprint.measure(session.cache, policy)
    return footprint


def held_tokens(cache: KVCache, tokens: int) -> NDArray[np.bool_]:
    """Which tokens of the stream each layer and KV head holds: bool ``[layers, kv_heads, tokens]``."""
    held = np.zeros((cache.layers, cache.kv_heads, tokens), np.bool_)
    for layer in range(cache.layers):
        vision, seq = cache.kind(layer) == Kind.VISION, cache.seq(layer)
        first = int((cache.kind(layer)[0] == Kind.PREFIX).sum())
        for head in range(cache.kv_heads):
            held[layer, head, seq[head, vision[head]] - first] = True
    return held


def ask(session: Session, exam: Exam, question: Question, held: NDArray[np.bool_]) -> Result:
    before = moved_bytes(session)
    answer = session.ask(question.text)
    right = answer.text.strip() == question.answer
    share, some = overlap(held, question.evidence)
    quarter = exam.quarter(question)
    said, gap, moved = answer.text.strip(), exam.gap(question), moved_bytes(session) - before
    return Result(question.kind, question.text, said, right, quarter, share, some, answer.ttft_ms, gap, moved)


def moved_bytes(session: Session) -> int:
    """Bytes that retrieval has brought up from host memory and disk until now; 0 for policies that do not retrieve."""
    store = session.store
    return store.stats.bytes_host + store.stats.bytes_disk if store is not None else 0


def overlap(held: NDArray[np.bool_], evidence: NDArray[np.int64]) -> tuple[float | None, float | None]:
    """Share of ``evidence`` held, and whether any of it is, each the mean over layers and KV heads; None without evidence."""
    if not len(evidence):
        return None, None
    there = held[:, :, evidence]
    return float(there.mean()), float(there.any(2).mean())


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()}
