"""``edgevlm calibrate``: which clips to measure on, and what to say of the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.apps.sources.video import check_readable
from edgevlm.calib import Clip, calibrate, check_writable, write_calibration
from edgevlm.calib.figure import check_plot, plot
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle, Progress
from edgevlm.runtime.calibration import Calibration
from edgevlm.runtime.model import Model, bundle_folder, is_demo
from edgevlm.runtime.policies.infinipot_v import WINDOWS

DEMO_SEEDS = (101, 102, 103, 104)  # worlds of the demo, one a clip
QUESTIONS = (  # HERMES's Tab. 9: any model can be asked these
    "What happens in the video?",
    "Describe the video in detail.",
    "Summarize the content of the video.",
)


@dataclass(frozen=True, slots=True)
class CalibrateRequest:
    """The options of ``edgevlm calibrate``, as typed."""

    bundle: str
    videos: list[Path]
    frames: int | None
    out: Path | None
    plot: Path | None
    threads: int | None


def start(request: CalibrateRequest, progress: Progress) -> tuple[Path, Calibration]:
    """Measure and write; returns the bundle written. Raises UserError, before any measuring where that is possible."""
    if not request.videos and not is_demo(Bundle.load(bundle_folder(request.bundle), verify="size")):
        raise UserError(f"{request.bundle}: say on which clips to calibrate it, --video FILE, once or more")
    if request.plot is not None:
        check_plot(request.plot)
    clips = [video_clip(path) for path in request.videos] if request.videos else demo_clips()
    progress("loading the model")
    model = Model.load(request.bundle, threads=request.threads)
    try:
        check_writable(model.bundle, request.out)
        calibration = calibrate(model, clips, request.frames, progress)
    finally:
        model.close()
    progress("writing")
    written = write_calibration(model.bundle, calibration, request.out)
    if request.plot is not None:
        plot(calibration, request.plot)
    return written, calibration


def demo_clips() -> list[Clip]:
    """Worlds of the demo, and a question of each kind that its model was taught."""
    from edgevlm.apps.demo.questions import OFFERED, ask

    questions = [ask(kind, 0, 0, 0).text for kind in OFFERED]
    return [Clip(f"demo world {seed}", _frames(None, seed), questions) for seed in DEMO_SEEDS]


def video_clip(path: Path) -> Clip:
    """A file, sampled as ``edgevlm run`` samples it. Raises SourceError if there is none."""
    check_readable(path)
    return Clip(path.name, _frames(str(path), 0), QUESTIONS)


def _frames(video: str | None, seed: int) -> Iterator[NDArray[np.uint8]]:
    source = open_source(None, video, SourceOptions(seed=seed))
    try:
        for frame in source:
            yield frame.image
    finally:
        source.close()


def as_json(written: Path, calibration: Calibration) -> str:
    """The line of ``--json``: the bundle and all that was measured."""
    return json.dumps({"event": "calibration", "bundle": str(written), **asdict(calibration)})


def describe(written: Path, calibration: Calibration) -> str:
    """What was measured, for a person: a line a layer, then one a policy."""
    tau = calibration.thresholds
    windows = [WINDOWS[int(np.searchsorted(tau, cv, side="right"))] for cv in calibration.cv]
    lines = ["layer  value CV  window  newest tenth  frame period  class"]
    rows = zip(calibration.cv, windows, calibration.recency, calibration.periodicity, calibration.classes, strict=True)
    for layer, (cv, window, recent, periodic, name) in enumerate(rows):
        lines.append(f"{layer:5d}  {cv:8.3f}  {window:6d}  {recent:12.3f}  {periodic:12.2f}  {name}")
    bounds = (0, calibration.middle_from, calibration.deep_from, len(calibration.cv))
    spans = [f"{first}-{end - 1}" if end > first else "none" for first, end in pairwise(bounds)]
    agreed = calibration.agreement[calibration.clie]
    known = [value for value in agreed if value is not None]
    lines += [
        f"even attention would leave {calibration.flat:.3f} on the newest tenth of the frames",
        f"infinipot-v  tau {tau[0]:.4f}/{tau[1]:.4f}/{tau[2]:.4f}",
        "hermes       " + ", ".join(f"{name} {span}" for name, span in zip(("shallow", "middle", "deep"), spans, strict=True)),
        f"purekv       layer {calibration.clie} ranks the layers above it best: Spearman "
        f"{np.mean(known):.2f} on average, {min(known):.2f} at worst"
        if known
        else "purekv       a model of one layer has none above it",
        f"calibrated {calibration.described}: {written}",
    ]
    return "\n".join(lines)
