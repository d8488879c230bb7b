"""A question of any suite: what is asked of which video and when, and how an answer is scored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Poll:
    """A question that waits for its moment: ``prompt`` is asked each second until it is answered yes.

    until_s: the last second it is asked at; due_s: the moment itself. Seconds of the video.
    """

    prompt: str
    until_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class SuiteQuestion:
    """One question about one video.

    id: file and place, unique in the suite. video: path of a file, or a folder of pictures, inside the data folder. prompt:
    what the model is asked, whole. answer: what is right; empty where the suite keeps it to itself. options: texts of a
    multiple choice, without letters, or labels that the nearest is taken of. time_s: asked when the stream reaches it, and
    nothing later is seen; None: at the end. clip: (start, end), all of the video that is shown; None: from its beginning.
    scoring: a name of :data:`edgevlm.bench.suites.scoring.SCORINGS`. tokens: of an answer at most. rate: pictures a second
    of a folder.
    """

    id: str
    video: str
    text: str
    prompt: str
    answer: str
    scoring: str
    subtask: str
    category: str = ""
    options: tuple[str, ...] = ()
    time_s: float | None = None
    clip: tuple[float, float] | None = None
    poll: Poll | None = None
    tokens: int = 16
    rate: float | None = None

    @property
    def due_s(self) -> float | None:
        """When it is asked first, seconds of the video; None: at the video's end."""
        return self.time_s if self.time_s is not None or self.clip is None else self.clip[1]
