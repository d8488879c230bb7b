"""Make batches for the decoder: streams of kept tokens, each followed by about 20 packed blocks of questions.

A block is up to three turns about one moment. It attends to itself and to the frames up to that moment. Streams look as in a
memory: whole; thinned at their original positions; thinned with the older part re-indexed to dense positions; or reduced to the
rest of a long stream, with questions only about now. In some, the first frames are far from the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from edgevlm.calib.demo.questions import draw, is_about_now, subject
from edgevlm.calib.demo.world import History, World
from edgevlm.runtime.taught import KINDS

from .model import PATCHES, TRAINED_LENGTH, prefix_ids, turn_ids

UNKNOWN = -100  # a label that losses ignore


@dataclass(slots=True)
class TrainingStream:
    """A stream of T frames, with labels for the losses."""

    frames: np.ndarray  # uint8 [T, H, W, 3]
    owners: np.ndarray  # int32 [T, 16]: number of the object in the patch, or -1
    facts: np.ndarray  # int64 [T, 16, len(FACTS)], class labels or UNKNOWN
    asked: dict[int, History]  # frame -> history after it

    @property
    def occupied(self) -> np.ndarray:
        """Which patches show an object: bool [T, 16]."""
        return self.owners >= 0


# What a token should know after the third layer, for auxiliary losses, with the number of classes. For each object: the object
# that entered before it (class 8 for the first), and how many of its colour came before. For the last patch of each frame: how
# many objects are present, and which one left last (class 8 for none).
OF_OBJECTS = {"prior_color": 9, "prior_shape": 9, "quadrant": 4, "entering": 2, "entries": 16, "alike": 4}
FACTS = OF_OBJECTS | {"present": 4, "gone_color": 9, "gone_shape": 9}


def make_stream(
    seed: list[int],
    length: int,
    asked: list[int],
    event_rate: float | None = None,
    hard: bool = False,
    make_world: Callable[..., World] = World,
) -> TrainingStream:
    """Return the first `length` frames of the seed's world, with histories after the frames in `asked`."""
    world = make_world(seed, event_rate, hard)
    history = world.history
    stream = TrainingStream(
        frames=np.empty((length, world.size, world.size, 3), dtype=np.uint8),
        owners=np.empty((length, 16), dtype=np.int32),
        facts=np.full((length, 16, len(FACTS)), UNKNOWN, dtype=np.int64),
        asked={},
    )
    identities = [(8, 8)]  # (colour, shape) by number + 1; what precedes the first object has its own class
    for time in range(length):
        stream.frames[time] = world.step()
        stream.owners[time] = world.owners
        if len(identities) == history.entries:
            identities.append((history.things[-1].color, history.things[-1].shape))
        for thing in history.present:
            prior = identities[thing.number]
            entering = int(thing.entered == time)
            alike = sum(other[0] == thing.color for other in identities[1 : thing.number + 1])
            known = (*prior, thing.quadrant, entering, min(history.entries, 15), min(alike, 3))
            stream.facts[time, stream.owners[time] == thing.number, : len(OF_OBJECTS)] = known
        gone = max(history.gone, key=lambda thing: thing.left or 0, default=None)
        last = (gone.color, gone.shape) if gone else (8, 8)
        stream.facts[time, -1, len(OF_OBJECTS) :] = (len(history.present), *last)
        if time in asked:
            stream.asked[time] = history.snapshot()
    return stream


WEIGHTS = {  # relative frequency of each kind of question
    "now_count": 1.2, "now_color": 2.5, "now_shape": 1.5, "now_where": 2.0, "now_seen": 2.0,
    "past_color": 4.0, "past_shape": 1.5, "past_where": 2.0, "past_seen": 2.0, "first_shape": 0.7, "first_color": 0.7,
    "before": 2.5, "left_last": 2.0, "count_color": 1.5,
}  # fmt: skip
MAX_FRAMES = 136
LENGTHS = {0.1: (4, 16), 0.25: (4, 40), 0.5: (4, 72), 1.0: (4, MAX_FRAMES)}  # progress -> minimum and maximum frames until then
LONG_FRAMES = 240  # a stream's length in frames if the model keeps little of it
HARD_FRACTION = 0.3  # fraction of streams with a moving background
TEXT_ROOM = 64  # positions kept free for a conversation


