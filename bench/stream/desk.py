"""The processes of ``edgevlm bench stream``: one for each model, policy and chunk, in turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from edgevlm.bench.child import child, lines
from edgevlm.bench.stream.sitting import Work, place
from edgevlm.engines.power import find_meter
from edgevlm.engines.power.energy import idle_watts
from edgevlm.runtime.auto import AUTO
from edgevlm.runtime.bundle import Progress
from edgevlm.runtime.policies import create_policy

COMMAND = [sys.executable, "-m", "edgevlm.bench.stream.sitting"]


def run(
    models: Sequence[str], policies: Sequence[str], chunks: Sequence[int], idle_s: float, progress: Progress, **options: Any
) -> Iterator[dict[str, Any]]:
    """A line a mark of each model, policy and chunk. options: the rest of :class:`Work`.

    idle_s: how long the machine's power is measured at rest before all, where it has a meter. A process that the system kills
    while memory is short is a line with ``oom``. Raises UserError for what a process says the user did wrong.
    """
    for policy in policies:
        if policy != AUTO:
            create_policy(policy)
    meter, missing = find_meter()
    idle = None
    if meter is None:
        progress(f"energy: not measured ({'; '.join(missing)})")
    elif idle_s:
        progress(f"measuring {meter.name} at rest for {idle_s:g} s")
        idle = idle_watts(meter, idle_s)
    for model, policy, chunk in product(models, policies, chunks):
        yield from _measured(Work(model=model, policy=policy, chunk=chunk, idle_w=idle, **options), progress)


def _measured(work: Work, progress: Progress) -> Iterator[dict[str, Any]]:
    left = list(work.marks)
    progress(f"{work.model}, {work.policy}, chunks of {work.chunk}: {left[-1]} frames")
    with child(COMMAND, asdict(work)) as process:
        for line in lines(process):
            left.remove(line["frames"])
            yield line
    if left:
        yield from _killed(work, left, process.returncode)


def _killed(work: Work, left: Sequence[int], code: int) -> Iterator[dict[str, Any]]:
    """Lines of the marks that a process did not live to see."""
    by_system = code == -9
    if not by_system:
        raise RuntimeError(f"{work.model}, {work.policy}: its process ended with code {code}")
    for mark in left:
        yield {**place(work, mark), "oom": True, "stopped": "the system killed it: its memory is short"}
