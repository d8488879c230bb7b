"""A worker has one model watch the cases one by one under each run's policy; several work side by side in a pool."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.accuracy.cases import (
    LONGSTREAM,
    SUITES,
    Case,
    CaseQuestion,
    EvidenceScore,
    make_case,
    score_evidence,
    seed_words,
)
from edgevlm.calib.accuracy.journal import Record
from edgevlm.calib.accuracy.memory_accounting import PeakBytes, bytes_per_token, peak_bytes
from edgevlm.calib.accuracy.oracle import make_oracle
from edgevlm.calib.accuracy.pools import Pool
from edgevlm.calib.accuracy.text_facts import FACTS_TEXT_BUDGET, KINDS, TEXT_FACTS, make_text_case, text_model
from edgevlm.calib.accuracy.variants import FULL, ORACLE, PLAIN, Budget, SkippedRun, Variant, VariantRun, equal_byte_runs
from edgevlm.calib.demo.questions import OFFERED
from edgevlm.errors import UserError
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.bundle import MANIFEST, hash_file
from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.engine import Engine, Float32
from edgevlm.runtime.model import Model
from edgevlm.runtime.opening import AUTO, chosen_policy
from edgevlm.runtime.policies import Policy, create_policy
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL

CHUNK = 8  # frames encoded and appended at once, as a session does by default
TEXT_BUDGET = TextBudget(80, 80, 80)  # more than what is asked and answered here takes, and no position that a stream needs
MEASURED = 256  # frames of a long stream in which a policy's bytes are measured: all of its arrays are there by then
MEASURED_TEXT = 16  # likewise, of a stream of text, whose budget is a few frames
GUIDED = "snapkv-guided"  # holds whole streams and compresses them under a question: what that does to the questions after it
CEILING = VariantRun(f"{ORACLE}/spread+frame", "ceiling", 1024)
"""What stands in for full KV where a stream is too long for it: the evidence is kept, and half of the positions are free."""


@dataclass(frozen=True, slots=True)
class AccuracySettings:
    """What results depend on beside policy, budget and stream. seed: a number, or ``test``; turns: 0 for one question each."""

    model: str = "demo"
    frames: int = 64
    seed: str = "0"
    turns: int = 0
    suite: str = "streamqa"


@dataclass(frozen=True, slots=True)
class CaseTask:
    run: VariantRun
    stream: int


@dataclass(frozen=True, slots=True)
class QuestionResult:
    """One answer. quarter: of the stream, in which its evidence was last seen, 1 the oldest; gap: how many frames ago.

    held: fraction of the evidence tokens still in the memory; any: whether one of them is, 0 or 1; both averaged over layers
    and KV heads, None without evidence. moved: bytes that retrieval brought up for it. seen: what the answer's own
    evidence is worth, None without a truth.
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
    seen: EvidenceScore | None = None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """``kept``: per token of the stream the fraction of layers and KV heads that hold it. tokens: |M|, or what the policy
    uses of it. bytes: of cache and policy at most.

    appended, encoded: of the frames watched, the fractions of tokens that entered the memory and of patches that were encoded.
    tower_bytes: what the tower keeps; not in ``bytes``.
    """

    results: list[QuestionResult]
    kept: NDArray[np.float64]
    tokens: int
    bytes: int
    compressions: int
    compress_ms: float
    appended: float
    encoded: float
    tower_bytes: int

    def record(self, with_kept: bool) -> Record:
        """What the journal keeps; ``kept`` in hundredths, if at all."""
        fields = {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "compressions": self.compressions,
            "compress_ms": round(self.compress_ms, 3),
            "appended": round(self.appended, 4),
            "encoded": round(self.encoded, 4),
            "tower_bytes": self.tower_bytes,
            "results": [_rounded(asdict(result)) for result in self.results],
        }
        return fields | {"kept": np.rint(100 * self.kept).astype(int).tolist()} if with_kept else fields