@dataclass(slots=True)
class Batch:
    """B streams, padded on the right to V vision tokens (prefix included) and Q question tokens; N vision tokens in all."""

    patches: torch.Tensor  # uint8 [F, H, W, 3]: the frames with kept tokens
    sources: torch.Tensor  # int64 [N]: each vision token's index among the F * 16 patches
    places: torch.Tensor  # int64 [N]: each vision token's index in the flattened [B * V]
    prefix: torch.Tensor  # int64 [P]
    questions: torch.Tensor  # int64 [B, Q]
    positions: torch.Tensor  # int64 [B, V + Q]
    mask: torch.Tensor  # bool [B, 1, Q, V + Q]
    labels: torch.Tensor  # int64 [B, Q]: the next token if it belongs to an answer, else UNKNOWN
    evidence: torch.Tensor  # bool [B, Q, V]: the vision tokens that show the answer with the next token
    facts: torch.Tensor  # int64 [N, len(FACTS)]
    blocks: torch.Tensor  # int64 [B, Q]: the block of each question token, -1 for padding
    kinds: list[list[str]]  # [B][blocks]: the kind of question in each block's last turn

    @property
    def vision_length(self) -> int:
        return self.positions.shape[1] - self.questions.shape[1]


@dataclass(slots=True)
class Turn:
    """A question about one moment, its answer, and where the answer can be seen."""

    kind: str
    question: str
    answer: str
    subject: int | None = None  # number of the object that shows the answer, if one does
    since: int = 0  # first frame that may show it


@dataclass(slots=True)
class QuestionBlock:
    """Turns as n tokens, which attend to the frames up to `moment`."""

    kind: str  # of the last turn
    moment: int
    start: int  # position of the first token
    tokens: list[int]  # n
    labels: list[int]  # n: the next token if it is learned, else UNKNOWN
    turns: list[Turn | None]  # n: the turn whose answer has the next token, if that is learned


@dataclass(slots=True)
class BatchPlan:
    """The contents of one batch."""

    streams: int
    frames: int
    moments: int  # to ask about, per stream
    blocks: int = 12  # blocks of questions per stream
    talks: bool = True  # whether blocks may have earlier turns
    thinned: bool = False
    reindexed: bool = False
    remnant: bool = False  # keeps little of a long stream; asks only about now
    far: bool = False  # leaves a gap between prefix and first frame


