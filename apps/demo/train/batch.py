"""Batches for the decoder: streams cut down to the tokens kept, with some 20 blocks of questions packed behind each.

A block is up to three turns about one moment; it sees the frames up to that moment and itself. Streams come as a memory
may hold them: whole; thinned, at their original positions; thinned, with the older part re-indexed to dense positions; or
as what is left of a long stream, asked only about now. In some, the first frames are far behind the prefix.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from ..questions import KINDS, draw, is_about_now
from ..world import History
from .model import PATCHES, TRAINED_LENGTH, prefix_ids, turn_ids
from .stream import UNKNOWN, Stream, make_stream

WEIGHTS = {  # how often each kind is drawn
    "now_count": 3.0, "now_color": 1.0, "now_shape": 1.0, "now_where": 1.0, "now_seen": 1.0,
    "past_color": 2.0, "past_shape": 2.0, "past_where": 2.0, "past_seen": 2.0, "first_shape": 1.0, "first_color": 1.0,
    "before": 3.0, "left_last": 2.0, "count_color": 2.0,
}  # fmt: skip
MAX_FRAMES = 72
LENGTHS = {0.08: (4, 16), 0.2: (4, 32), 0.5: (4, 64), 1.0: (12, MAX_FRAMES)}  # frames, up to this progress
LONG_FRAMES = 160  # of the streams of which little is left
TEXT_ROOM = 64  # positions kept free for a conversation


@dataclass(slots=True)
class Batch:
    """B streams, padded on the right to V vision tokens (prefix included) and Q of questions; N vision tokens unpadded."""

    patches: torch.Tensor  # uint8 [F, 56, 56, 3]: the frames that hold a kept token
    sources: torch.Tensor  # int64 [N]: which of the F * 16 patches each vision token is
    places: torch.Tensor  # int64 [N]: where in the flattened [B * V] it goes
    prefix: torch.Tensor  # int64 [P]
    questions: torch.Tensor  # int64 [B, Q]
    positions: torch.Tensor  # int64 [B, V + Q]
    mask: torch.Tensor  # bool [B, 1, Q, V + Q]
    labels: torch.Tensor  # int64 [B, Q]: the next token where it belongs to an answer, else UNKNOWN
    facts: torch.Tensor  # int64 [N, len(FACTS)]
    blocks: torch.Tensor  # int64 [B, Q]: the block of each question token, -1 for padding
    kinds: list[list[str]]  # [B][blocks]: the kind of each block's last turn

    @property
    def vision_length(self) -> int:
        return self.positions.shape[1] - self.questions.shape[1]


@dataclass(slots=True)
class Plan:
    """What one batch is made of."""

    streams: int
    frames: int
    moments: int  # asked about, per stream
    blocks: int = 12  # of questions, per stream
    talks: bool = True  # whether blocks may have earlier turns
    thinned: bool = False
    reindexed: bool = False
    remnant: bool = False  # little left of a long stream; asked only about now
    far: bool = False  # a gap between prefix and first frame


def plan_batch(rng: np.random.Generator, progress: float) -> Plan:
    """Draw a plan; `progress` 0..1 through the run makes streams longer and whole ones more frequent."""
    luck = rng.random()
    if luck < (0.05 if progress < 0.2 else 0.1):
        return Plan(4, LONG_FRAMES, 2, thinned=True, reindexed=True, remnant=True, far=rng.random() < 0.5)
    shortest, longest = next(lengths for until, lengths in LENGTHS.items() if progress <= until)
    frames = int(rng.integers(shortest, longest + 1))
    if progress >= 0.5 and rng.random() < 0.1:
        frames = MAX_FRAMES
    blocks = 12 if frames <= 24 else 24
    talks = progress > 0.25
    far = rng.random() < 0.3
    if rng.random() < (0.3 if progress < 0.67 else 0.6):
        return Plan(max(2, min(8, 160 // frames)), frames, 6, blocks, talks, far=far)
    streams, reindexed = max(3, min(8, 240 // frames)), bool(rng.random() < 0.5)
    return Plan(streams, frames, 4, blocks, talks, thinned=True, reindexed=reindexed, far=far)


def make_batch(seed: list[int], plan: Plan, tokenizer: PreTrainedTokenizerFast) -> Batch:
    """The batch of this seed and plan: always the same."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(plan.streams):
        earliest = plan.frames - 8 if plan.remnant else min(2, plan.frames - 1)
        moments = sorted({plan.frames - 1, *rng.integers(earliest, plan.frames, size=plan.moments - 1).tolist()})
        stream = make_stream([*seed, index], plan.frames, moments, event_rate=rng.uniform(0.12, 0.3))
        kept = keep(stream, moments, plan, rng)
        positions = place(kept, plan, rng)
        rows.append((stream, kept, positions, ask_blocks(stream, kept, positions, plan, rng, tokenizer)))
    return collate(rows, tokenizer)


