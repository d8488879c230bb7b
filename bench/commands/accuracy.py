"""``edgevlm bench accuracy`` and its options, for the demo world's suites and the published benchmarks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json, flag, option
from edgevlm.bench.suites import GUIDE, LMMS_EVAL, SUITES
from edgevlm.errors import UserError, nearest
from edgevlm.progress import to_stderr
from edgevlm.runtime.engine import DEFAULT_ENGINE

TEXT = ("text-facts", "text-scenes")
DEMO: tuple[str, ...] = ("streamqa", "streamqa-hard", "longstream", *TEXT)
BUDGETS = {"longstream": "256,512", **dict.fromkeys(TEXT, "12.5%,6.25%"), "demo": "50%,25%,12.5%,6.25%,3%", "published": "6k"}
DEMO_ONLY = ("append", "encode", "frames", "streams", "seed", "noise", "crf", "against")
PUBLISHED_ONLY = ("data", "fps")
WORLD, PUBLISHED = "Demo world", "Published benchmarks"
EPILOG = f"""
\b
Suites of the demo world, and their usual budgets:
  streamqa       ask after the last frame ({BUDGETS["demo"]})
  streamqa-hard  streamqa with moving scenes, cuts and more events
  longstream     ask what was shown thousands of frames ago ({BUDGETS["longstream"]})
  text-facts     ask a --model FILE.gguf who came by ({BUDGETS["text-facts"]})
  text-scenes    text-facts with scenes that hardly change, as in video

Published benchmarks ({BUDGETS["published"]}), read from --data: {", ".join(SUITES)}. Each video is decoded once, and a question
sees what came before its time.

Benchmarks of whole videos go through lmms-eval: lmms-eval --model edgevlm --tasks {",".join(LMMS_EVAL.values())}
"""


def check_suite(name: str) -> str:
    """Return the suite's name unchanged. Raises UserError for a suite that this command cannot run."""
    if name in LMMS_EVAL:
        raise UserError(f"--suite {name}: use lmms-eval --model edgevlm --tasks {LMMS_EVAL[name]} ({GUIDE})")
    if name not in (known := (*DEMO, *SUITES)):
        raise UserError(f"--suite {name}: not found; {nearest(name, known)}")
    return name


def accuracy(
    context: typer.Context,
    suite: Annotated[str, option("NAME", "Ask the questions of this suite, listed below.", callback=check_suite)],
    policy: Annotated[list[str] | None, option("all|NAME,..", "Compare these; NAME@eager re-indexes eagerly.", "all")] = None,
    budget: Annotated[
        str | None, option("P%,..|6k,..", "Compare at these budgets: fractions of a stream, or tokens.", "the suite's, below")
    ] = None,
    append: Annotated[str, option("all,changed[:tau=T]", "Append all of each frame, or only changes.", panel=WORLD)] = "all",
    encode: Annotated[
        str, option("all,changed[:interval=K]", "Encode all of each frame, or only changes.", panel=WORLD)
    ] = "all",
    model: Annotated[str, option("demo|BUNDLE|ORG/NAME|FILE.gguf", "Ask this model.")] = "demo",
    engine: Annotated[str, option("NAME|./FILE.py:CLASS", "Run the model with this engine.")] = DEFAULT_ENGINE,
    out: Annotated[Path | None, option("FILE", "Save finished work in this file as JSON lines.")] = None,
    resume: Annotated[bool, flag("--resume", "Continue the work in --out.")] = False,
    workers: Annotated[int, option("N", "Work in this many processes.", min=1, max=256)] = 1,
    as_json: Json = False,
    frames: Annotated[int, option("N", "Show streams of this many frames.", panel=WORLD, min=4)] = 64,
    streams: Annotated[int, option("N", "Show this many streams.", panel=WORLD, min=1)] = 200,
    seed: Annotated[str, option("N|test", "Draw streams from this seed; test is for reports.", panel=WORLD)] = "0",
    noise: Annotated[float, option("LEVELS", "Add pixel noise of this standard deviation.", panel=WORLD, min=0, max=64)] = 0.0,
    crf: Annotated[
        int | None, option("N", "Compress frames as H.264 with this rate factor.", panel=WORLD, min=0, max=51)
    ] = None,
    against: Annotated[str | None, option("NAME", "Report differences from this policy.", "infinipot-v", panel=WORLD)] = None,
    data: Annotated[Path | None, option("DIR", "Read the benchmark's files from this folder.", panel=PUBLISHED)] = None,
    fps: Annotated[float, option("F", "Watch at this frame rate.", panel=PUBLISHED, min=1e-5, max=1000)] = 1.0,
) -> None:
    """Ask all policies the same questions, giving each the same number of bytes."""
    for name in DEMO_ONLY if suite in SUITES else PUBLISHED_ONLY:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"--{name.replace('_', '-')}: is not supported with --suite {suite}; remove it")
    if resume and out is None:
        raise UserError("--resume continues an earlier run; add --out FILE, its journal")
    where, usual = ("edgevlm.bench.suites.run", "published") if suite in SUITES else ("edgevlm.bench.accuracy.command", suite)
    usual = BUDGETS.get(usual, BUDGETS["demo"])
    try:
        import_module(where).run_suite(**{**context.params, "policy": policy or ["all"], "budget": budget or usual})
    except KeyboardInterrupt:
        resumed = f"stopped; run the same command with --resume to continue ({out})"
        to_stderr(resumed if out else "stopped; nothing was saved: add --out FILE")
        raise
