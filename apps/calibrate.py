"""``edgevlm calibrate``: the clips to measure on, and the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

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
from edgevlm.runtime.bundle import MANIFEST, Bundle, hash_file
from edgevlm.runtime.calibration import AppendTrial, Calibration, Choices, EncodeTrial
from edgevlm.runtime.kv import SCALES, KVScales
from edgevlm.runtime.model import Model, bundle_folder, is_demo
from edgevlm.runtime.opening import AUTO, FALLBACK
from edgevlm.runtime.opening import describe as describe_choice
from edgevlm.runtime.policies import evicting
from edgevlm.runtime.policies.infinipot_v import WINDOWS

DEMO_SEEDS = (101, 102, 103, 104)  # worlds of the demo, one a clip
QUESTIONS = (  # HERMES's Tab. 9, for any model
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
    threads: int | None
    comparison: ComparisonRequest | None
    layers: bool = True


@dataclass(frozen=True, slots=True)
class Findings:
    """Measurements of layers, policies and an int8 cache; None: not asked for, or no such cache."""

    layers: Calibration | None
    policies: Choices | None
    scales: KVScales | None = None


@dataclass(frozen=True, slots=True)
class Frames:
    """A clip's frames, uint8 RGB ``[H, W, 3]``, from the beginning each time it is iterated. video: None is a demo world."""

    video: str | None
    seed: int = 0

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        source = open_source(None, self.video, SourceOptions(seed=self.seed))
        try:
            for frame in source:
                yield frame.image
        finally:
            source.close()

    @property
    def identity(self) -> list[object]:
        if self.video is None:
            return [self.seed]
        found = Path(self.video).stat()
        return [str(Path(self.video).resolve()), found.st_size, found.st_mtime_ns]


def parse_comparison(
    policies: str, budget: str | None, measure: str | None, ask: tuple[str, ...], streams: int
) -> ComparisonRequest | None:
    """Return the comparison that was typed; None for no policies. Raises UserError."""
    if policies == "none":
        return None
    labels = evicting() if policies == "all" else [variant.label for variant in parse_variants([policies])]
    if not labels or any(label in (AUTO, ORACLE) or "@" in label for label in labels):
        raise UserError(f"--policies {policies}: name policies that have a budget, separated by commas, or all, or none")
    return ComparisonRequest(labels, parse_budgets(budget) if budget else (), measure, ask, streams)


def start(request: CalibrateRequest, progress: Notify, notify: Notify) -> tuple[Path, Findings]:
    """Measure and write; returns the bundle written. Raises UserError, before any measuring where that is possible.

    A run that is stopped leaves a checkpoint beside the bundle to be written, from which the next one continues.
    """
    if not request.videos and not is_demo(Bundle.load(bundle_folder(request.bundle), verify="size")):
        raise UserError(f"{request.bundle}: say on which clips to calibrate it, --video FILE, once or more")
    if not request.layers and request.comparison is None:
        raise UserError("--no-layers and --policies none leave nothing to measure; leave out one of them")
    clips = [video_clip(path) for path in request.videos] if request.videos else demo_clips()
    progress("loading the model")
    model = Model.load(request.bundle, threads=request.threads)
    try:
        check_writable(model.bundle, request.out)
        if model.bundle.vision.pixels is not None and (first := next(iter(clips[0].frames), None)) is not None:
            model = model.for_frames((first.shape[0], first.shape[1]))
        with checkpoint_folder((request.out or model.bundle.path).resolve(), _settings(request, model, clips)) as folder:
            found = _measure(request, model, clips, folder, progress, notify)
            progress("writing")
            written = write_calibration(model.bundle, found.layers, found.policies, found.scales, out=request.out)
    except KeyboardInterrupt:
        notify("stopped; the same command continues from here")
        raise
    finally:
        model.close()
    return written, found


def _settings(request: CalibrateRequest, model: Model, clips: list[Clip]) -> dict[str, object]:
    """Return what a checkpoint depends on: all but policies and budgets, which have records of their own."""
    comparison, manifest = request.comparison or ComparisonRequest(()), model.bundle.path / MANIFEST
    try:
        identity = hash_file(manifest).sha256
    except OSError as error:
        raise UserError(f"{manifest}: cannot be read ({error.strerror}); the same command tries again") from None
    return {
        "edgevlm": __version__,
        "model": identity,
        "clips": [clip.frames.identity for clip in clips if isinstance(clip.frames, Frames)],
        "frames": request.frames,
        "measure": comparison.measured_by(model),
        "streams": comparison.streams,
        "layers": request.layers,
        "ask": comparison.ask,
    }


