"""``edgevlm calibrate``: choose the clips, measure, and print the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgevlm import __version__
from edgevlm.apps.schemas import json_line
from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.apps.sources.recordings import check_readable
from edgevlm.calib import Clip, as_calibrated, calibrate, check_writable, write_calibration
from edgevlm.calib.accuracy.select_policy import ComparisonInput, ComparisonRequest, select_policies
from edgevlm.calib.accuracy.variants import ORACLE, parse_budgets, parse_variants
from edgevlm.calib.write import checkpoint_folder
from edgevlm.errors import UserError
from edgevlm.export.kv_scales import FRAMES as SCALE_FRAMES
from edgevlm.export.kv_scales import measured_scales
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.calibration import CALIBRATION, CHOICES, AppendChoice, Calibration, Choices
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.kv import SCALES, KVScales
from edgevlm.runtime.model import Model, bundle_folder, is_demo
from edgevlm.runtime.opening import AUTO, FALLBACK
from edgevlm.runtime.opening import describe as describe_choice
from edgevlm.runtime.policies import evicting
from edgevlm.runtime.snapshots.writer import model_hash

DEMO_SEEDS = (101, 102, 103, 104)
QUESTIONS = (  # questions from table 9 of the HERMES paper
    "What happens in the video?",
    "Describe the video in detail.",
    "Summarize the content of the video.",
)


class CalibrateRequest(NamedTuple):
    """The options of ``edgevlm calibrate`` as typed."""

    bundle: str
    videos: list[Path]
    frames: int | None
    out: Path | None
    threads: int | None
    comparison: ComparisonRequest | None
    layers: bool = True
    engine: str = DEFAULT_ENGINE


class Findings(NamedTuple):
    """The results of a calibration. A field is None if it was not measured."""

    layers: Calibration | None
    policies: Choices | None
    scales: KVScales | None = None


@dataclass(frozen=True, slots=True)
class Frames:
    """Iterates over the frames of a video or, if ``video`` is None, of a demo world. Frames are uint8 RGB ``[H, W, 3]``."""

    video: str | None
    seed: int = 0

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        with closing(open_source(None, self.video, SourceOptions(seed=self.seed))) as source:
            yield from (frame.image for frame in source)

    @property
    def identity(self) -> list[object]:
        if self.video is None:
            return [self.seed]
        found = Path(self.video).stat()
        return [str(Path(self.video).resolve()), found.st_size, found.st_mtime_ns]


def parse_comparison(policies: str, budget: str | None, ask: tuple[str, ...]) -> ComparisonRequest | None:
    """Return the requested comparison of policies, or None if ``policies`` is ``none``. Raises UserError."""
    if policies == "none":
        return None
    labels = evicting() if policies == "all" else [variant.label for variant in parse_variants([policies])]
    if not labels or any(label in (AUTO, ORACLE) or "@" in label for label in labels):
        raise UserError(f"--policies {policies}: must be all, none or policies that have a budget, separated by commas")
    return ComparisonRequest(labels, parse_budgets(budget) if budget else (), ask)


def start(request: CalibrateRequest, progress: Notify, notify: Notify) -> tuple[Path, Findings]:
    """Measure a bundle, write the results into it, and return its folder and the results.

    A stopped run leaves its results next to the bundle, and the next run continues from these results. Raises UserError.
    """
    if not request.videos and not is_demo(Bundle.load(bundle_folder(request.bundle), verify="size")):
        raise UserError(f"{request.bundle}: calibration requires clips; add --video FILE once or more")
    if not request.layers and request.comparison is None:
        raise UserError("--no-layers and --policies none leave nothing to measure; remove one of them")
    clips = clips_of(request.videos)
    progress("loading the model")
    model = Model.load(request.bundle, engine=request.engine, threads=request.threads)
    try:
        check_writable(model.bundle, request.out)
        if model.bundle.vision.pixels is not None and (first := next(iter(clips[0].frames), None)) is not None:
            model = model.for_frames((first.shape[0], first.shape[1]))
        with checkpoint_folder((request.out or model.bundle.path).resolve(), _settings(request, model, clips)) as folder:
            found = _measure(request, model, clips, folder, progress, notify)
            progress("writing")
            written = write_calibration(model.bundle, found.layers, found.policies, found.scales, out=request.out)
    except KeyboardInterrupt:
        notify("stopped; run the same command to continue")
        raise
    finally:
        model.close()
    return written, found


def _settings(request: CalibrateRequest, model: Model, clips: list[Clip]) -> dict[str, object]:
    """Return the settings that must stay the same to continue a stopped run: all except policies and budgets."""
    written = (CHOICES, CALIBRATION, SCALES) if request.layers else (CHOICES,)  # files that the stopped run may have written
    files = {name: record for name, record in model.bundle.files.items() if name not in written}
    identity = model_hash(replace(model.bundle, files=files))
    return {
        "edgevlm": __version__, "model": identity, "clips": [getattr(clip.frames, "identity", None) for clip in clips],
        "frames": request.frames, "layers": request.layers, "ask": request.comparison.ask if request.comparison else (),
    }  # fmt: skip


def _measure(
    request: CalibrateRequest, model: Model, clips: list[Clip], folder: Path, progress: Notify, notify: Notify
) -> Findings:
    """Measure an int8 cache's scales, then the layers, then the policies. Results from an interrupted run are reused."""
    layers, scales, choices, spec = None, None, None, model.bundle.decoder
    if request.layers and spec.kv == "int8":
        try:
            scales = KVScales.load(folder / SCALES, (spec.layers, spec.kv_heads, spec.head_dim))
        except (FileNotFoundError, ValueError):
            progress("measuring KV scales")
            beginnings = chain.from_iterable(islice(clip.frames, SCALE_FRAMES) for clip in clips)
            scales = measured_scales(model.bundle, beginnings, SCALE_FRAMES * len(clips), request.threads)
            scales.save(folder / SCALES)
        model = as_calibrated(model, None, scales)
    if request.layers:
        file = folder / "layers.json"
        try:
            layers = Calibration.from_json(file.read_bytes())
        except (FileNotFoundError, ValueError):
            layers = calibrate(model, clips, request.frames, progress)
            file.write_bytes(layers.to_json())
        model = as_calibrated(model, layers, scales)
    if request.comparison is not None:
        given = ComparisonInput(model, clips, request.frames, folder, progress, notify)
        choices = select_policies(request.comparison, given)
    return Findings(layers, choices, scales)


