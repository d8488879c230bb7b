"""Run ``edgevlm bench accuracy`` on the demo world."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edgevlm.apps.bundles.resolve import resolve_model
from edgevlm.bench.accuracy.report import BACKWARD, NOW, UNSEEN, report_lines
from edgevlm.bench.output import Table
from edgevlm.calib.accuracy.cases import seed_words
from edgevlm.calib.accuracy.compare import compare
from edgevlm.calib.accuracy.text_streams import TEXT_SUITES
from edgevlm.calib.accuracy.variants import ORACLE, Variant, parse_budgets, parse_variants, split
from edgevlm.calib.accuracy.worker import AccuracySettings
from edgevlm.errors import UserError
from edgevlm.progress import progress, to_stderr
from edgevlm.runtime.settings import ALL

USUAL = "infinipot-v"  # the policy that all others are compared with, if it runs


def run_suite(
    suite: str, model: str, policy: list[str], budget: str, append: str, encode: str, against: str | None, frames: int,
    streams: int, seed: str, noise: float, crf: int | None, engine: str, as_json: bool, out: Path | None, resume: bool,
    workers: int, **_: Any,
) -> None:  # fmt: skip
    """Ask the questions of an accuracy suite and print the report. Raises UserError for invalid arguments."""
    seed_words(seed)
    if suite in TEXT_SUITES and (encode != ALL or not model.endswith(".gguf")):
        raise UserError(f"--suite {suite}: requires a language model, --model FILE.gguf, and no --encode")
    budgets, variants = parse_budgets(budget), parse_variants(policy)
    labels = [variant.label for variant in variants if not variant.is_oracle]
    if against not in (None, *labels):
        raise UserError(f"--against {against}: is not one of the compared policies; add it to --policy")
    ways: dict[str, Any] = {name: list(dict.fromkeys(split(typed))) for name, typed in (("append", append), ("encode", encode))}
    for way, look in product(*ways.values()):
        Variant(ORACLE).under(way, look)
    with progress("loading the model") as step, TemporaryDirectory(prefix="edgevlm-text-") as folder:
        if suite in TEXT_SUITES:
            from edgevlm.bench.accuracy.text_bundle import text_bundle

            model = str(text_bundle(Path(model), Path(folder)))
        settings = AccuracySettings(resolve_model(model, step, to_stderr), frames, seed, suite, noise, crf, engine)
        comparison = compare(
            settings, variants, budgets, streams, progress=step, out=out, resume=resume, workers=workers, **ways
        )
    table = Table(as_json)
    for line in report_lines(comparison, against or (USUAL if USUAL in labels else [*labels, USUAL][0])):
        if as_json or line.get("kind", NOW).partition("/")[0] in (NOW, BACKWARD, UNSEEN) or "left_out" in line:
            table.print(line)
    exit_if_skipped(policy, [skip.label for skip in comparison.skipped])


def exit_if_skipped(typed: list[str], skipped: list[str]) -> None:
    """Exit with status 1 if a policy requested by name could not be measured."""
    named = {variant.label for variant in parse_variants([name for text in typed for name in split(text) if name != "all"])}
    if missing := sorted({label for label in skipped if Variant(label).on_full_frames.label in named or label in named}):
        to_stderr(f"skipped: {', '.join(missing)}; see the reasons above")
        raise SystemExit(1)
