"""Make edgevlm a model of lmms-eval, which runs Video-MME, MLVU, EgoSchema, MVBench, LongVideoBench and many other benchmarks.

``lmms-eval --model edgevlm --model_args model=demo,policy=last-seen,budget=1k --tasks videomme`` finds :class:`Edgevlm` through
the entry point ``lmms_eval.models``. Each video is watched only once for all its questions, because questions do not change the
memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest

from edgevlm.apps.bundles.resolve import resolve_model
from edgevlm.apps.sources.recordings import FolderSource, VideoSource
from edgevlm.errors import UserError
from edgevlm.progress import progress, to_stderr
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.model import Model
from edgevlm.runtime.preprocess import Pixels
from edgevlm.runtime.session import Session

MANIFEST = ModelManifest("edgevlm", simple_class_path=f"{__name__}.Edgevlm")
ANSWER = 1024  # default number of tokens reserved for a question, and for an answer


class Edgevlm(lmms):
    """Answers the questions of an lmms-eval task.

    ``budget``: vision tokens kept per layer. ``model``: as for ``edgevlm run --model``. ``fps``: frames sampled per second of
    video. ``question``, ``answer``: tokens reserved for a question and for an answer. All other arguments are passed to
    ``Session.open``. Raises UserError for invalid arguments, including those of ``Model.load`` and ``Session.open``.
    """

    def __init__(
        self, model: str = "demo", fps: float = 1.0, threads: int | None = None, question: int = ANSWER, answer: int = ANSWER,
        policy: str = "auto", budget: int | str | None = None, append: str = "auto", encode: str = "auto",
        batch_size: int | str = 1, device: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if str(batch_size) != "1":
            raise UserError(f"--batch_size {batch_size}: edgevlm answers one question at a time; set 1")
        self._model = Model.load(resolve_model(model, lambda *told: None, to_stderr), threads=threads)
        self._opening: dict[str, Any] = {"policy": policy, "budget": budget, "append": append, "encode": encode}
        self._opening["text_budget"] = TextBudget(conversation=0, question=int(question), answer=int(answer))
        self._fps = float(fps)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the answers in the requests' order. Requests about one video are answered together."""
        seen = [self._visuals(request) for request in requests]
        keys = [json.dumps([each if isinstance(each, str) else id(each) for each in visuals]) for visuals in seen]
        by_video = sorted(range(len(requests)), key=lambda place: (keys[place], place))
        answers: dict[int, str] = {}
        with progress("questions") as step:
            for _, places in groupby(by_video, key=keys.__getitem__):
                same = list(places)
                with Session.open(self._model, **self._opening) as session:
                    for pixels, time_s in self._frames(session, seen[same[0]]):
                        session.watch(pixels, time_s)
                    for place in same:
                        answers[place] = _answered(session, *requests[place].args[:2])
                        step("questions", len(answers), len(requests))
        return [answers[place] for place in range(len(requests))]

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise UserError("edgevlm does not support tasks with several rounds; remove this one")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise UserError("edgevlm generates text and does not compute likelihoods; choose the task's generative variant")

    def _visuals(self, request: Instance) -> list[Any]:
        _, _, doc_to_visual, doc_id, task, split = request.args
        visuals = doc_to_visual(self.task_dict[task][split][doc_id])
        return list(visuals) if isinstance(visuals, list | tuple) else [visuals]

    def _frames(self, session: Session, visuals: list[Any]) -> Iterator[tuple[Pixels, float]]:
        """Yield the frames of consecutive videos, folders and pictures, each with its time in seconds."""
        start = 0.0
        for visual in visuals:
            if not isinstance(visual, str):
                yield session.prepare(np.asarray(visual.convert("RGB"))), start
                start += 1 / self._fps
                continue
            source = FolderSource(visual, self._fps, self._fps) if Path(visual).is_dir() else VideoSource(visual, self._fps)
            with closing(source):
                for frame in source:
                    yield session.prepare(frame.image), start + frame.time_s
                start += source.end_s


def _answered(session: Session, question: str, settings: dict[str, Any]) -> str:
    """Answer a question as the task's settings say, by default greedily. The answer ends before any ``until`` string."""
    most = min(int(settings.get("max_new_tokens") or ANSWER), session.text_budget.answer)
    temperature = float(settings.get("temperature") or 0) if settings.get("do_sample") else 0.0
    answer = session.ask(question, max_tokens=most, temperature=temperature, top_p=float(settings.get("top_p") or 1))
    answer.wait()
    text, stops = answer.text, settings.get("until") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.partition(stop)[0] if stop else text
    return text.strip()
