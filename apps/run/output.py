"""Write a run's answers and statistics to stdout, as JSON lines or text, and everything else to stderr."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

from edgevlm.apps.run.clock import NOW_S, clock_time
from edgevlm.apps.schemas import Stats, json_line
from edgevlm.progress import counted, to_stderr, to_stderr_if_lost, to_stdout
from edgevlm.runtime.evidence import Evidence
from edgevlm.runtime.snapshots.writer import ago

NO_FIT = "a guess: the demo model knows only its own world; edgevlm models lists real models"


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """A finished answer about the stream up to ``time_s``.

    ``truth`` is the right answer, known only in the demo.
    ``evidence`` lists the moments that the answer is based on.
    ``offset`` is the wall-clock time of stream time 0; None for a recording.
    ``fits`` is False if the demo model watches any source except the demo.
    """

    time_s: float
    question: str
    text: str
    token_ids: list[int]
    ttft_ms: float
    tpot_ms: float
    truth: str | None = None
    evidence: Evidence | None = None
    offset: float | None = None
    fits: bool = True

    @property
    def seen(self) -> str:
        """Return a note to show after the answer, such as ``seen 6 min ago``, or "" if there is none."""
        if not self.fits:
            return NO_FIT
        if self.evidence is None or self.evidence.held is None:
            return ""
        if not self.evidence.held:
            return "the frames with the answer are no longer in memory"
        seen_s = self.evidence.moments[0].until_s if self.evidence.moments else self.time_s
        if self.time_s - seen_s < NOW_S:
            return ""
        if self.offset is None:
            return f"seen {ago(self.time_s - seen_s)} ago"
        return f"seen {clock_time(self.offset + seen_s, self.offset + self.time_s)}"

    @property
    def when(self) -> str:
        """Format the time of the answer's newest frame: wall-clock time, or stream time for a video file."""
        seconds = (self.offset or 0.0) + self.time_s
        return f"{self.time_s:.1f} s" if self.offset is None else clock_time(seconds, seconds)


class StatsEvent(Stats):
    """A run's statistics at one moment. In a summary, ``fps`` is the mean over the whole run."""

    def __str__(self) -> str:
        return self.words()

    def words(self, span: str = "") -> str:
        """Return the statistics in one line. ``span``, such as ``64 frames in 32.0 s``, replaces the number of frames."""
        dropped = f" ({self.dropped} dropped)" if self.dropped else ""
        state = f"{self.source_state} ({self.source_problem})" if self.source_problem else self.source_state
        memory = f"memory {counted(self.cache_tokens, 'token')}, {self.cache_bytes / 1e6:.1f} MB"
        memory += f", {self.encoded:.0%} of patches encoded" if self.encoded < 1 else ""
        memory += f", {self.appended:.0%} of tokens appended" if self.appended < 1 else ""
        if self.store is not None:
            memory += f", {(self.store['host_bytes'] + self.store['file_bytes']) / 1e6:.1f} MB offloaded"
        return (
            f"{state} · {span or counted(self.frames, 'frame')}{dropped} · {self.fps:.1f} fps · {memory} · "
            f"{counted(self.compressions, 'compression')}, {self.compress_ms:.1f} ms · process {self.rss_bytes / 1e6:.0f} MB"
        )


class Output(Protocol):
    """Receives a run's answers and statistics from several threads. ``piece``: called with each new part of an answer."""

    def answer(self, answer: AnswerEvent) -> None: ...
    def piece(self, text: str) -> None: ...
    def stats(self, stats: StatsEvent) -> None: ...
    def summary(self, stats: StatsEvent, span: str) -> None: ...
    def notice(self, text: str) -> None: ...


class TextOutput:
    """Prints one answer per line on stdout, and everything else on stderr. ``with_stats``: whether to print statistics."""

    def __init__(self, quiet: bool = False, with_stats: bool = False) -> None:
        self._quiet, self._with_stats = quiet, with_stats

    def answer(self, answer: AnswerEvent) -> None:
        truth = "" if answer.truth is None else f"   (truth: {answer.truth})"
        seen = f"   ({answer.seen})" if answer.seen else ""
        to_stdout(f"[{answer.when}] {answer.question}  {answer.text}{truth}{seen}")

    def piece(self, text: str) -> None: ...

    def stats(self, stats: StatsEvent) -> None:
        if self._with_stats:
            self.notice(str(stats))

    def summary(self, stats: StatsEvent, span: str) -> None:
        self.notice(stats.words(span))

    def notice(self, text: str) -> None:
        (to_stderr_if_lost if self._quiet else to_stderr)(text)


class JsonOutput(TextOutput):
    """Prints one ASCII JSON object per line on stdout, and notices on stderr."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._lock = threading.Lock()

    def answer(self, answer: AnswerEvent) -> None:
        fields = asdict(answer) | evidence_fields(answer.evidence, answer.offset, answer.fits)
        left_out = ("offset", "fits", *(["truth"] if answer.truth is None else []))
        self.line("answer", {name: value for name, value in fields.items() if name not in left_out})

    def stats(self, stats: StatsEvent, event: str = "stats") -> None:
        self.line(event, {name: value for name, value in stats if name != "store" or value is not None})

    def summary(self, stats: StatsEvent, span: str) -> None:
        self.stats(stats, "summary")

    def line(self, event: str, fields: dict[str, object]) -> None:
        with self._lock:
            print(json_line(event, finite({"time": wall_clock(), **fields})), flush=True)


def evidence_fields(evidence: Evidence | None, offset: float | None = None, fits: bool = True) -> dict[str, object]:
    """Return the JSON fields that describe an answer's evidence; docs/reference/json.md explains them.

    ``offset`` is the wall-clock time of stream time 0, if known.
    """
    if evidence is None or not fits:
        return {"evidence": [], "evidence_held": None, "model_fits_source": fits}
    moments = []
    for moment in () if evidence.held is False else evidence.moments:
        at = None if offset is None else wall_clock(offset + moment.time_s)
        moments.append({"time": at, **finite(asdict(moment))})
    return {"evidence": moments, "evidence_held": evidence.held, "model_fits_source": fits}


def finite(value: Any) -> Any:
    """Round floats to four places; NaN and infinity become None."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


def wall_clock(seconds: float | None = None) -> str:
    """Format ``seconds`` since 1970, or now, as RFC 3339 in UTC: ``2026-11-22T16:30:05.123Z``."""
    at = datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
