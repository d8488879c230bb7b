"""Run policies on cases. A worker loads a model and shows it the streams; several workers can run in parallel."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.accuracy.cases import LONGSTREAM, Case, CaseQuestion, make_case, score_evidence, seed_words
from edgevlm.calib.accuracy.memory_accounting import PeakBytes, WrappedEngine, bytes_per_token, peak_bytes
from edgevlm.calib.accuracy.oracle import make_oracle
from edgevlm.calib.accuracy.text_streams import KINDS, QUESTION_BUDGET, TEXT_SUITES, text_model
from edgevlm.calib.accuracy.variants import (
    FULL,
    ORACLE,
    PLAIN,
    Budget,
    Record,
    SkippedRun,
    Variant,
    VariantRun,
    equal_byte_runs,
)
from edgevlm.errors import UserError
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.bundle import MANIFEST, hash_file
from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.engine import DEFAULT_ENGINE, Engine, Float32
from edgevlm.runtime.model import Model
from edgevlm.runtime.opening import AUTO, chosen_policy
from edgevlm.runtime.policies import Policy, create_policy
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import ALL
from edgevlm.runtime.taught import OFFERED

CHUNK = 8  # the number of frames encoded and appended at once, the same as a session's default
TEXT_BUDGET = TextBudget(80, 80, 80)
MEASURED = 256  # a policy's bytes are measured after this many frames of a long stream, when all of its arrays exist,
MEASURED_TEXT = 16  # or after this many frames of text
CEILING = VariantRun(f"{ORACLE}/spread+frame", "ceiling", 1024)
"""The run that replaces full KV on streams too long for it: it keeps the evidence and leaves half of the positions free."""


@dataclass(frozen=True, slots=True)
class AccuracySettings:
    """The settings of a comparison. ``seed``: the random seed, a number or ``test``."""

    model: str = "demo"
    frames: int = 64
    seed: str = "0"
    suite: str = "streamqa"
    noise: float = 0.0
    crf: int | None = None
    engine: str = DEFAULT_ENGINE


@dataclass(frozen=True, slots=True)
class CaseTask:
    run: VariantRun
    stream: int


class FeatureCache(WrappedEngine):
    """An engine that remembers a stream's features, so that each chunk is encoded only once."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._known: dict[bytes, Float32] = {}

    def encode(self, pixels: Float32) -> Float32:
        key = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
        if key not in self._known:
            self._known[key] = self._engine.encode(pixels)
        return self._known[key]

    def clear(self) -> None:
        self._known.clear()