class FeatureCache:
    """An engine that encodes each chunk of a stream once, for all the sessions that watch it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[bytes, Float32] = {}

    def encode(self, pixels: Float32) -> Float32:
        key = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
        if key not in self._known:
            self._known[key] = self._engine.encode(pixels)
        return self._known[key]

    def clear(self) -> None:
        """Another stream begins."""
        self._known.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Worker:
    """Makes cases and runs policies on them. model: one that is loaded already.

    Raises UserError for a model that does not see the world's patches.
    """

    def __init__(self, settings: AccuracySettings, model: Model | None = None) -> None:
        self.settings, self.words = settings, seed_words(settings.seed)
        model = model or Model.load(settings.model, threads=1)
        self._text = settings.suite == TEXT_FACTS
        self._text_budget = FACTS_TEXT_BUDGET if self._text else TEXT_BUDGET
        if self._text:
            model = text_model(model)
        self._features = FeatureCache(model.engine)
        self.model = replace(model, engine=cast(Engine, self._features))
        self.per_frame = model.bundle.vision.tokens_per_frame
        self._long = settings.suite == LONGSTREAM
        self._stream = -1
        self._case = self._make(0, settings.frames if self._text else 1)
        patches = self._case.owners.shape[1]
        if self.per_frame != patches:
            raise UserError(
                f"{settings.suite} shows frames of {patches} patches and {settings.model} has {self.per_frame} tokens a frame; "
                "give --model demo, or a bundle trained on the demo world"
            )

    @property
    def identity(self) -> str:
        """What a journal's header says of this model: the hash of its manifest, which lists the hashes of its files."""
        return model_identity(self.model)

    @property
    def kinds(self) -> list[str]:
        """The kinds of question that may be asked."""
        return list(KINDS if self._text else OFFERED)

    def case(self, stream: int) -> Case:
        if stream != self._stream:
            self._features.clear()
            self._stream, self._case = stream, self._make(stream, self.settings.frames)
        return self._case

    def _make(self, stream: int, frames: int) -> Case:
        if self._text:
            return make_text_case(self.words, stream, frames, self.model.encode)
        return make_case(self.words, stream, frames, self.settings.suite)

    def perform(self, task: CaseTask) -> Record:
        """One policy at one budget on one stream."""
        run, case = task.run, self.case(task.stream)
        policy, tokens = self._policy_factory(run, case)
        variant = Variant(run.label)
        reindexing, append, encode = variant.reindexing, variant.append, variant.encode
        key = {"policy": run.label, "budget": run.budget, "stream": task.stream}
        if self.settings.turns:
            order = [*self.words, task.stream, 2]
            return key | take_turns(self.model, case, policy, tokens, reindexing, self.settings.turns, order, append, encode)
        result = run_case(
            self.model, case, policy(), tokens, reindexing, text_budget=self._text_budget, append=append, encode=encode
        )
        if run.allowed and result.bytes > run.allowed:
            raise RuntimeError(f"{run.label} at {run.budget} took {result.bytes} bytes and was allowed {run.allowed}")
        return key | result.record(with_kept=task.stream == 0 and self.settings.suite in SUITES)

    def _policy_factory(self, run: VariantRun, case: Case) -> tuple[Callable[[], Policy], int]:
        """What makes the policy, and its |M|: for the guided one the whole stream, of which a question leaves the run's."""
        variant = Variant(run.label)
        if variant.policy == GUIDED:
            stream_tokens = case.owners.size
            return partial(create_policy, f"{GUIDED}:target={run.tokens / stream_tokens}"), stream_tokens
        if variant.is_oracle:
            return partial(make_oracle, variant.policy.removeprefix(f"{ORACLE}/"), case), run.tokens
        return partial(policy_of, variant, self.model, run.tokens), run.tokens

    def runs(self, variants: Sequence[Variant], budget: Budget) -> Iterator[VariantRun | SkippedRun]:
        """Each variant at the budget at which it takes no more bytes than a sliding window does, or why it cannot run."""
        tokens = budget.tokens(self.settings.frames * self.per_frame)
        per_token = bytes_per_token(self.model.bundle)
        unlimited = [variant for variant in variants if variant.is_oracle or variant.policy == GUIDED]
        yield from equal_byte_runs(variants, budget.text, tokens, per_token, self.per_frame, self._peak_bytes, unlimited)

    def ceiling(self) -> VariantRun:
        """What decides which kinds of question enter: full KV, or on long streams what an oracle keeps.

        Raises UserError when the model has no positions for all of a stream that is not a long one.
        """
        if self._long:
            return CEILING
        frames, full = self.settings.frames, create_policy("full")
        Session.open(self.model, policy=full, text_budget=self._text_budget, append=ALL).close()  # with all it can have
        most = full.budget // self.per_frame
        if frames > most:
            raise UserError(
                f"--frames {frames}: full KV must hold the whole stream, and this model has positions for {most} frames; "
                "give that many or fewer"
            )
        return VariantRun(FULL, "100%", frames * self.per_frame)

    def _peak_bytes(self, variant: Variant, tokens: int) -> int:
        """Bytes that cache and policy take at most, watching one stream."""
        case, policy = self.case(0), policy_of(variant, self.model, tokens)
        if self._text:
            prefix = self.model.encode(Chat(self.model.bundle.chat).prefix)
            rows = self._text_budget.rows(self.model)
            return peak_bytes(self.model, policy, tokens, prefix, rows, min(self.settings.frames, MEASURED_TEXT), CHUNK)
        if self._long:
            case = replace(case, frames=case.frames[:MEASURED])
        with Session.open(
            self.model, policy=policy, budget=tokens, reindexing=variant.reindexing, chunk=CHUNK, text_budget=TEXT_BUDGET,
            append=variant.append, encode=variant.encode,
        ) as session:  # fmt: skip
            if variant == PLAIN:
                peak = PeakBytes()
                peak.measure(session.cache, policy)
            else:
                peak = watch(session, policy, case)
        return peak.bytes


