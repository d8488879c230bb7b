"""The demo world's suites: streams, the questions asked after their last frame, and the tokens that show each answer.

streamqa asks one question of each kind; the background of streamqa-hard moves and is cut, and nearly twice as much happens;
longstream asks what was last shown tens, hundreds or thousands of frames ago. A token is numbered by its place in the stream,
``frame * tokens_per_frame + patch``, whatever a policy keeps.
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

DEVELOPMENT = 2_000_000  # first word of seeds in development, ``[DEVELOPMENT, seed, stream]``; training's are small numbers
TEST_SEEDS = (3_000_000, 7)  # first words of the seeds of ``--seed test``: nothing may be chosen or tuned on them
LONGSTREAM = "longstream"
Words = tuple[int, int]
Drawn = tuple[demo.Question, str]  # and its right answer

OF_A_VISIT = ("past_color", "past_where", "past_seen")
OF_THE_FIRST = ("first_color", "first_shape")
OF_NOW = ("now_count", "now_color", "now_where")

SUITES: dict[str, Callable[[list[int]], World]] = {"streamqa": World, "streamqa-hard": partial(World, hard=True)}


@dataclass(frozen=True, slots=True)
class CaseQuestion:
    """A question with its one right answer.

    evidence: ascending tokens that show the answer, int64 (for a question about now only the newest frame's); empty if nothing
    shows it (a "no"). last: the last frame that showed it, None without evidence.
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
    """One stream. frames: uint8 ``[T, H, W, 3]``; owners: int32 ``[T, p]``, the object in each patch, -1 for none."""

    frames: NDArray[np.uint8]
    owners: NDArray[np.int32]
    questions: list[CaseQuestion]

    def quarter(self, question: CaseQuestion) -> int | None:
        """Return the quarter of the stream in which the evidence was last seen, 1 the oldest; None without evidence."""
        return None if question.last is None else 1 + question.last * 4 // len(self.frames)

    def gap(self, question: CaseQuestion) -> int | None:
        """Return the number of frames from the last that shows the evidence to the newest; None without evidence."""
        return None if question.last is None else len(self.frames) - 1 - question.last


def seed_words(text: str) -> Words:
    """Return the first words of the worlds' seeds for ``test`` or a number. Raises UserError."""
    if text == "test":
        return TEST_SEEDS
    if not text.isdecimal():
        raise UserError(f"--seed {text}: give a number from 0 up, or test for the seeds kept for reports")
    return DEVELOPMENT, int(text)


def make_case(
    words: Words, stream: int, frames: int, suite: str = "streamqa", noise: float = 0.0, crf: int | None = None
) -> Case:
    """Make the ``stream``-th stream of a seed, always the same.

    noise: for each pixel, the deviation in levels of 255. crf: then encode and decode the frames as :func:`through_h264`.
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
    """Encode and decode frames ``[T, H, W, 3]`` as a camera does: H.264, 4:2:0, no B-frames, a keyframe every 25 frames.

    crf: x264's constant rate factor, 0 to 51; more is worse.
    """
    import av  # slow to import, for runs without it

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
    """Return questions about each visit, pairs that were never shown, the first object, and now."""
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
    """Make a question with its evidence. owners: int32 ``[T, p]``, of the whole stream."""
    shows = np.isin(owners, carriers(asked, world))
    if demo.is_about_now(asked.kind):
        shows[:-1] = False
    evidence = np.flatnonzero(shows)
    last = int(evidence[-1]) // owners.shape[1] if len(evidence) else None
    return CaseQuestion(asked.kind, asked.text, answer, evidence, last)


def carriers(asked: demo.Question, world: World) -> list[int]:
    """Return numbers of the objects that show the answer: the question's subject, or all that a count is about."""
    history = world.history
    thing = demo.subject(asked, history)
    if thing is not None:
        return [thing.number]
    among = history.present if demo.is_about_now(asked.kind) else history.things
    return [other.number for other in among if asked.color in (None, other.color) and asked.shape in (None, other.shape)]


@dataclass(frozen=True, slots=True)
class EvidenceScore:
    """An answer's evidence compared with the truth. hit1, hit3: whether the first, or one of three, frames shows it.

    overlap: intersection over union of the first frame's box and the patches that show it. held: whether any layer holds a true
    patch; said_held: the rule's claim, None without one.
    """

    hit1: bool
    hit3: bool
    overlap: float
    held: bool
    said_held: bool | None


def score_evidence(
    found: Evidence, case: Case, question: CaseQuestion, held: NDArray[np.bool_], grid: tuple[int, int]
) -> EvidenceScore:
    """Score an answer's evidence. held: bool ``[layers, kv_heads, tokens of the stream]``; the newest frame is always seen."""
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
