"""What a benchmark prints: JSON lines, or a table whose rows appear as they are measured."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer

from edgevlm.bench.schemas import SPREADS, bench_line
from edgevlm.progress import Notify, progress, to_stderr

Line = dict[str, Any]
TELL_EVERY_S = 10.0  # between words of progress where stderr is no terminal

WIDTHS = {
    "model": 12, "policy": 24, "runtime": 12, "against": 12, "tower": 18, "source": 16, "stage": 10, "part": 12, "at": 9,
    "quantity": 17, "rule": 20, "system": 20, "over": 14, "field": 14, "moved_bytes_per_question": 11, "device_bytes": 11,
}  # fmt: skip

# the columns of each measurement on a terminal; --json has all fields
COLUMNS = {
    "decode": "runtime precision kv context ms_per_token cpu_ms_per_token against against_kv ratio cpu_ratio",
    "prefill": "runtime precision kv held frames ms_per_frame cpu_ms_per_frame against against_kv ratio cpu_ratio",
    "vision": "tower batch runtime precision ms_per_frame working_mb against ratio cpu_ratio cosine max_error",
    "precision": "precision top1 kl decoder_mb size_over_fp32 ms_per_token fp32_ms_per_token",
    "compression": "policy dtype ms read_ms pass_over_read part gb_s copy_gb_s fraction_of_copy",
    "stream": "policy chunk frames peak_rss_mb cache_mb fps ttft_ms_p50 tokens_per_s compress_fraction joules_per_frame "
    "stopped",
    "stream-against": "runtime precision fps ms_per_frame ttft_ms tokens_per_s against fps_ratio tokens_ratio same_answers",
    "stream-changed": "clip append encode fps vision_ms prefill_ms appended encoded fps_ratio cpu_ratio ceiling",
    "longrun": "policy append encode appended encoded frames device_bytes host_bytes file_bytes rss_bytes fps ttft_ms_p50 "
    "ttft_ratio moved_bytes_per_question backward right",
    "snapshot": "model policy budget bytes frame_ms hold_ms hold_over_frame write_ms",
    "store": "clusters asked put_ms host_ms disk_ms wait_ms unexpected_ms wait_over_unexpected",
    "camera": "source stage ms_p50 frames",
    "serve-ttft": "model questions ttft_ms http_ttft_ms ratio",
    "serve-cameras": "model cameras processes fps against fps_ratio rss_bytes pss_bytes camera_bytes planned_bytes error",
    "watch": "policy append about rule events event_precision event_recall delay_frames flaps",
    "watch-cost": "model watches fps fps_alone fps_ratio ms_together ms_singly",
    "accuracy": "policy budget kind column accuracy rating difference evidence_held tokens appended encoded ttft_ms "
    "compress_ms moved left_out skipped",
    "vrex": "at quantity system over length batch predicted paper error fixes",
    "change": "times_worse field new old verdict subject",
}


def plain(value: Any) -> str:
    """A number with the digits that matter: ``1,184``, ``26.4``, ``0.0012``; anything else as it is."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(one)}" for name, one in value.items()) or "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}" if abs(value) < 10**15 else f"{value:.3e}" if abs(value) < 10**300 else "huge"
    return f"{value:.6g}" if 0.99 < abs(value) < 1 else f"{value:.3g}"


def beside(name: str, line: Line) -> list[str]:
    """The fields of a line that are the spread of the field ``name``."""
    if name.endswith("_p50"):
        wanted: Sequence[str] = (name.replace("_p50", "_p95"), name.replace("_p50", "_p99"))
    else:
        wanted = SPREADS.get(name, ())
    return [part for part in wanted if part in line]


def head(name: str, line: Line) -> str:
    """The title of a column: ``ms per token [low, high]``."""
    parts = [part.rpartition("_")[2] for part in beside(name, line)]
    return name.replace("_", " ") + (f" [{', '.join(parts)}]" if parts else "")


def cell(name: str, line: Line) -> str:
    """A value with its spread: ``26 [25, 27.5]``."""
    parts = [plain(line[part]) for part in beside(name, line)]
    return plain(line.get(name)) + (f" [{', '.join(parts)}]" if parts and line.get(name) is not None else "")


class Table:
    """Prints lines one by one, with a head wherever their columns change."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._heads = as_json, list[str]()

    def print(self, line: Line) -> None:
        if self._as_json:
            typer.echo(bench_line(line))
            return
        names = [name for name in COLUMNS.get(str(line.get("bench")), " ".join(line)).split() if name in line]
        heads = [head(name, line) for name in names]
        widths = [
            max(len(title), WIDTHS.get(name, 20 if beside(name, line) else 8)) for name, title in zip(names, heads, strict=True)
        ]
        if heads != self._heads:
            self._heads = heads
            _echo_row(heads, widths)
        _echo_row([cell(name, line) for name in names], widths)


def _echo_row(cells: Sequence[str], widths: Sequence[int]) -> None:
    typer.echo("  ".join(f"{text:<{width}}" for text, width in zip(cells, widths, strict=True)).rstrip())


def prefixed(progress: Notify, place: str) -> Notify:
    """A progress whose words follow ``place``."""
    return lambda what: progress(f"{place}: {what}")


def measure_and_print(measure: Callable[..., Iterable[Line]], options: Mapping[str, Any], as_json: bool) -> None:
    """Print a measurement's lines as they come, and what is being done: on a terminal in one line, else now and then."""
    table = Table(as_json)
    with progress("starting") as step:
        words = {"progress": step if sys.stderr.isatty() else _now_and_then()}
        for line in measure(**options, **(words if "progress" in inspect.signature(measure).parameters else {})):
            table.print(line)


def _now_and_then() -> Notify:
    last = time.monotonic()

    def report(what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_EVERY_S:
            to_stderr(what)
            last = time.monotonic()

    return report