def policy_of(variant: Variant, model: Model, tokens: int) -> Policy:
    """A fresh policy of this variant; of ``auto`` the one selected for the model at this budget."""
    return chosen_policy(model.bundle, tokens)[0] if variant.policy == AUTO else create_policy(variant.policy)


def model_identity(model: Model) -> str:
    return hash_file(model.bundle.path / MANIFEST).sha256[:16]


def run_case(
    model: Model, case: Case, policy: Policy, tokens: int, reindexing: Reindexing = "lazy",
    text_budget: TextBudget = TEXT_BUDGET,
    append: str = ALL,
    encode: str = ALL,
) -> CaseResult:  # fmt: skip
    """Watch, then ask everything. Raises UserError when ``tokens`` is no budget for this policy."""
    with Session.open(
        model, policy=policy, budget=tokens, reindexing=reindexing, chunk=CHUNK, text_budget=text_budget,
        append=append, encode=encode,
    ) as session:  # fmt: skip
        peak = watch(session, policy, case)
        held = held_tokens(session.cache, case.owners.size, model.bundle.vision.grid)
        stats, memory = session.stats, session.stats.memory
        compress_ms = memory.compress_ms + memory.guidance_ms + memory.reindex_ms
        results = [ask(session, case, question, held) for question in case.questions]
    more = (memory.appended, stats.encoded, stats.tower_bytes)
    return CaseResult(results, held.mean((0, 1)), policy.budget, peak.bytes, memory.compressions, compress_ms, *more)


def watch(session: Session, policy: Policy, case: Case) -> PeakBytes:
    """The whole stream; what cache and policy take is measured after each chunk."""
    peak = PeakBytes()
    for number, frame in enumerate(case.frames):
        session.watch(frame)
        if (number + 1) % session.chunk == 0:
            peak.measure(session.cache, policy, session.stats.present_bytes)
    session.flush()
    peak.measure(session.cache, policy, session.stats.present_bytes)
    return peak


def held_tokens(cache: KVCache, tokens: int, grid: tuple[int, int]) -> NDArray[np.bool_]:
    """Which tokens of a stream of frames of ``grid`` each layer and KV head holds: bool ``[layers, kv_heads, tokens]``."""
    held = np.zeros((cache.layers, cache.kv_heads, tokens), np.bool_)
    rows, columns = grid
    for layer in range(cache.layers):
        patch = cache.row(layer).astype(np.int64) * columns + cache.col(layer)
        token = cache.frame(layer).astype(np.int64) * rows * columns + patch
        for head, vision in enumerate(cache.kind(layer) == Kind.VISION):
            held[layer, head, token[head, vision]] = True
    return held


