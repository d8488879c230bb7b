"""Make the demo world's suites: streams, questions after the last frame, and the tokens that show the answers.

``streamqa`` asks a question of each kind. ``streamqa-hard`` has a moving background and nearly twice as many events.
``longstream`` asks about objects last shown tens, hundreds or thousands of frames ago. Tokens are numbered from the start of
the stream, ``frame * tokens_per_frame + patch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from edgevlm.calib.demo import questions as demo
from edgevlm.calib.demo.world import LongWorld, World, plan_visits
from edgevlm.errors import UserError
from edgevlm.runtime.evidence import Evidence, Moment
from edgevlm.runtime.taught import COLORS, SHAPES

DEVELOPMENT = 2_000_000  # the first integer of each development seed; training seeds begin with small integers
TEST_SEEDS = (3_000_000, 7)  # the first integers of each test seed; choose and tune nothing on test streams
LONGSTREAM = "longstream"
Words = tuple[int, int]
Drawn = tuple[demo.Question, str]  # a question and its right answer

OF_A_VISIT = ("past_color", "past_where", "past_seen")
OF_THE_FIRST = ("first_color", "first_shape")
OF_NOW = ("now_count", "now_color", "now_where")

SUITES: dict[str, Callable[[list[int]], World]] = {"streamqa": World, "streamqa-hard": partial(World, hard=True)}


@dataclass(frozen=True, slots=True)
class CaseQuestion:
    """A question with its one right answer.

    ``evidence``: the numbers of the tokens that show the answer, ascending int64; empty if the answer is "no". For questions
    about the present, only the newest frame has evidence. ``last``: the last frame with evidence, or None.
    """

    kind: str
    text: str
    answer: str
    evidence: NDArray[np.int64]
    last: int | None

    @property
    def is_about_now(self) -> bool:
        return demo.is_about_now(self.kind)

    def is_right(self, answer: str) -> bool:
        return answer == self.answer


@dataclass(frozen=True, slots=True)
class Case:
    """A stream's frames, uint8 ``[T, H, W, 3]``, and questions. ``owners``: each patch's object, or -1, int32 ``[T, p]``."""

    frames: NDArray[np.uint8]
    owners: NDArray[np.int32]
    questions: list[CaseQuestion]

    def quarter(self, question: CaseQuestion) -> int | None:
        """Return the quarter of the stream, 1 to 4, in which the evidence was last seen, or None without evidence."""
        return None if question.last is None else 1 + question.last * 4 // len(self.frames)

    def gap(self, question: CaseQuestion) -> int | None:
        """Return how many frames ago the evidence was last seen, or None without evidence."""
        return None if question.last is None else len(self.frames) - 1 - question.last


def seed_words(text: str) -> Words:
    """Return the integers that begin every random seed. Raises UserError unless ``text`` is ``test`` or a number."""
    if text == "test":
        return TEST_SEEDS
    if not text.isdecimal():
        raise UserError(f"--seed {text}: give an integer from 0, or test for the seeds reserved for reports")
    return DEVELOPMENT, int(text)


def make_case(
    words: Words, stream: int, frames: int, suite: str = "streamqa", noise: float = 0.0, crf: int | None = None
) -> Case:
    """Make a stream and its questions. The same arguments always give the same stream.

    ``noise``: the standard deviation of the noise added to each pixel, in grey levels from 0 to 255. ``crf``: passed to
    :func:`through_h264`; None skips H.264.
    """
    rng = np.random.default_rng([*words, stream, 1])
    seed, is_long = [*words, stream], suite == LONGSTREAM
    world = LongWorld(seed, plan_visits(rng, frames) if frames > 1 else []) if is_long else SUITES[suite](seed)
    shown, owners = [], []
    for _ in range(frames):
        shown.append(world.step())
        owners.append(world.owners)
    held = np.array(owners, np.int32)
    drawn = _long_questions(world, rng) if isinstance(world, LongWorld) else _drawn(demo.OFFERED, world, rng)
    images = np.array(shown)
    if noise:
        levels = images + np.random.default_rng([*words, stream, 2]).normal(0, noise, images.shape)
        images = np.clip(np.rint(levels), 0, 255).astype(np.uint8)
    images = images if crf is None else through_h264(images, crf)
    return Case(images, held, [make_question(asked, answer, world, held) for asked, answer in drawn])


def through_h264(images: NDArray[np.uint8], crf: int) -> NDArray[np.uint8]:
    """Encode frames ``[T, H, W, 3]`` as H.264 (4:2:0, no B-frames, a keyframe every 25 frames), and decode them.

    ``crf``: x264's constant rate factor, 0 to 51; a higher value gives lower quality.
    """
    import av  # imported here because importing PyAV is slow and most runs do not need PyAV

    encoder = av.CodecContext.create("libx264", "w")
    encoder.height, encoder.width = images.shape[1:3]
    encoder.pix_fmt, encoder.time_base = "yuv420p", Fraction(1, 25)
    encoder.options = {"crf": str(crf), "tune": "zerolatency", "g": "25", "threads": "1"}
    frames = (av.VideoFrame.from_ndarray(image, format="rgb24") for image in images)
    packets = [packet for frame in (*frames, None) for packet in encoder.encode(frame)]
    decoder = av.CodecContext.create("h264", "r")
    return np.stack([shown.to_ndarray(format="rgb24") for packet in (*packets, None) for shown in decoder.decode(packet)])


def _drawn(kinds: Iterable[str], world: World, rng: np.random.Generator) -> list[Drawn]:
    return [pair for kind in kinds if (pair := demo.draw(kind, world.history, rng))]


def _long_questions(world: LongWorld, rng: np.random.Generator) -> list[Drawn]:
    """Draw questions about each visit, about objects that never came, about the first object and about the newest frame."""
    drawn: list[Drawn] = []
    for visit, kind in product(world.visits, OF_A_VISIT):
        phrasing = int(rng.integers(len(demo.KINDS[kind].phrasings)))
        question = demo.ask(kind, phrasing, visit.color if demo.KINDS[kind].has(demo.COLOR) else None, visit.shape)
        answer = demo.truth(question, world.history)
        assert answer is not None, "nothing else has its shape"
        drawn.append((question, answer))
    pairs = [pair for pair in product(range(len(COLORS)), range(len(SHAPES))) if pair not in world.history.shown]
    for _ in world.visits:
        color, shape = pairs[int(rng.integers(len(pairs)))]
        drawn.append((demo.ask("past_seen", int(rng.integers(len(demo.KINDS["past_seen"].phrasings))), color, shape), "no"))
    return [*drawn, *_drawn((*OF_THE_FIRST, *OF_NOW), world, rng)]


def make_question(asked: demo.Question, answer: str, world: World, owners: NDArray[np.int32]) -> CaseQuestion:
    """Make a question and find its evidence. ``owners``: int32 ``[T, p]``, the number of the object in each patch, or -1."""
    shows = np.isin(owners, carriers(asked, world))
    if demo.is_about_now(asked.kind):
        shows[:-1] = False
    evidence = np.flatnonzero(shows)
    last = int(evidence[-1]) // owners.shape[1] if len(evidence) else None
    return CaseQuestion(asked.kind, asked.text, answer, evidence, last)


def carriers(asked: demo.Question, world: World) -> list[int]:
    """Return the numbers of the objects that show the answer: the object asked about, or all objects that are counted."""
    history = world.history
    thing = demo.subject(asked, history)
    if thing is not None:
        return [thing.number]
    among = history.present if demo.is_about_now(asked.kind) else history.things
    return [other.number for other in among if asked.color in (None, other.color) and asked.shape in (None, other.shape)]


@dataclass(frozen=True, slots=True)
class EvidenceScore:
    """How well the evidence reported with an answer matches the true evidence.

    ``hit1``: whether the first reported frame shows the answer. ``hit3``: whether any reported frame shows it. ``overlap``:
    intersection over union of the first reported box and the patches that show the answer. ``held``: whether any layer holds a
    token that shows the answer. ``said_held``: the value of ``held`` that the answer reported, or None.
    """

    hit1: bool
    hit3: bool
    overlap: float
    held: bool
    said_held: bool | None


def score_evidence(
    found: Evidence, case: Case, question: CaseQuestion, held: NDArray[np.bool_], grid: tuple[int, int]
) -> EvidenceScore:
    """Score the evidence that came with an answer.

    ``held``: whether the cache holds a token, bool ``[layers, kv_heads, stream's tokens]``.
    """
    tokens, overlap = case.owners.shape[1], 0.0
    there = question.is_about_now or bool(held[:, :, question.evidence].any())
    frames = question.evidence // tokens
    shown = [question.evidence[(moment.frame <= frames) & (frames <= moment.last_frame)] for moment in found.moments]
    if shown:
        overlap = _overlap(found.moments[0], shown[0] % tokens, tokens, grid)
    hits = [len(tokens_of) > 0 for tokens_of in shown]
    return EvidenceScore(hits[:1] == [True], any(hits), overlap, there, found.held)


def _overlap(moment: Moment, patches: NDArray[np.int64], tokens: int, grid: tuple[int, int]) -> float:
    true = np.zeros(tokens, bool)
    true[patches] = True
    left, top, right, bottom = np.array(moment.box) * [grid[1], grid[0], grid[1], grid[0]]
    rows, columns = np.divmod(np.arange(tokens), grid[1])
    boxed = (left - 0.5 < columns) & (columns < right - 0.5) & (top - 0.5 < rows) & (rows < bottom - 0.5)
    return float((boxed & true).sum() / max(1, (boxed | true).sum()))