def _measure(
    request: CalibrateRequest, model: Model, clips: list[Clip], folder: Path, progress: Notify, notify: Notify
) -> Findings:
    """Measure an int8 cache's scales, the layers on them, then the policies on both or on what the bundle has."""
    layers, scales = None, None
    if request.layers and model.bundle.decoder.kv == "int8":
        scales = _scales(request, model.bundle, clips, folder, progress)
        model = as_calibrated(model, None, scales)
    if request.layers:
        layers = _layers(request, model, clips, folder, progress)
        model = as_calibrated(model, layers, scales)
    if request.comparison is None:
        return Findings(layers, None, scales)
    given = ComparisonInput(model, clips, request.frames, folder, progress, notify)
    return Findings(layers, select_policies(request.comparison, given), scales)


def _layers(request: CalibrateRequest, model: Model, clips: list[Clip], folder: Path, progress: Notify) -> Calibration:
    """Measure the layers, unless a stopped run has."""
    file = folder / "layers.json"
    try:
        return Calibration.from_json(file.read_bytes())
    except (FileNotFoundError, ValueError):
        calibration = calibrate(model, clips, request.frames, progress)
        file.write_bytes(calibration.to_json())
        return calibration


def _scales(request: CalibrateRequest, bundle: Bundle, clips: list[Clip], folder: Path, progress: Notify) -> KVScales:
    """Measure an int8 cache's scales on the beginning of each clip, unless a stopped run has."""
    file, spec = folder / SCALES, bundle.decoder
    try:
        return KVScales.load(file, (spec.layers, spec.kv_heads, spec.head_dim))
    except (FileNotFoundError, ValueError):
        progress("measuring how far keys and values reach")
        beginnings = chain.from_iterable(islice(clip.frames, SCALE_FRAMES) for clip in clips)
        scales = measured_scales(bundle, beginnings, SCALE_FRAMES * len(clips), request.threads)
        scales.save(file)
        return scales


def demo_clips() -> list[Clip]:
    """Demo worlds, and a question of each kind that the demo model was taught."""
    from edgevlm.calib.demo.questions import OFFERED, ask

    questions = [ask(kind, 0, 0, 0).text for kind in OFFERED]
    return [Clip(f"demo world {seed}", Frames(None, seed), questions) for seed in DEMO_SEEDS]


def video_clip(path: Path) -> Clip:
    """A video file, sampled as by ``edgevlm run``. Raises SourceError if there is none."""
    check_readable(path)
    return Clip(path.name, Frames(str(path)), QUESTIONS)


def as_json(written: Path, found: Findings) -> str:
    """The lines of ``--json``: the bundle and its layers, then the policies."""
    first = json_line("calibration", {"bundle": str(written), **(asdict(found.layers) if found.layers else {})})
    return "\n".join([first, *(policy_lines(found.policies) if found.policies else ())])


def describe(written: Path, found: Findings) -> str:
    """The report for a person: a line a layer, then one a policy."""
    of_layers = describe_layers(found.layers) if found.layers else ["layers: left as they were"]
    of_policies = ("", *policy_table(found.policies), "") if found.policies else ()
    measured = f"calibrated {found.layers.described}" if found.layers else "compared"
    return "\n".join([*of_layers, *of_policies, f"{measured}: {written}"])


def describe_layers(calibration: Calibration) -> list[str]:
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
    return [
        *lines,
        f"even attention would leave {calibration.flat:.3f} on the newest tenth of the frames",
        f"infinipot-v  tau {tau[0]:.4f}/{tau[1]:.4f}/{tau[2]:.4f}",
        "hermes       " + ", ".join(f"{name} {span}" for name, span in zip(("shallow", "middle", "deep"), spans, strict=True)),
        f"purekv       layer {calibration.clie} ranks the layers above it best: Spearman "
        f"{np.mean(known):.2f} on average, {min(known):.2f} at worst"
        if known
        else "purekv       a model of one layer has none above it",
    ]


