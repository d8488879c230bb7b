"""Where the work is done: one model, one stream at a time, one policy and budget after another; a process each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from edgevlm.bench.accuracy.cells import PLAIN, Cell, Skipped, equal_cells
from edgevlm.bench.accuracy.entries import FULL, ORACLE, WHOLE, Budget, Entry
from edgevlm.bench.accuracy.longstream import LONGSTREAM, make_long_exam
from edgevlm.bench.accuracy.oracle import make_oracle
from edgevlm.bench.accuracy.pool import spread
from edgevlm.bench.accuracy.sitting import CHUNK, ROOM, SharedFeatures, sit, watch
from edgevlm.bench.accuracy.streamqa import Exam, make_exam, seed_words
from edgevlm.bench.accuracy.turns import GUIDED, take_turns
from edgevlm.calib.footprint import Footprint, bytes_per_token
from edgevlm.calib.journal import Record
from edgevlm.errors import UserError
from edgevlm.runtime.auto import AUTO, chosen_policy
from edgevlm.runtime.bundle import MANIFEST, hash_file
from edgevlm.runtime.engine import Engine
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy, create_policy
from edgevlm.runtime.session import Session


@dataclass(frozen=True, slots=True)
class Settings:
    """What results depend on beside policy, budget and stream. seed: a number, or ``test``; turns: 0 for the plain exam."""

    model: str = "demo"
    frames: int = 64
    seed: str = "0"
    turns: int = 0
    suite: str = "streamqa"


CEILING = Cell(f"{ORACLE}/spread+frame", "ceiling", 1024)
"""What stands in for full KV where a stream is too long for it: the evidence is kept, and half of the positions are free."""

MEASURED = 256
"""Frames of a long stream in which a policy's bytes are measured beforehand: all of its arrays are there by then."""


@dataclass(frozen=True, slots=True)
class Task:
    cell: Cell
    stream: int


class Desk:
    """Makes exams and has policies sit them. model: one that is loaded already.

    Raises UserError for a model that does not see the world's patches.
    """

    def __init__(self, settings: Settings, model: Model | None = None) -> None:
        self.settings, self.words = settings, seed_words(settings.seed)
        model = model or Model.load(settings.model, threads=1)
        self.shared = SharedFeatures(model.engine)
        self.model = replace(model, engine=cast(Engine, self.shared))
        self.per_frame = model.bundle.vision.tokens_per_frame
        self._long = settings.suite == LONGSTREAM
        self._stream, self._exam = -1, self._make(0, 1)
        patches = self._exam.owners.shape[1]
        if self.per_frame != patches:
            raise UserError(
                f"{settings.suite} shows frames of {patches} patches and {settings.model} has {self.per_frame} tokens a frame; "
                "give --model demo, or a bundle trained on the demo world"
            )

    @property
    def identity(self) -> str:
        """What a journal's header says of this model: the hash of its manifest, which lists the hashes of its files."""
        return hash_file(self.model.bundle.path / MANIFEST).sha256[:16]

    def exam(self, stream: int) -> Exam:
        if stream != self._stream:
            self.shared.forget()
            self._stream, self._exam = stream, self._make(stream, self.settings.frames)
        return self._exam

    def _make(self, stream: int, frames: int) -> Exam:
        if self._long:
            return make_long_exam(self.words, stream, frames)
        return make_exam(self.words, stream, frames, self.settings.suite)

    def perform(self, task: Task) -> Record:
        """One policy at one budget on one stream."""
        cell, exam = task.cell, self.exam(task.stream)
        policy, tokens = self._candidate(cell, exam)
        reindexing = Entry(cell.label).reindexing
        key = {"policy": cell.label, "budget": cell.budget, "stream": task.stream}
        if self.settings.turns:
            order = [*self.words, task.stream, 2]
            return key | take_turns(self.model, exam, policy, tokens, reindexing, self.settings.turns, order)
        sitting = sit(self.model, exam, policy(), tokens, reindexing)
        if cell.allowed and sitting.bytes > cell.allowed:
            raise RuntimeError(f"{cell.label} at {cell.budget} took {sitting.bytes} bytes and was allowed {cell.allowed}")
        return key | sitting.record(with_kept=task.stream == 0 and not self._long)

    def _candidate(self, cell: Cell, exam: Exam) -> tuple[Callable[[], Policy], int]:
        """What makes the policy, and its |M|: for the guided one the whole stream, of which a question leaves the cell's."""
        entry = Entry(cell.label)
        if cell.label == GUIDED:
            whole = exam.owners.size
            return partial(create_policy, f"{GUIDED}:target={cell.tokens / whole}"), whole
        if entry.is_oracle:
            return partial(make_oracle, cell.label.removeprefix(f"{ORACLE}/"), exam), cell.tokens
        return partial(self._policy, entry, cell.tokens), cell.tokens

    def _policy(self, entry: Entry, tokens: int) -> Policy:
        return chosen_policy(self.model.bundle, tokens)[0] if entry.policy == AUTO else create_policy(entry.policy)

    def cells(self, entries: Sequence[Entry], budget: Budget) -> Iterator[Cell | Skipped]:
        """Each entry at the budget at which it takes no more bytes than a plain window does, or why it cannot be."""
        tokens = budget.tokens(self.settings.frames * self.per_frame)
        per_token = bytes_per_token(self.model.bundle)
        free = [entry for entry in entries if entry.is_oracle or entry.label == GUIDED]
        yield from equal_cells(entries, budget.text, tokens, per_token, self.per_frame, self._taken, free)

    def ceiling(self) -> Cell:
        """What decides which kinds of question enter: full KV, or on long streams what an oracle keeps.

        Raises UserError when the model has no positions for all of a stream that is not a long one.
        """
        if self._long:
            return CEILING
        frames, full = self.settings.frames, create_policy("full")
        Session.open(self.model, policy=full, room=ROOM).close()  # with all it can have
        most = full.budget // self.per_frame
        if frames > most:
            raise UserError(
                f"--frames {frames}: full KV must hold the whole stream, and this model has positions for {most} frames; "
                "give that many or fewer"
            )
        return Cell(FULL, WHOLE.text, frames * self.per_frame)

    def _taken(self, entry: Entry, tokens: int) -> int:
        """Bytes that cache and policy take at most, watching one stream."""
        exam, policy = self.exam(0), self._policy(entry, tokens)
        if self._long:
            exam = replace(exam, frames=exam.frames[:MEASURED])
        with Session.open(
            self.model, policy=policy, budget=tokens, reindexing=entry.reindexing, chunk=CHUNK, room=ROOM
        ) as session:
            if entry == PLAIN:
                footprint = Footprint()
                footprint.measure(session.cache, policy)
            else:
                footprint = watch(session, policy, exam)
        return footprint.peak


def perform_all(desk: Desk, tasks: Iterable[Task], workers: int) -> Iterator[Record]:
    """Records as they are done, see :func:`edgevlm.bench.accuracy.pool.spread`."""
    yield from spread(desk.perform, partial(_seat, desk.settings), tasks, workers)


def _seat(settings: Settings) -> Callable[[Task], Record]:
    return Desk(settings).perform
