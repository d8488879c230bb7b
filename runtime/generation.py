"""One question after the memory, and its answer token by token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers.decoders import DecodeStream

from edgevlm.runtime.answer import Answer, FinishReason
from edgevlm.runtime.chunk import Chunk
from edgevlm.runtime.model import Model
from edgevlm.runtime.sampling import Sampler
from edgevlm.runtime.stream import Stream


@dataclass(frozen=True, slots=True)
class Asked:
    """A question: when it was asked (``time.perf_counter``), in which conversation, and how its answer is drawn."""

    answer: Answer
    at: float
    conversation: str | None
    max_tokens: int
    sampler: Sampler


def generate(asked: Asked, ids: Sequence[int], model: Model, stream: Stream, chunk: Chunk) -> FinishReason:
    """Append the prompt ``ids`` and draw the answer's tokens; the memory is then as it was.

    What a piece of the chunk not yet complete holds is seen too, and taken out again.
    """
    answer, engine, stops = asked.answer, model.engine, model.bundle.chat.stop_ids
    detokenise = DecodeStream(skip_special_tokens=True)
    embeds = np.concatenate([model.closing, engine.embed(np.asarray(ids, np.int64))])
    pending = chunk.features() if chunk.taken else None
    seconds = None if pending is None else chunk.seconds()
    with stream.question(pending, chunk.coming(), seconds):
        append = stream.append_question
        while True:
            if answer.cancelled:
                return "cancelled"
            token = asked.sampler(append(embeds))
            now = time.perf_counter()
            if not answer.token_ids:
                answer.ttft_ms, first = 1e3 * (now - asked.at), now
            if token in stops:
                return "stop"
            answer.token_ids.append(token)
            if len(answer.token_ids) > 1:
                answer.tpot_ms = 1e3 * (now - first) / (len(answer.token_ids) - 1)
            if piece := detokenise.step(model.tokenizer, token):
                answer.push(piece)
            if len(answer.token_ids) == asked.max_tokens:
                return "length"
            embeds, append = engine.embed(np.asarray([token], np.int64)), stream.append_text