def ask(session: Session, case: Case, question: CaseQuestion, held: NDArray[np.bool_]) -> QuestionResult:
    """Ask, and compare the answer with the right one and what is held with the evidence."""
    before = moved_bytes(session)
    answer = session.ask(question.text)
    text, (fraction, some) = answer.text.strip(), overlap(held, question.evidence)
    seen = None
    if len(question.evidence) and answer.evidence is not None:
        seen = score_evidence(answer.evidence, case, question, held, session.model.bundle.vision.grid)
    return QuestionResult(
        kind=question.kind,
        text=question.text,
        answer=text,
        right=question.is_right(text),
        quarter=case.quarter(question),
        held=fraction,
        any=some,
        ttft_ms=answer.ttft_ms,
        gap=case.gap(question),
        moved=moved_bytes(session) - before,
        seen=seen,
    )


def moved_bytes(session: Session) -> int:
    """Bytes that retrieval has brought up from host memory and disk until now; 0 for policies that do not retrieve."""
    store = session.store
    return store.stats.bytes_host + store.stats.bytes_disk if store is not None else 0


def overlap(held: NDArray[np.bool_], evidence: NDArray[np.int64]) -> tuple[float | None, float | None]:
    """Fraction of ``evidence`` held, and whether any of it is, means over layers and KV heads; None without evidence."""
    if not len(evidence):
        return None, None
    there = held[:, :, evidence]
    return float(there.mean()), float(there.any(2).mean())


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()}


def take_turns(
    model: Model, case: Case, policy: Callable[[], Policy], tokens: int, reindexing: Reindexing, count: int, order: list[int],
    append: str = ALL, encode: str = ALL,
) -> Record:  # fmt: skip
    """Ask ``count`` questions one after another, and each again of a session of its own that watched the same stream.

    No answer may depend on the questions before it (InfiniPot-V, App. C). policy: makes a fresh one; order: the seed of which
    questions and in which order. Per turn: kind, right, fresh (right when asked alone), same (the answers are the same tokens).
    """
    asked = draw_turns(case, count, order)

    def session() -> Session:
        opened = Session.open(
            model, policy=policy(), budget=tokens, reindexing=reindexing, text_budget=TEXT_BUDGET, append=append, encode=encode
        )
        for frame in case.frames:
            opened.watch(frame)
        return opened

    with session() as one:
        answers = [_text_and_ids(one, question) for question in asked]
    results = []
    for question, (text, ids) in zip(asked, answers, strict=True):
        with session() as fresh:
            alone, alone_ids = _text_and_ids(fresh, question)
        right, fresh_right = text == question.answer, alone == question.answer
        results.append({"kind": question.kind, "right": right, "fresh": fresh_right, "same": ids == alone_ids})
    return {"turns": results}


def draw_turns(case: Case, count: int, order: list[int]) -> list[CaseQuestion]:
    """``count`` questions in a random order, those about before first: the others hardly depend on what is kept."""
    shuffled = [case.questions[place] for place in np.random.default_rng(order).permutation(len(case.questions))]
    return sorted(shuffled, key=lambda question: question.is_about_now)[:count]


def _text_and_ids(session: Session, question: CaseQuestion) -> tuple[str, list[int]]:
    answer = session.ask(question.text)
    return answer.text.strip(), answer.token_ids


def run_all(worker: Worker, tasks: Iterable[CaseTask], pool: Pool) -> Iterator[Record]:
    """Records as they are done, see :meth:`Pool.map`."""
    yield from pool.map(worker.perform, partial(make_worker, worker.settings, worker.identity), tasks)


def make_worker(settings: AccuracySettings, identity: str) -> Callable[[CaseTask], Record]:
    """What performs tasks in another process, maybe on another machine. Raises UserError where the model is another one."""
    worker = Worker(settings)
    check_same_model(worker.model, identity)
    return worker.perform


def check_same_model(model: Model, identity: str) -> None:
    """Raises UserError for another model than the one asked about: another machine may have another by that name."""
    if model_identity(model) != identity:
        raise UserError(f"{model.bundle.path}: is another model on {os.uname().nodename} than on the machine that asks")