def keep(stream: Stream, moments: list[int], plan: Plan, rng: np.random.Generator) -> np.ndarray:
    """bool [T, 16], the tokens kept. The frames just before each moment stay whole, as every policy keeps them."""
    shape = stream.owners.shape
    if not plan.thinned:
        return np.ones(shape, dtype=bool)
    objects, background = (0.3 * rng.random(), 0.05) if plan.remnant else (1.0, 0.25)
    kept = rng.random(shape) < np.where(stream.occupied, objects, background)
    for moment in moments:
        kept[max(0, moment - int(rng.integers(4))) : moment + 1] = True
    return kept


def place(kept: np.ndarray, plan: Plan, rng: np.random.Generator) -> np.ndarray:
    """int64 [N], the positions of the kept tokens, in order; the prefix is before them."""
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
    stream: Stream,
    kept: np.ndarray,
    positions: np.ndarray,
    plan: Plan,
    rng: np.random.Generator,
    tokenizer: PreTrainedTokenizerFast,
) -> list[tuple]:
    """The packed blocks: (kind of the last turn, moment, tokens, labels, position of the first token)."""
    names = [kind for kind in WEIGHTS if kind in KINDS and (is_about_now(kind) or not plan.remnant)]
    weights = np.array([WEIGHTS[name] for name in names])
    frames = np.nonzero(kept)[0]
    moments = sorted(stream.asked)
    blocks = []
    for index in range(plan.blocks):
        moment = moments[index % len(moments)]
        start = int(positions[frames <= moment].max()) + 1
        earlier = [asked for asked in moments if asked <= moment]
        turns = []
        for _ in range(int(rng.choice(3, p=(0.7, 0.2, 0.1))) if plan.talks else 0):  # of any earlier moment
            history = stream.asked[earlier[int(rng.integers(len(earlier)))]]
            turns.append(draw_any(names, weights, history, rng)[1:])
        kind, text, answer = draw_any(names, weights, stream.asked[moment], rng)
        blocks.append((kind, moment, *write_block([*turns, (text, answer)], tokenizer), start))
    return blocks


def draw_any(names: list[str], weights: np.ndarray, history: History, rng: np.random.Generator) -> tuple[str, str, str]:
    """(kind, text, answer) of a random kind that can be asked; now and then the text lacks its question mark."""
    while True:
        kind = str(rng.choice(names, p=weights / weights.sum()))
        if drawn := draw(kind, history, rng):
            question, answer = drawn
            return kind, question.text.rstrip("?" if rng.random() < 0.1 else ""), answer


def write_block(turns: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """(question, answer) turns as tokens in the template's way, and their labels: only the last answer counts."""
    user = prefix_ids(tokenizer)[-1]
    tokens: list[int] = []
    for question, answer in turns:
        asked, answered = turn_ids(tokenizer, question, answer)
        tokens += [user] * bool(tokens) + asked + answered
    return tokens, [UNKNOWN] * (len(tokens) - len(answered) - 1) + answered + [UNKNOWN]


def collate(rows: list[tuple], tokenizer: PreTrainedTokenizerFast) -> Batch:
    """Put (stream, kept, positions, blocks) of every row into padded arrays."""
    prefix = prefix_ids(tokenizer)
    vision = len(prefix) + max(int(kept.sum()) for _, kept, _, _ in rows)
    asked = max(sum(len(block[2]) for block in blocks) for *_, blocks in rows)
    size = len(rows)
    positions = np.zeros((size, vision + asked), dtype=np.int64)
    questions = np.full((size, asked), tokenizer.pad_token_id, dtype=np.int64)
    labels = np.full((size, asked), UNKNOWN, dtype=np.int64)
    block_of = np.full((size, asked), -1, dtype=np.int64)
    moment_of = np.full((size, asked), -1, dtype=np.int64)
    frame_of = np.full((size, vision), 1 << 30, dtype=np.int64)  # padding is later than any moment
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
        at = 0
        for index, (_, moment, tokens, targets, start) in enumerate(blocks):
            span = slice(at, at + len(tokens))
            questions[row, span], labels[row, span] = tokens, targets
            block_of[row, span], moment_of[row, span] = index, moment
            positions[row, vision + span.start : vision + span.stop] = start + np.arange(len(tokens))
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
        facts=torch.from_numpy(np.concatenate(facts)),
        blocks=torch.from_numpy(block_of),
        kinds=[[block[0] for block in blocks] for *_, blocks in rows],
    )