def clips_of(videos: list[Path]) -> list[Clip]:
    """Return the videos as clips, sampled as in ``edgevlm run``, or demo worlds if there are no videos.

    Raises SourceError for a missing file.
    """
    from edgevlm.runtime.taught import OFFERED, ask

    for path in videos:
        check_readable(path)
    questions = [ask(kind, 0, 0, 0).text for kind in OFFERED]
    worlds = [Clip(f"demo world {seed}", Frames(None, seed), questions) for seed in DEMO_SEEDS]
    return [Clip(path.name, Frames(str(path)), QUESTIONS) for path in videos] or worlds


def rows(choices: Choices) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the event and fields of each JSON line about the comparison."""
    measure = {"measure": choices.measure}
    for choice in choices.budgets:
        budget = {"budget": choice.budget}
        for of in choice.candidates:
            yield "candidate", budget | measure | {name: value for name, value in asdict(of).items() if value is not None}
        for policy, why in choice.skipped:
            yield "skipped", budget | {"policy": policy, "reason": why}
        chosen = {"policy": choice.chosen or FALLBACK, "clearly_better": choice.chosen is not None}
        yield "choice", budget | measure | chosen
    for way, changed in (("append", choices.append), ("encode", choices.encode)):
        if changed is not None:
            fields = asdict(changed)
            yield from ((f"{way}_trial", measure | trial) for trial in fields.pop("trials"))
            yield f"{way}_choice", measure | fields


def as_json(written: Path, found: Findings) -> str:
    """Return the ``--json`` output: a line about the bundle and its layers, then lines about the policies."""
    layers = asdict(found.layers) if found.layers else {}
    first = ("calibration", {"bundle": str(written), **layers})
    return "\n".join(json_line(*row) for row in (first, *(rows(found.policies) if found.policies else ())))


def describe(written: Path, found: Findings) -> str:
    lines = ["layers: unchanged"]
    if (layers := found.layers) is not None:
        tau = "/".join(f"{threshold:.4f}" for threshold in layers.thresholds)
        bounds = f"middle from layer {layers.middle_from}, deep from {layers.deep_from}"
        lines = [f"infinipot-v  tau {tau}", f"hermes       {bounds}", f"purekv       layer {layers.clie}"]
    if (choices := found.policies) is not None:
        watched = ", ".join(choices.watched)
        lines += ["", f"policies at equal bytes, {choices.frames} frames of {watched}; {choices.measure} with 95 % intervals"]
        tables = dict[str, list[dict[str, Any]]]()
        for event, fields in rows(choices):
            if not event.endswith("choice"):
                tables.setdefault(event, []).append(fields)
        for event, records in tables.items():
            lines += ["", event.replace("_", " "), *table(records)]
        lines += ["", *(describe_choice(choices, choice, choice.budget) for choice in choices.budgets)]
        for way, changed in (("append", choices.append), ("encode", choices.encode)):
            if changed is not None:
                setting = (
                    changed.tau and f"changed:tau={changed.tau:g}" if isinstance(changed, AppendChoice) else changed.setting
                )
                chosen = setting or f"all, because no trial's loss is reliably within {changed.bound:g}"
                lines.append(f"{way} auto: {chosen}")
        lines.append("")
    measured = f"calibrated {layers.described}" if layers else "compared"
    return "\n".join([*lines, f"{measured}: {written}"])


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """Format records as a table with aligned columns."""
    names = list(dict.fromkeys(name for record in records for name in record))
    cells = [names]
    for record in records:
        values = [record.get(name, "") for name in names]
        cells.append([f"{value:.4g}" if isinstance(value, float) else str(value) for value in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
