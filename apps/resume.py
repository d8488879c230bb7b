"""A source that goes on where a snapshot was taken."""

from __future__ import annotations

import time

from rich.console import Console

from edgevlm.apps.run import Plan
from edgevlm.apps.sources import Source
from edgevlm.apps.sources.newest import NewestFrame
from edgevlm.runtime.state import Keeper


def go_on(source: Source, keeper: Keeper, plan: Plan, *, realtime: bool) -> Source:
    """``source`` and ``plan`` from the resumed snapshot on, if there is one; a recorded source is then paced if ``realtime``.

    What is recorded, the demo and files, goes on behind the frame that was the newest: those up to it are read and passed over.
    What is live goes on at once, and its clock has gone on meanwhile: its times begin at the snapshot's and the seconds since.
    Questions planned for times before the snapshot's have been asked.
    """
    if keeper.resumed is not None:
        about = keeper.resumed.about
        time_s = about["session"]["time_s"]
        plan.at = [(at, question) for at, question in plan.at if at >= time_s]
        if source.live:
            plan.since = time_s + max(0.0, time.time() - about["written"])
        else:
            with Console(stderr=True).status(f"going to {time_s:.1f} s of {source.name}"):
                pass_over(source, time_s)
    return NewestFrame(source, paced=True) if realtime and not source.live else source


def pass_over(source: Source, time_s: float) -> None:
    """Read up to the frame of that time."""
    while (frame := source.read()) is not None and frame.time_s < time_s:
        pass
