"""``edgevlm bench accuracy`` of the demo world: from what was typed to the report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from edgevlm.bench.accuracy.report import BACKWARD, NOW, UNSEEN, report_lines
from edgevlm.bench.output import Table
from edgevlm.calib.accuracy.cases import seed_words
from edgevlm.calib.accuracy.compare import compare
from edgevlm.calib.accuracy.pools import HERE, Processes
from edgevlm.calib.accuracy.text_facts import TEXT_FACTS
from edgevlm.calib.accuracy.variants import ORACLE, Variant, parse_budgets, parse_variants, split
from edgevlm.calib.accuracy.worker import AccuracySettings
from edgevlm.errors import UserError
from edgevlm.progress import progress
from edgevlm.runtime.settings import ALL

USUAL = "infinipot-v"  # what paired differences are to, if it is there


def run_demo_suite(
    settings: AccuracySettings,
    policies: list[str],
    budget: str,
    streams: int,
    append: str = ALL,
    encode: str = ALL,
    against: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    pool: Processes = HERE,
    as_json: bool = False,
) -> None:
    """Run to the end and print the report. Raises UserError before anything is measured where that is possible."""
    check(settings, encode)
    budgets = parse_budgets(budget)
    variants = parse_variants(policies)
    against = reference(against, variants)
    appends, encodes = (list(dict.fromkeys(split(ways))) for ways in (append, encode))
    for way, look in product(appends, encodes):
        Variant(ORACLE).under(way, look)
    with progress("loading the model") as step, resume_hint(out), TemporaryDirectory(prefix="edgevlm-text-") as folder:
        if settings.suite == TEXT_FACTS:
            from edgevlm.bench.accuracy.text_bundle import text_bundle

            settings = replace(settings, model=str(text_bundle(Path(settings.model), Path(folder))))
        comparison = compare(
            settings, variants, budgets, streams, out=out, resume=resume, pool=pool, progress=step, append=appends,
            encode=encodes,
        )  # fmt: skip
    table = Table(as_json)
    for line in report_lines(comparison, against):
        if as_json or line.get("kind", NOW).partition("/")[0] in (NOW, BACKWARD, UNSEEN) or "left_out" in line:
            table.print(line)


def check(settings: AccuracySettings, encode: str) -> None:
    """Raise UserError for settings that do not go together."""
    try:
        seed_words(settings.seed)
    except ValueError:
        raise UserError(f"--seed {settings.seed}: give a number from 0 up, or test for the seeds kept for reports") from None
    if settings.suite == TEXT_FACTS and not settings.model.endswith(".gguf"):
        raise UserError(f"--suite {TEXT_FACTS} asks a language model's --model FILE.gguf")
    if settings.suite == TEXT_FACTS and encode != ALL:
        raise UserError(f"--encode: is not for --suite {TEXT_FACTS}, which shows text; leave it out")


def reference(against: str | None, variants: list[Variant]) -> str:
    """The policy that differences are to. Raises UserError for one that is not compared."""
    labels = [variant.label for variant in variants if not variant.is_oracle]
    if against is not None and against not in labels:
        raise UserError(f"--against {against}: is not among the policies compared; add it to --policy")
    return against or next((label for label in labels if label == USUAL), labels[0] if labels else USUAL)


@contextmanager
def resume_hint(out: Path | None) -> Iterator[None]:
    """Say how to resume after ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        resumed = f"stopped; the same command with --resume continues ({out})"
        print(resumed if out else "stopped; --out FILE would have kept what was done", file=sys.stderr)
        raise
