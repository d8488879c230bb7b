"""Compare policies by how far their next-token distributions are from those of full KV, which needs no right answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import psutil

from edgevlm.calib.accuracy.memory_accounting import PeakBytes, bytes_per_token, equal_byte_budget, peak_bytes
from edgevlm.calib.accuracy.variants import PLAIN, Record
from edgevlm.calib.trace import Clip, Float32, Float64
from edgevlm.errors import UserError
from edgevlm.runtime.budget import TextBudget, present_rows
from edgevlm.runtime.changes import ChangedEncoder, unit_features
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy, create_policy
from edgevlm.runtime.policies.baselines import Full
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.settings import AppendChanged, EncodeChanged
from edgevlm.runtime.stream import Stream

QUESTIONS = ("What is happening?", "What changed?", "Describe what you saw at the beginning.")
CHUNK = 8
MOMENTS = 8  # the questions are asked at this many evenly spaced moments, the last one at the clip's end
ANSWER = 16


@dataclass(frozen=True, slots=True)
class ReferenceAnswer:
    """Full KV's greedy answer to a question, with the logits before each token, ``[tokens, vocabulary]``."""

    question: list[int]
    answer: list[int]
    logits: Float32


@dataclass(frozen=True, slots=True)
class FullKVReference:
    """A clip's features, ``[F, tokens_per_frame, width]``, and full KV's answers by the number of frames watched so far."""

    features: Float32
    asked: dict[int, list[ReferenceAnswer]]