class Worker:
    """Makes cases and runs policies on them. ``model``: by default, the one named in the settings.

    Raises UserError if the suite's frames do not have as many patches as the model has tokens per frame.
    """

    def __init__(self, settings: AccuracySettings, model: Model | None = None) -> None:
        self.settings, self._words = settings, seed_words(settings.seed)
        self._text, self._long = settings.suite in TEXT_SUITES, settings.suite == LONGSTREAM
        self._text_budget = QUESTION_BUDGET if self._text else TEXT_BUDGET
        self.kinds = list(KINDS[settings.suite] if self._text else OFFERED)  # the kinds of question in the suite
        model = model or Model.load(settings.model, engine=settings.engine, threads=1)
        model = text_model(model) if self._text else model
        self._features = FeatureCache(model.engine)
        self.model = replace(model, engine=cast(Engine, self._features))
        self.identity, self.per_frame = model_identity(model), model.bundle.vision.tokens_per_frame
        self._stream, self._case = -1, self._make(0, settings.frames if self._text else 1)
        if self.per_frame != (patches := self._case.owners.shape[1]):
            raise UserError(
                f"{settings.suite} has {patches} patches per frame, but {settings.model} has {self.per_frame} tokens; "
                "use --model demo, or a bundle trained on the demo world"
            )

    def case(self, stream: int) -> Case:
        if stream != self._stream:
            self._features.clear()
            self._stream, self._case = stream, self._make(stream, self.settings.frames)
        return self._case

    def _make(self, stream: int, frames: int) -> Case:
        if self._text:
            return TEXT_SUITES[self.settings.suite](self._words, stream, frames, self.model.encode)
        return make_case(self._words, stream, frames, self.settings.suite, self.settings.noise, self.settings.crf)

    def perform(self, task: CaseTask) -> Record:
        run, case, variant = task.run, self.case(task.stream), Variant(task.run.label)
        if variant.is_oracle:
            policy: Policy = make_oracle(variant.policy.removeprefix(f"{ORACLE}/"), case)
        else:
            policy = policy_of(variant, self.model, run.tokens)
        record = run_case(self.model, case, policy, run.tokens, variant, self._text_budget)
        if run.allowed and record["bytes"] > run.allowed:
            raise RuntimeError(f"{run.label} at {run.budget} used {record['bytes']} bytes, more than the allowed {run.allowed}")
        return {"policy": run.label, "budget": run.budget, "stream": task.stream, **record}

    def runs(self, variants: Sequence[Variant], budget: Budget) -> Iterator[VariantRun | SkippedRun]:
        """Yield, for each variant, a run that takes at most the bytes of a sliding window at ``budget``, or a SkippedRun."""
        tokens, per_token = budget.tokens(self.settings.frames * self.per_frame), bytes_per_token(self.model.bundle)
        oracles = [variant for variant in variants if variant.is_oracle]
        yield from equal_byte_runs(variants, budget.text, tokens, per_token, self.per_frame, self._peak_bytes, oracles)

    def ceiling(self) -> VariantRun:
        """Return the run that shows which kinds of question can be answered at all.

        This run uses full KV or, on long streams, an oracle. Raises UserError if the model has too few positions for full KV.
        """
        if self._long:
            return CEILING
        frames, full = self.settings.frames, create_policy("full")
        Session.open(
            self.model, policy=full, text_budget=self._text_budget, append=ALL
        ).close()  # opening a session sets full.budget to the largest possible budget
        if frames > (most := full.budget // self.per_frame):
            raise UserError(f"--frames {frames}: this model has positions for only {most} frames with full KV; set fewer")
        return VariantRun(FULL, "100%", frames * self.per_frame)

    def _peak_bytes(self, variant: Variant, tokens: int) -> int:
        case, policy = self.case(0), policy_of(variant, self.model, tokens)
        if self._text:
            prefix, rows = Chat(self.model.bundle.chat, self.model.tokenizer).prefix, self._text_budget.rows(self.model)
            return peak_bytes(self.model, policy, tokens, prefix, rows, min(self.settings.frames, MEASURED_TEXT), CHUNK)
        frames = case.frames[: 0 if variant == PLAIN else MEASURED if self._long else None]
        with open_variant(self.model, policy, tokens, variant, TEXT_BUDGET) as session:
            return watch(session, policy, frames).bytes


def policy_of(variant: Variant, model: Model, tokens: int) -> Policy:
    """Create the variant's policy. ``auto`` gives the policy chosen for the model at a budget of ``tokens``."""
    return chosen_policy(model.bundle, tokens)[0] if variant.policy == AUTO else create_policy(variant.policy)


def model_identity(model: Model) -> str:
    """Return the first 16 hex digits of the SHA-256 of the model's manifest, which covers all of the model's files."""
    return hash_file(model.bundle.path / MANIFEST).sha256[:16]


def open_variant(model: Model, policy: Policy, tokens: int | None, variant: Variant, text_budget: TextBudget) -> Session:
    return Session.open(
        model, policy=policy, budget=tokens, reindexing=variant.reindexing, chunk=CHUNK, text_budget=text_budget,
        append=variant.append, encode=variant.encode,
    )  # fmt: skip


def run_case(
    model: Model, case: Case, policy: Policy, tokens: int, variant: Variant = PLAIN, text_budget: TextBudget = TEXT_BUDGET
) -> Record:
    """Watch a stream with a budget of ``tokens``, then ask and score all of its questions.

    In the record, ``bytes`` is the most that the cache and the policy took together, and ``results`` are from :func:`ask`.
    Raises UserError if the policy cannot run at this budget.
    """
    with open_variant(model, policy, tokens, variant, text_budget) as session:
        peak = watch(session, policy, case.frames)
        held = held_tokens(session.cache, case.owners.size, model.bundle.vision.grid)
        stats, memory = session.stats, session.stats.memory
        results = [ask(session, case, question, held) for question in case.questions]
    return {
        "tokens": policy.budget, "bytes": peak.bytes, "compressions": memory.compressions,
        "compress_ms": round(memory.compress_ms + memory.guidance_ms + memory.reindex_ms, 3),
        "appended": round(memory.appended, 4), "encoded": round(stats.encoded, 4), "tower_bytes": stats.tower_bytes,
        "results": results,
    }  # fmt: skip


def watch(session: Session, policy: Policy, frames: Iterable[NDArray[np.uint8]]) -> PeakBytes:
    """Show frames, uint8 ``[H, W, 3]``, to a session and measure the cache and the policy after each chunk."""
    peak = PeakBytes()
    for number, frame in enumerate(frames, 1):
        session.watch(frame)
        if number % session.chunk == 0:
            peak.measure(session.cache, policy, session.stats.present_bytes)
    session.flush()
    peak.measure(session.cache, policy, session.stats.present_bytes)
    return peak


def held_tokens(cache: KVCache, tokens: int, grid: tuple[int, int]) -> NDArray[np.bool_]:
    """Return which tokens of a stream each layer and head holds, bool ``[layers, kv_heads, tokens]``."""
    held = np.zeros((cache.layers, cache.kv_heads, tokens), np.bool_)
    rows, columns = grid
    for layer in range(cache.layers):
        patch = cache.row(layer).astype(np.int64) * columns + cache.col(layer)
        token = cache.frame(layer).astype(np.int64) * rows * columns + patch
        for head, vision in enumerate(cache.kind(layer) == Kind.VISION):
            held[layer, head, token[head, vision]] = True
    return held


def ask(session: Session, case: Case, question: CaseQuestion, held: NDArray[np.bool_]) -> Record:
    """Ask a question and score the answer.

    In the record, ``quarter`` and ``gap`` come from :class:`Case`, and ``held`` and ``any`` from :func:`overlap`.
    ``moved`` is how many bytes retrieval fetched for the answer. ``seen`` is the score of the evidence reported with the
    answer, or None.
    """
    before = moved_bytes(session)
    answer = session.ask(question.text)
    text, (fraction, some) = answer.text.strip(), overlap(held, question.evidence)
    seen = None
    if len(question.evidence) and answer.evidence is not None:
        seen = asdict(score_evidence(answer.evidence, case, question, held, session.model.bundle.vision.grid))
    return {
        "kind": question.kind, "text": question.text, "answer": text, "right": question.is_right(text),
        "quarter": case.quarter(question), "held": fraction, "any": some, "ttft_ms": round(answer.ttft_ms, 4),
        "gap": case.gap(question), "moved": moved_bytes(session) - before, "seen": seen,
    }  # fmt: skip


def moved_bytes(session: Session) -> int:
    """Return the bytes that retrieval has fetched from host memory and disk so far; 0 for policies without retrieval."""
    store = session.store
    return store.stats.bytes_host + store.stats.bytes_disk if store is not None else 0


def overlap(held: NDArray[np.bool_], evidence: NDArray[np.int64]) -> tuple[float | None, float | None]:
    """Return how much of the evidence a KV head holds on average, and the fraction of heads that hold any of it.

    Both are None for a question without evidence.
    """
    if not len(evidence):
        return None, None
    there = held[:, :, evidence]
    return round(float(there.mean()), 4), round(float(there.any(2).mean()), 4)