def policy_lines(choices: Choices) -> Iterator[str]:
    """The lines of ``--json``: one a policy and budget, then the choice there."""
    for choice in choices.budgets:
        for of in choice.candidates:
            fields = {name: value for name, value in asdict(of).items() if value is not None}
            yield json_line("candidate", {"budget": choice.budget, "measure": choices.measure, **fields})
        for policy, why in choice.skipped:
            yield json_line("skipped", {"budget": choice.budget, "policy": policy, "reason": why})
        chosen = {"policy": choice.chosen or FALLBACK, "clearly_better": choice.chosen is not None}
        yield json_line("choice", {"budget": choice.budget, "measure": choices.measure, **chosen})
    for way, changed in (("append", choices.append), ("encode", choices.encode)):
        if changed is not None:
            fields = asdict(changed)
            for trial in fields.pop("trials"):
                yield json_line(f"{way}_trial", {"measure": choices.measure, **trial})
            yield json_line(f"{way}_choice", {"measure": choices.measure, **fields})


def policy_table(choices: Choices) -> Iterator[str]:
    """A table a budget: a line a policy, best first, and the choice."""
    sign, unit, lost = (1, "nats", "next tokens") if choices.measure == "kl" else (-1, "right", "right answers")
    watched = ", ".join(choices.watched)
    yield f"policies at equal bytes, {choices.frames} frames of {watched}; {choices.measure} in {unit} [95 %]"
    for choice in choices.budgets:
        width = max(len(of.policy) for of in choice.candidates) + 2
        top1 = f"{'top-1':>8}" if choices.measure == "kl" else ""
        heads = f"{'tokens':>6}  {choices.measure:<24}{top1}{'compress ms':>13}{'bytes':>12}"
        yield f"\nbudget {choice.budget:<{width - 7}} {heads}"
        for of in sorted(choice.candidates, key=lambda of: sign * of.value):
            value = f"{of.value:.3f} [{of.ci_low:.3f}, {of.ci_high:.3f}]"
            same = "" if of.top1 is None else f"{of.top1:>8.3f}"
            yield f"{of.policy:<{width}} {of.tokens:>6}  {value:<24}{same}{of.compress_ms:>13.1f}{of.bytes:>12}"
        yield from (f"skipped: {policy}: {why}" for policy, why in choice.skipped)
        best = min(choice.candidates, key=lambda of: sign * of.value).policy
        if choice.chosen is None:
            more = "; more or longer clips may tell"
        else:
            more = "" if best == choice.chosen else f", which cannot be told from {best} and compresses in less time"
        yield f"auto: {describe_choice(choices, choice, choice.budget)}{more}"
    if (append := choices.append) is not None:
        yield f"\n--append changed under full KV, beside whole frames; {lost} lost [95 %]\ntau    appended  loss"
        yield from (f"{of.tau:<6} {of.appended:8.3f}  {_loss(of)}" for of in append.trials)
        if append.best is None:
            yield f"append: all; no tau saves tokens and surely loses at most {append.bound}; more or longer clips may tell"
        else:
            yield f"append: changed:tau={append.best.tau:g}, {append.best.appended:.3f} of the tokens"
    if (encode := choices.encode) is not None:
        heads = f"{lost} lost [95 %]; cosine that 99 % of the features reach"
        yield f"\n--encode changed under full KV, beside whole frames; {heads}"
        width = max(len(of.setting) for of in encode.trials)
        for trial in encode.trials:
            cosine = "" if trial.low_cosine is None else f"  {trial.low_cosine:.4f}"
            yield f"{trial.setting:<{width}}  {trial.encoded:.3f}  {_loss(trial)}{cosine}"
        if encode.best is None:
            bound = f"surely loses at most {encode.bound}"
            yield f"encode: all; no setting saves patches and {bound}; more or longer clips may tell"
        else:
            yield f"encode: {encode.best.setting}, {encode.best.encoded:.3f} of the patches"


def _loss(of: AppendTrial | EncodeTrial) -> str:
    return f"{of.loss:.3f} [{of.ci_low:.3f}, {of.ci_high:.3f}]"