class DivergenceMeter:
    """Measures how far policies diverge from full KV on clips. Raises UserError if a question is too long."""

    def __init__(self, model: Model, questions: Sequence[str] = QUESTIONS) -> None:
        self.model = model
        chat, text = Chat(model.bundle.chat, model.tokenizer), TextBudget.fitting(model.bundle.limit)
        self._prefix, self._text_rows = chat.prefix, text.rows(model)
        self._answer = min(ANSWER, text.answer)
        self._questions = [chat.suffix([], question) for question in questions]
        for question, ids in zip(questions, self._questions, strict=True):
            if len(ids) > (most := text.conversation + text.question):
                raise UserError(f"--ask {question!r} has {len(ids)} tokens, but only {most} fit; shorten it")
        self.per_frame = model.rows_per_frame

    def longest(self) -> int:
        """Return the most frames that full KV can hold, given the model's positions and half of the free memory."""
        positions = (self.model.bundle.limit - len(self._prefix) - self._text_rows) // self.per_frame
        memory = psutil.virtual_memory().available // 2 // (bytes_per_token(self.model.bundle) * self.per_frame)
        return min(positions, memory)

    def fitted(self, policy: str, tokens: int, frames: int) -> int:
        """Return the largest budget at which a policy takes no more bytes than a sliding window of ``tokens`` tokens.

        Raises UserError if the policy needs more bytes than that for a single frame.
        """
        allowed, measured = self._peak_bytes(PLAIN.policy, 0, tokens), partial(self._peak_bytes, policy, frames)
        return equal_byte_budget(tokens, allowed, bytes_per_token(self.model.bundle), self.per_frame, measured)

    def _peak_bytes(self, policy: str, frames: int, tokens: int) -> int:
        return peak_bytes(self.model, create_policy(policy), tokens, self._prefix, self._text_rows, frames, CHUNK)

    def reference(self, clip: Clip, frames: int, beyond: int) -> FullKVReference:
        """Watch a clip's first ``frames`` frames under full KV, asking questions at several moments.

        ``beyond``: start asking when more tokens than this have been watched.
        """
        pixels = list(map(Preprocessor(self.model.bundle.vision), islice(clip.frames, frames)))
        chunks = [np.stack(pixels[first : first + CHUNK]) for first in range(0, len(pixels), CHUNK)]
        features = np.concatenate(list(map(self.model.engine.encode, chunks)))
        stream, asked = self._open(Full(), features.shape[0] * self.per_frame), {}
        for done in self._watch(stream, features):
            if done in moments(len(features)) and done * self.per_frame > beyond:
                asked[done] = [self._answered(stream, question) for question in self._questions]
        return FullKVReference(features, asked)

    def measure(
        self, reference: FullKVReference, policy: Policy, tokens: int, budget: int, append: AppendChanged | None = None
    ) -> Record:
        """Compare a policy's next tokens with full KV's, at the same moments of the clip.

        ``tokens``: the policy's budget. ``budget``: start measuring when more tokens than this have been watched. In the
        record, ``kl`` is KL(full || policy) in nats, one list per moment, one value per answer token. ``top1`` has one boolean
        for each of these values: whether the policy and full KV agree on the most probable token. ``appended`` is the fraction
        of tokens appended.
        """
        stream, peak = self._open(policy, tokens, append), PeakBytes()
        kl, top1 = [], []
        for done in self._watch(stream, reference.features):
            peak.measure(stream.cache, policy)
            if done * self.per_frame <= budget:
                continue
            pairs = [(asked.logits, self._scored(stream, asked)) for asked in reference.asked.get(done, ())]
            if pairs:
                kl.append([round(float(nats), 6) for full, ours in pairs for nats in divergence(full, ours)])
                top1.append([bool(same) for full, ours in pairs for same in full.argmax(1) == ours.argmax(1)])
        stats = stream.stats
        return {
            "tokens": tokens, "bytes": peak.bytes, "compressions": stats.compressions,
            "compress_ms": round(stats.compress_ms + stats.guidance_ms + stats.reindex_ms, 3),
            "appended": round(stats.appended, 4), "kl": kl, "top1": top1,
        }  # fmt: skip

    def measure_append(self, append: AppendChanged, frames: int, budget: int, reference: FullKVReference, clip: Clip) -> Record:
        """Measure full KV when only changed tokens are appended. The cache has room for ``frames`` whole frames."""
        tokens = max(self.per_frame, frames * self.per_frame - present_rows(self.model))
        return self.measure(reference, Full(), tokens, budget, append)

    def measure_encode(self, encode: EncodeChanged, budget: int, reference: FullKVReference, clip: Clip) -> Record:
        """Measure full KV when only the changed patches of the clip's frames are encoded.

        ``encoded``: the fraction of patches that were encoded. ``low_cosine``: the first percentile of the cosine between these
        features and those of whole frames.
        """
        vision, features = self.model.bundle.vision, []
        preprocess, encoder = Preprocessor(vision), ChangedEncoder(self.model.engine, self.model.bundle, encode)
        frames = islice(clip.frames, len(reference.features) * vision.group)
        while chunk := list(islice(frames, CHUNK)):
            sizes = np.array([frame.shape[:2] for frame in chunk], np.int32)
            features.append(encoder.encode(np.stack([preprocess(frame) for frame in chunk]), sizes))
        found = np.concatenate(features)
        cosines = (unit_features(found) * unit_features(reference.features)).sum(-1)
        record = self.measure(replace(reference, features=found), Full(), len(found) * self.per_frame, budget)
        return record | {"encoded": round(encoder.encoded, 4), "low_cosine": round(float(np.quantile(cosines, 0.01)), 5)}

    def _open(self, policy: Policy, tokens: int, append: AppendChanged | None = None) -> Stream:
        return Stream(self.model, policy, tokens, self._prefix, self._text_rows, "lazy", CHUNK, append=append)

    def _watch(self, stream: Stream, features: Float32) -> Iterator[int]:
        """Append features chunk by chunk; after each chunk, yield the number of frames watched so far."""
        for first in range(0, len(features), CHUNK):
            chunk = features[first : first + CHUNK]
            stream.append_frames(chunk)
            yield first + len(chunk)

    def _answered(self, stream: Stream, question: list[int]) -> ReferenceAnswer:
        logits: list[Float32] = []
        answer: list[int] = []
        embeds, append = self._embeds(question), stream.append_question
        with stream.question():
            while len(answer) < self._answer and (not answer or answer[-1] not in self.model.bundle.chat.stop_ids):
                logits.append(append(embeds).copy())
                answer.append(int(logits[-1].argmax()))
                embeds, append = self.model.engine.embed(np.asarray(answer[-1:], np.int64)), stream.append_text
        return ReferenceAnswer(question, answer, np.stack(logits))

    def _scored(self, stream: Stream, asked: ReferenceAnswer) -> Float32:
        """Return the stream's logits for each token of full KV's answer."""
        rows = self._embeds(asked.question + asked.answer[:-1])
        with stream.question():
            return stream.score_text(rows, range(len(rows) - len(asked.answer), len(rows))).copy()

    def _embeds(self, ids: list[int]) -> Float32:
        """Return the embeddings of ``ids``, preceded by the rows that close the video."""
        return np.concatenate([self.model.closing, self.model.engine.embed(np.asarray(ids, np.int64))])


def moments(frames: int) -> set[int]:
    """Return the numbers of frames after which to ask questions: MOMENTS evenly spaced numbers, rounded up to whole chunks."""
    steps = (frames * step / MOMENTS for step in range(1, MOMENTS + 1))
    return {min(frames, math.ceil(step / CHUNK) * CHUNK) for step in steps}


def divergence(full: Float32, ours: Float32) -> Float64:
    """Return KL(full || ours) in nats, ``[n]``. Both arguments are logits ``[n, vocabulary]``."""
    shifted = [logits.astype(np.float64) - logits.max(1, keepdims=True) for logits in (full, ours)]
    p, q = (each - np.log(np.exp(each).sum(1, keepdims=True)) for each in shifted)
    nats: Float64 = (np.exp(p) * (p - q)).sum(1)
    return np.maximum(nats, 0.0)
