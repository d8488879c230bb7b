"""A source that goes on where a snapshot was taken."""

from __future__ import annotations

import time

from rich.console import Console

from edgevlm.apps.gate import Gate
from edgevlm.apps.run import Plan
from edgevlm.apps.sources import Source
from edgevlm.runtime.snapshots import Keeper


def go_on(source: Source, keeper: Keeper, plan: Plan, gate: Gate | None = None) -> None:
    """Take ``source``, ``plan`` and ``gate`` to where the resumed snapshot was taken, if there is one.

    What is recorded, the demo and files, goes on behind the frame that was the newest: those up to it are read and passed over.
    What is live goes on at once, and its clock has gone on meanwhile: its times begin at the snapshot's and the seconds since.
    The gate sees what is passed over, so that it holds back what it would have.
    Questions planned for times before the snapshot's have been asked.
    """
    if keeper.resumed is None:
        return
    about = keeper.resumed.about
    time_s = about["session"]["time_s"]
    plan.at = [(at, question) for at, question in plan.at if at >= time_s]
    seen = None if gate is None else lambda frame: gate(frame.image)
    with Console(stderr=True).status(f"going to {time_s:.1f} s of {source.name}"):
        if not source.skip(time_s, seen):
            plan.since = time_s + max(0.0, time.time() - about["written"])
    if gate is not None:
        gate.gated = 0
