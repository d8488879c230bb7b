"""Make the suites text-facts and text-scenes: streams of text that a language model reads instead of frames.

A frame consists of whole sentences, ``TOKENS`` tokens in total, and enters the cache as one row of patches. Each question gives
the first words of its answer, as in RULER (arXiv 2404.06654).

In text-facts, a few frames name a visitor. The visitors' sentences differ only in the name, like RULER's multi-key needles. In
text-scenes, each frame describes the whole scene; most of the scene stays the same from one frame to the next.
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

TEXT_FACTS, TEXT_SCENES = "text-facts", "text-scenes"
KINDS = {
    TEXT_FACTS: ("now_visitor", "past_visitor"),
    TEXT_SCENES: ("now_name", "now_city", "past_name", "past_city", "first_name"),
}
TOKENS = 24
SLOTS, PEOPLE = 4, 10
STAY, EMPTY = (8, 16), (1, 4)  # (least, most) frames: a person's stay, and the slot's empty time after it
SWAPS = 0.1
VISITORS, NEAR = 8, 2  # how many visitors a stream has, and how many of them come in its newest eighth
QUESTION_BUDGET = TextBudget(0, 64, 2)
SENTENCES = 800

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

CITY = """London Paris Berlin Rome Madrid Vienna Dublin Boston Chicago Tokyo Cairo Delhi Lisbon Oslo Prague Athens Geneva Milan
Denver Dallas Houston Seattle Miami Sydney Moscow Munich Glasgow Oxford"""
ALWAYS, FIRST = " It is night.", "First came"
QUIET = ("The street is quiet", "The sun is shining", "The door is open", "A bird is singing")  # an empty slot's sentence

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class TextQuestion(CaseQuestion):
    """A question about text. ``text``: the question and, on a second line, the first words of the answer."""

    def is_right(self, answer: str) -> bool:
        """Return whether ``answer`` contains the right answer as a whole word."""
        return re.search(rf"\b{re.escape(self.answer)}\b", answer) is not None


class TokenRows(WrappedEngine):
    """An engine whose vision tower reads token ids from pixels (see :func:`pixels_of`) and returns their embeddings."""

    def __init__(self, engine: Engine, width: int) -> None:
        super().__init__(engine)
        self._width = width

    def encode(self, pixels: Float32) -> Float32:
        """Turn frames ``[F, 3, 1, TOKENS]`` into embeddings ``[F, TOKENS, width]``."""
        ids = np.einsum("c,fcp->fp", [1, 256, 65536], np.rint(pixels[:, :, 0]).astype(np.int64))
        rows = self._engine.embed(ids.ravel())
        return np.pad(rows, ((0, 0), (0, self._width - rows.shape[1]))).reshape(*ids.shape, -1)


def text_model(model: Model) -> Model:
    """Return a copy of the model whose frames are ``TOKENS`` tokens of text instead of pictures."""
    vision = replace(
        model.bundle.vision, size=(1, TOKENS), fit="stretch", resample="bilinear", rescale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3,
        tokens_per_frame=TOKENS, grid=(1, TOKENS), closing=None, group=1, positions="rows", before="", after="",
    )  # fmt: skip
    chat = replace(model.bundle.chat, opening="", ending="")
    engine = cast(Engine, TokenRows(model.engine, model.bundle.decoder.row_width))
    return replace(model, bundle=replace(model.bundle, vision=vision, chat=chat), engine=engine, closing=model.closing[:0])


def pixels_of(ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Turn token ids ``[T, TOKENS]`` into frames ``[T, 1, TOKENS, 3]``. Each pixel's three channels are the bytes of one id."""
    return np.stack([ids >> shift & 255 for shift in (0, 8, 16)], -1).astype(np.uint8)[:, None]


def make_facts(words: Words, stream: int, frames: int, encode: Encode) -> Case:
    """Make a stream of text-facts and a question about each visitor.

    Raises UserError if the stream is too short to name all visitors.
    """
    rng = np.random.default_rng([*words, stream, 3])
    newest = frames - frames // 8
    if frames // 8 < NEAR + 1 or newest < VISITORS - NEAR:
        raise UserError(f"--frames {frames}: too few for a stream's {VISITORS} visitors; set {8 * (NEAR + 1)} or more")
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
        questions.append(TextQuestion(KINDS[TEXT_FACTS][frame < newest], text, family[visitor], evidence, frame))
    return Case(pixels_of(ids), owners, questions)