def plan_batch(rng: np.random.Generator, progress: float, thin: bool = True, most: int = MAX_FRAMES) -> BatchPlan:
    """Draw a plan. As `progress` grows from 0 to 1, streams get longer and more of them are whole. Without `thin`, all are.

    most: the longest stream's length in frames.
    """
    luck = rng.random()
    if thin and luck < (0.05 if progress < 0.2 else 0.1):
        return BatchPlan(4, LONG_FRAMES, 2, thinned=True, reindexed=True, remnant=True, far=rng.random() < 0.5)
    shortest, longest = next(lengths for until, lengths in LENGTHS.items() if progress <= until)
    frames = int(rng.integers(shortest, min(longest, most) + 1))
    if progress >= 0.5 and rng.random() < 0.1:
        frames = most
    blocks = 12 if frames <= 24 else 24
    talks = progress > 0.25
    far = rng.random() < 0.3
    if not thin or rng.random() < (0.3 if progress < 0.67 else 0.6):
        return BatchPlan(max(1, min(8, 160 // frames)), frames, 6, blocks, talks, far=far)
    streams, reindexed = max(3, min(8, 240 // frames)), bool(rng.random() < 0.5)
    return BatchPlan(streams, frames, 4, blocks, talks, thinned=True, reindexed=reindexed, far=far)


def make_batch(
    seed: list[int], plan: BatchPlan, tokenizer: PreTrainedTokenizerFast, make_world: Callable[..., World] = World
) -> Batch:
    """Return the batch that a seed and a plan determine."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(plan.streams):
        earliest = plan.frames - 8 if plan.remnant else min(2, plan.frames - 1)
        moments = sorted({plan.frames - 1, *rng.integers(earliest, plan.frames, size=plan.moments - 1).tolist()})
        hard = rng.random() < HARD_FRACTION
        event_rate = rng.uniform(0.2, 0.4) if hard else rng.uniform(0.12, 0.3)
        stream = make_stream([*seed, index], plan.frames, moments, event_rate, hard, make_world)
        kept = keep(stream, moments, plan, rng)
        positions = place(kept, plan, rng)
        rows.append((stream, kept, positions, ask_blocks(stream, kept, positions, plan, rng, tokenizer)))
    return collate(rows, tokenizer)


def keep(stream: TrainingStream, moments: list[int], plan: BatchPlan, rng: np.random.Generator) -> np.ndarray:
    """Choose the tokens to keep, bool [T, 16]. Frames just before each moment stay whole, as every policy keeps them."""
    shape = stream.owners.shape
    if not plan.thinned:
        return np.ones(shape, dtype=bool)
    objects, background = (0.3 * rng.random(), 0.05) if plan.remnant else (1.0, 0.25)
    kept = rng.random(shape) < np.where(stream.occupied, objects, background)
    for moment in moments:
        kept[max(0, moment - int(rng.integers(4))) : moment + 1] = True
    return kept


def place(kept: np.ndarray, plan: BatchPlan, rng: np.random.Generator) -> np.ndarray:
    """Return the positions of the kept tokens, int64 [N], in order after the prefix."""
    frames = np.nonzero(kept)[0]
    if plan.reindexed:
        cut = plan.frames - 8 if plan.remnant else int(rng.integers(plan.frames))
        older = int((frames < cut).sum())
        recent = np.flatnonzero(kept[cut:].reshape(-1))
        positions = np.concatenate([np.arange(older), older + recent])
    else:
        positions = np.flatnonzero(kept.reshape(-1))
    start = 2
    if plan.far:
        start += int(rng.integers(max(1, TRAINED_LENGTH - TEXT_ROOM - start - positions[-1])))
    return start + positions


def ask_blocks(
    stream: TrainingStream,
    kept: np.ndarray,
    positions: np.ndarray,
    plan: BatchPlan,
    rng: np.random.Generator,
    tokenizer: PreTrainedTokenizerFast,
) -> list[QuestionBlock]:
    """Return the packed question blocks of one stream."""
    names = [kind for kind in WEIGHTS if kind in KINDS and (is_about_now(kind) or not plan.remnant)]
    weights = np.array([WEIGHTS[name] for name in names])
    frames = np.nonzero(kept)[0]
    moments = sorted(stream.asked)
    blocks = []
    for index in range(plan.blocks):
        moment = moments[index % len(moments)]
        start = int(positions[frames <= moment].max()) + 1
        earlier = [asked for asked in moments if asked <= moment]
        then = moment if rng.random() < 0.7 else earlier[int(rng.integers(len(earlier)))]  # when earlier turns were asked
        talk = int(rng.choice(3, p=(0.75, 0.15, 0.1))) if plan.talks else 0
        turns = [draw_turn(names, weights, stream.asked[then], rng) for _ in range(talk)]
        turns.append(draw_turn(names, weights, stream.asked[moment], rng))
        blocks.append(write_block(turns, moment, start, tokenizer, learn_all=then == moment))
    return blocks


def draw_turn(names: list[str], weights: np.ndarray, history: History, rng: np.random.Generator) -> Turn:
    """Return a random question that has an answer, and the answer. Some questions lack their question mark."""
    while True:
        kind = str(rng.choice(names, p=weights / weights.sum()))
        if drawn := draw(kind, history, rng):
            question, answer = drawn
            thing = subject(question, history)
            text = question.text.rstrip("?" if rng.random() < 0.1 else "")
            return Turn(kind, text, answer, thing.number if thing else None, history.now if is_about_now(kind) else 0)


def write_block(
    turns: list[Turn], moment: int, start: int, tokenizer: PreTrainedTokenizerFast, learn_all: bool = False
) -> QuestionBlock:
    """Write turns as tokens, as the chat template does, at positions from `start`. The last answer is learned, or all are."""
    user = prefix_ids(tokenizer)[-1]
    block = QuestionBlock(turns[-1].kind, moment, start, [], [], [])
    for turn in turns:
        asked, answered = turn_ids(tokenizer, turn.question, turn.answer)
        asked = [user] * bool(block.tokens) + asked
        learned = learn_all or turn is turns[-1]
        block.tokens += asked + answered
        block.labels += [UNKNOWN] * (len(asked) - 1) + (answered if learned else [UNKNOWN] * len(answered)) + [UNKNOWN]
        block.turns += [None] * (len(asked) - 1) + [turn if learned else None] * (len(answered) - 1) + [None, None]
    return block


def collate(rows: list[tuple], tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Put (stream, kept, positions, blocks) of every row into padded arrays."""
    prefix = prefix_ids(tokenizer)
    vision = len(prefix) + max(int(kept.sum()) for _, kept, _, _ in rows)
    asked = max(sum(len(block.tokens) for block in blocks) for *_, blocks in rows)
    size = len(rows)
    positions = np.zeros((size, vision + asked), dtype=np.int64)
    questions = np.full((size, asked), tokenizer.pad_token_id, dtype=np.int64)
    labels = np.full((size, asked), UNKNOWN, dtype=np.int64)
    block_of = np.full((size, asked), -1, dtype=np.int64)
    moment_of = np.full((size, asked), -1, dtype=np.int64)
    frame_of = np.full((size, vision), 1 << 30, dtype=np.int64)  # padding counts as later than any moment
    evidence = np.zeros((size, asked, vision), dtype=bool)
    patches, sources, places, facts = [], [], [], []
    held = 0  # frames in `patches` so far
    for row, (stream, kept, spots, blocks) in enumerate(rows):
        count = len(spots)
        frames = np.nonzero(kept)[0]
        used = np.flatnonzero(kept.any(axis=1))
        patches.append(stream.frames[used])
        sources.append(np.flatnonzero(kept[used].reshape(-1)) + held * PATCHES)
        held += len(used)
        places.append(row * vision + len(prefix) + np.arange(count))
        facts.append(stream.facts[kept])
        positions[row, : len(prefix)] = np.arange(len(prefix))
        positions[row, len(prefix) : len(prefix) + count] = spots
        frame_of[row, : len(prefix)] = -1
        frame_of[row, len(prefix) : len(prefix) + count] = frames
        owners = stream.owners[kept]
        at = 0
        for index, block in enumerate(blocks):
            span = slice(at, at + len(block.tokens))
            questions[row, span], labels[row, span] = block.tokens, block.labels
            block_of[row, span], moment_of[row, span] = index, block.moment
            positions[row, vision + span.start : vision + span.stop] = block.start + np.arange(len(block.tokens))
            for place, turn in enumerate(block.turns, start=at):
                if turn and turn.subject is not None:
                    shown = (owners == turn.subject) & (frames >= turn.since) & (frames <= block.moment)
                    evidence[row, place, len(prefix) : len(prefix) + count] = shown
            at = span.stop
    seen = frame_of[:, None, :] <= moment_of[:, :, None]
    seen[:, :, : len(prefix)] = True
    same = block_of[:, None, :] == block_of[:, :, None]
    mask = np.concatenate([seen, same & np.tri(asked, dtype=bool)], axis=2)[:, None]
    return Batch(
        patches=torch.from_numpy(np.concatenate(patches)),
        sources=torch.from_numpy(np.concatenate(sources)),
        places=torch.from_numpy(np.concatenate(places)),
        prefix=torch.tensor(prefix),
        questions=torch.from_numpy(questions),
        positions=torch.from_numpy(positions),
        mask=torch.from_numpy(mask),
        labels=torch.from_numpy(labels),
        evidence=torch.from_numpy(evidence),
        facts=torch.from_numpy(np.concatenate(facts)),
        blocks=torch.from_numpy(block_of),
        kinds=[[block.kind for block in blocks] for *_, blocks in rows],
    )
