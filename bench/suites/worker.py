"""Where the work is done: one model, one video at a time, all policies and budgets side by side; a process each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import psutil

from edgevlm.apps.sources.folder import FolderSource
from edgevlm.apps.sources.video import VideoSource
from edgevlm.bench.suites.schema import SuiteQuestion
from edgevlm.bench.suites.scoring import Record
from edgevlm.bench.suites.viewing import Opened, VideoOrFolder, segments_of, view
from edgevlm.calib.accuracy.variants import Run, SkippedRun, Variant, equal_byte_runs
from edgevlm.calib.accuracy.worker import CHUNK, FeatureCache
from edgevlm.calib.footprint import Footprint, bytes_per_token
from edgevlm.errors import SourceError, UserError
from edgevlm.runtime.auto import AUTO, chosen_policy
from edgevlm.runtime.budget import TextBudget, frames_ahead
from edgevlm.runtime.bundle import MANIFEST, hash_file
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.engine import Engine
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import create_policy
from edgevlm.runtime.preprocess import Preprocessor
from edgevlm.runtime.session import Session

PROMPT_SHARE = 4  # a prompt may take a quarter of a model's positions


@dataclass(frozen=True, slots=True)
class VideoSettings:
    """What a worker starts from. room: of every session's text; threads: of one call of the model, None for all cores."""

    model: str
    data: Path
    fps: float
    room: TextBudget
    threads: int | None = 1


@dataclass(frozen=True, slots=True)
class VideoTask:
    """One video: all that is asked of it, and the policies and budgets that have not answered yet."""

    video: str
    questions: tuple[SuiteQuestion, ...]
    runs: tuple[Run, ...]


class VideoWorker:
    """Shows videos and collects answers. model: one that is loaded already. Raises UserError as ``Model.load`` does."""

    def __init__(self, settings: VideoSettings, model: Model | None = None) -> None:
        self.settings = settings
        model = model or Model.load(settings.model, threads=settings.threads)
        self.features = FeatureCache(model.engine)
        self.model = replace(model, engine=cast(Engine, self.features))
        self._preprocess = Preprocessor(model.bundle.vision)

    def perform(self, task: VideoTask) -> list[Record]:
        """The answers to a video's questions. Raises UserError when the memory has no room for a session."""
        segments = segments_of(task.questions, task.runs, self._opened)
        try:
            source = self._recording(task)
        except SourceError as error:
            for segment in segments:
                segment.fail(str(error))
        else:
            view(source, segments, self._preprocess, self.features.clear)
        self.features.clear()
        return [record for segment in segments for record in segment.records]

    def _recording(self, task: VideoTask) -> VideoOrFolder:
        path, rate = self.settings.data / task.video, task.questions[0].rate
        return VideoSource(path, self.settings.fps) if rate is None else FolderSource(path, self.settings.fps, rate)

    def _opened(self, run: Run) -> Opened:
        variant = Variant(run.label)
        bundle, tokens = self.model.bundle, run.tokens or None
        policy = chosen_policy(bundle, run.tokens)[0] if variant.policy == AUTO else create_policy(variant.policy)
        session = Session.open(
            self.model, policy=policy, budget=tokens, reindexing=variant.reindexing, chunk=CHUNK, text_budget=self.settings.room
        )
        return session, policy

    def runs(self, variants: Sequence[Variant], budget: str, tokens: int) -> Iterator[Run | SkippedRun]:
        """Each variant at ``tokens`` or at the most that takes no more bytes than a plain window of as many."""
        per_token, least = bytes_per_token(self.model.bundle), frames_ahead(self.model, 1)
        yield from equal_byte_runs(variants, budget, tokens, per_token, least, self.taken)

    def taken(self, variant: Variant, tokens: int) -> int:
        """Bytes that cache and policy take at most, watching noise until the memory has been full for two chunks.

        tokens: 0 for all that the model can hold, of which only the cache is measured.
        """
        session, policy = self._opened(Run(variant.label, "", tokens))
        footprint = Footprint()
        with session:
            for number in range(tokens // frames_ahead(self.model, 1) + 2 * CHUNK if tokens else 0):
                session.watch(_noise(number % CHUNK))
                if (number + 1) % CHUNK == 0:
                    footprint.measure(session.cache, policy)
            footprint.measure(session.cache, policy)
        self.features.clear()
        return footprint.peak


def _noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)


def identity(model: Model) -> str:
    """What a journal's header says of a model: the hash of its manifest, which lists the hashes of its files."""
    return hash_file(model.bundle.path / MANIFEST).sha256[:16]


def room_for(model: Model, questions: Sequence[SuiteQuestion]) -> TextBudget:
    """Room for the longest prompt, up to a share of the model's positions, and the longest answer; no conversation."""
    chat, most = Chat(model.bundle.chat), model.bundle.limit // PROMPT_SHARE
    prompts = {question.prompt for question in questions} | {question.poll.prompt for question in questions if question.poll}
    longest = max(_length(model, chat, prompt) for prompt in prompts)
    answer = max(question.tokens for question in questions)
    return TextBudget(0, min(longest, most), min(answer, most))


def _length(model: Model, chat: Chat, prompt: str) -> int:
    try:
        return len(model.encode(chat.suffix([], prompt)))
    except UserError:  # it holds what stands for the video: said where it is asked
        return 0


def workers_that_fit(wanted: int, bytes_each: int) -> int:
    """As many workers as the free memory has room for, one at least."""
    return max(1, min(wanted, psutil.virtual_memory().available // max(bytes_each, 1)))


def seat(settings: VideoSettings) -> Callable[[VideoTask], list[Record]]:
    """The work of a worker that is a process of its own."""
    return VideoWorker(settings).perform