def make_scenes(words: Words, stream: int, frames: int, encode: Encode) -> Case:
    """Make a stream of text-scenes and a question about each person.

    Questions ask alternately for a family name and for a city. In each frame, a sentence names each person who is there. Raises
    UserError if the tokenizer splits most names into several tokens.
    """
    rng = np.random.default_rng([*words, stream, 4])
    given, family, city = (_draw_names(rng, names, encode) for names in (GIVEN, FAMILY, CITY))
    people = [encode(f" {one} {two}, {three}.") for one, two, three in zip(given, family, city, strict=True)]
    quiet, opening = [encode(f" {text}.") for text in QUIET], encode(f" {FIRST} {given[0]} {family[0]}.")
    there, until, coming = [-1] * SLOTS, rng.integers(0, EMPTY[1], SLOTS), 0
    until[rng.integers(SLOTS)] = 0
    ids, owners = np.zeros((frames, TOKENS), np.int64), np.full((frames, TOKENS), -1, np.int32)
    for frame in range(frames):
        for slot in np.flatnonzero(until <= frame).tolist():
            if there[slot] >= 0 or coming == PEOPLE:
                there[slot], (least, most) = -1, EMPTY
            else:
                there[slot], coming, (least, most) = coming, coming + 1, STAY
            until[slot] = frame + rng.integers(least, most + 1)
        if rng.random() < SWAPS:
            ours, theirs = rng.permutation(SLOTS)[:2].tolist()
            there[ours], there[theirs], until[ours], until[theirs] = there[theirs], there[ours], until[theirs], until[ours]
        shown = {slot: people[who] if who >= 0 else quiet[slot] for slot, who in enumerate(there)}
        shown |= {there.index(0): opening} if frame == 0 else {}
        ids[frame] = [*encode(ALWAYS), *(token for part in shown.values() for token in part)]
        owners[frame, -SLOTS * len(opening) :] = np.repeat(there, len(opening))
    owners[0, owners[0] == 0] = PEOPLE  # the opening sentence counts as an object of its own
    questions: list[CaseQuestion] = []
    for who in range(coming):
        is_now, asks_city = who in there, who % 2
        start, answer = (f"{given[who]} {family[who]},", city[who]) if asks_city else (given[who], family[who])
        questions.append(_asked(("past", "now")[is_now] + ("_name", "_city")[asks_city], start, answer, owners == who))
    return Case(pixels_of(ids), owners, [*questions, _asked("first_name", FIRST, given[0], owners == PEOPLE)])


def _asked(kind: str, start: str, answer: str, shows: NDArray[np.bool_]) -> TextQuestion:
    """Make a question. ``shows``: which tokens show the answer, bool ``[T, TOKENS]``."""
    shows[:-1] &= not kind.startswith("now")
    evidence = np.flatnonzero(shows)
    return TextQuestion(kind, f"Who was there?\n{ALWAYS[1:]} {start}", answer, evidence, int(evidence[-1]) // TOKENS)


def _draw_names(rng: np.random.Generator, names: str, encode: Encode) -> list[str]:
    """Draw PEOPLE names that are one token each. Raises UserError if there are too few such names."""
    short = [name for name in names.split() if len(encode(f" {name}")) == 1]
    if len(short) < PEOPLE:
        raise UserError(
            f"this model splits names such as {names.split()[0]} into several tokens; use a model trained on English text"
        )
    return rng.permutation(short)[:PEOPLE].tolist()


def _sentences(rng: np.random.Generator, encode: Encode) -> list[list[int]]:
    """Draw SENTENCES sentences without names, as token ids."""
    parts = [[" ".join(part.split()) for part in of.split("|")] for of in (WHO, DID, WHAT, WHERE)]
    drawn = ([of[rng.integers(len(of))] for of in parts] for _ in range(SENTENCES))
    return [encode(f" {' '.join(filter(None, words))}.") for words in drawn]


def _fill(rng: np.random.Generator, sentences: list[list[int]], tokens: int) -> list[list[int]]:
    """Draw sentences of ``tokens`` tokens in total. Raises UserError if no sentences add up to this number of tokens."""
    reach, lengths = {0}, set(map(len, sentences))
    for end in range(1, tokens + 1):
        reach |= {end} if any(end - length in reach for length in lengths) else set()
    if tokens not in reach:
        raise UserError(f"no sentences have a total of {tokens} of this model's tokens; use a model trained on English text")
    parts: list[list[int]] = []
    while tokens:
        fitting = [sentence for sentence in sentences if tokens - len(sentence) in reach]
        parts.append(fitting[rng.integers(len(fitting))])
        tokens -= len(parts[-1])
    return parts


TEXT_SUITES: dict[str, Callable[[Words, int, int, Encode], Case]] = {TEXT_FACTS: make_facts, TEXT_SCENES: make_scenes}
