"""Makes the suite text-facts: who came by, in a stream of text that a language model reads instead of frames.

A frame is ``TOKENS`` tokens of whole sentences, whose embeddings enter the memory as a frame's rows in a grid of one row. A few
frames name a visitor in a sentence that differs only in the name, like RULER's multi-key needles (arXiv 2404.06654). Afterwards
each visitor's family name is asked, with the answer's first words given, as RULER does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.accuracy.cases import Case, CaseQuestion, Words
from edgevlm.calib.accuracy.memory_accounting import WrappedEngine
from edgevlm.errors import UserError
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.engine import Engine, Float32
from edgevlm.runtime.model import Model

TEXT_FACTS = "text-facts"
KINDS = ("now_visitor", "past_visitor")
TOKENS = 24  # in a frame
VISITORS, NEAR = 8, 2  # in a stream; in its newest eighth
FACTS_TEXT_BUDGET = TextBudget(0, 64, 2)  # a family name takes one token or two
SENTENCES = 800  # drawn for a stream, to fill its frames

GIVEN = """Alice Robert Maria Peter Susan David Laura Henry Emma Thomas Julia Frank Clara Oscar Nina Victor Daniel Helen George
Sarah Martin Rachel Simon Grace"""
FAMILY = """Porter Walker Fisher Mason Parker Turner Cooper Bishop Hunter Potter Taylor Carter Butler Palmer Fletcher Weaver
Baker Miller Shepherd Gardner Marshall Archer Barber Sawyer"""
WHO = """The baker|A tired clerk|The old captain|My neighbour|The night guard|A young painter|The postman|Her cousin|The
gardener|A singer|The teacher|A student|The driver|His aunt|The farmer|A nurse|The mechanic|Our cook|The tailor|A sailor"""
DID = "carried|noticed|repaired|forgot|borrowed|painted|described|found|admired|cleaned|sold|lost|moved|opened|wanted|bought"
WHAT = """a heavy box|the broken lamp|some dry bread|a letter from home|an umbrella|the morning paper|a basket of pears|three
wooden chairs|a map of the coast|the kitchen clock|an old violin|a pair of boots|the garden gate|two silver spoons|a bottle of
ink|the last ticket|a bag of flour|the blue curtains"""
WHERE = """ near the window| before the rain came| on the way to work| without a word| after dinner| at the end of the street|
while the others slept| under a grey sky| just before noon| and went home|||||"""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class FactQuestion(CaseQuestion):
    """``text`` is the question and, on the next line, the first words of its answer."""

    def is_right(self, answer: str) -> bool:
        """Return whether the answer names the family, a word of its own."""
        return re.search(rf"\b{re.escape(self.answer)}\b", answer) is not None


class TokenRows(WrappedEngine):
    """An engine whose tower embeds the tokens of :func:`pixels_of`."""

    def __init__(self, engine: Engine, width: int) -> None:
        super().__init__(engine)
        self._width = width

    def encode(self, pixels: Float32) -> Float32:
        """Frames ``[F, 3, 1, TOKENS]`` to embeddings ``[F, TOKENS, width]``; DeepStack's further columns are zeros."""
        ids = np.einsum("c,fcp->fp", [1, 256, 65536], np.rint(pixels[:, :, 0]).astype(np.int64))
        rows = self._engine.embed(ids.ravel())
        return np.pad(rows, ((0, 0), (0, self._width - rows.shape[1]))).reshape(*ids.shape, -1)


def text_model(model: Model) -> Model:
    """Return the model with frames of ``TOKENS`` tokens of text in place of pictures."""
    vision = replace(
        model.bundle.vision, size=(1, TOKENS), fit="stretch", resample="bilinear", rescale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3,
        tokens_per_frame=TOKENS, grid=(1, TOKENS), closing=None, group=1, positions="rows", before="", after="",
    )  # fmt: skip
    chat = replace(model.bundle.chat, opening="", ending="")
    engine = cast(Engine, TokenRows(model.engine, model.bundle.decoder.row_width))
    return replace(model, bundle=replace(model.bundle, vision=vision, chat=chat), engine=engine, closing=model.closing[:0])


def pixels_of(ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Turn token ids ``[T, TOKENS]`` into frames ``[T, 1, TOKENS, 3]``, whose pixels' channels are the bytes of an id."""
    return np.stack([ids >> shift & 255 for shift in (0, 8, 16)], -1).astype(np.uint8)[:, None]


def make_text_case(words: Words, stream: int, frames: int, encode: Encode) -> Case:
    """Make the ``stream``-th stream of a seed, and a question about each visitor. Raises UserError for too short a stream."""
    rng = np.random.default_rng([*words, stream, 3])
    newest = frames - frames // 8
    if frames // 8 < NEAR + 1 or newest < VISITORS - NEAR:
        raise UserError(f"--frames {frames}: {VISITORS} visitors come by in a stream; give {8 * (NEAR + 1)} or more")
    far = np.sort(rng.permutation(newest)[: VISITORS - NEAR])
    near = newest + np.sort(rng.permutation(frames - newest - 1)[:NEAR])  # the newest frame names no visitor
    given, family = (rng.permutation(names.split())[:VISITORS].tolist() for names in (GIVEN, FAMILY))
    visits = dict(zip([*far.tolist(), *near.tolist()], range(VISITORS), strict=True))
    sentences = _sentences(rng, encode)
    ids, owners = np.zeros((frames, TOKENS), np.int64), np.full((frames, TOKENS), -1, np.int32)
    for frame in range(frames):
        visitor = visits.get(frame, -1)
        visit = encode(f" A visitor called {given[visitor]} {family[visitor]} came in.") if visitor >= 0 else []
        parts = _fill(rng, sentences, TOKENS - len(visit))
        place = int(rng.integers(len(parts) + 1)) if visit else 0
        before = sum(map(len, parts[:place]))
        ids[frame] = [token for part in (*parts[:place], visit, *parts[place:]) for token in part]
        owners[frame, before : before + len(visit)] = visitor
    questions: list[CaseQuestion] = []
    for frame, visitor in visits.items():
        text, evidence = f"Who came in?\nA visitor called {given[visitor]}", np.flatnonzero(owners == visitor)
        questions.append(FactQuestion(KINDS[frame < newest], text, family[visitor], evidence, frame))
    return Case(pixels_of(ids), owners, questions)


def _sentences(rng: np.random.Generator, encode: Encode) -> list[list[int]]:
    """Draw sentences without visitors, as token ids."""
    parts = [[" ".join(part.split()) for part in of.split("|")] for of in (WHO, DID, WHAT, WHERE)]
    drawn = ([of[rng.integers(len(of))] for of in parts] for _ in range(SENTENCES))
    return [encode(f" {' '.join(filter(None, words))}.") for words in drawn]


def _fill(rng: np.random.Generator, sentences: list[list[int]], tokens: int) -> list[list[int]]:
    """Draw whole sentences that have ``tokens`` tokens together. Raises UserError where none have."""
    reach, lengths = {0}, set(map(len, sentences))
    for end in range(1, tokens + 1):
        reach |= {end} if any(end - length in reach for length in lengths) else set()
    if tokens not in reach:
        raise UserError(f"no sentences of together {tokens} of this model's tokens; give a model of English text")
    parts: list[list[int]] = []
    while tokens:
        fitting = [sentence for sentence in sentences if tokens - len(sentence) in reach]
        parts.append(fitting[rng.integers(len(fitting))])
        tokens -= len(parts[-1])
    return parts
