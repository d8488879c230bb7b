"""Find how much memory this process may still allocate, given what is free in the system and in its control groups."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path("/")
GROUPS = (  # for cgroup v2 and v1: controller, folder, file names of limit and usage, cache's name in memory.stat
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Available(NamedTuple):
    """The available and total memory, in bytes."""

    free: int
    total: int


def available() -> Available:
    """Return the memory of the system or of one of this process's control groups, whichever has the least available."""
    memory = psutil.virtual_memory()
    return min([Available(memory.available, memory.total), *group_limits()], key=lambda each: each.free)


def group_limits(root: Path | None = None) -> list[Available]:
    """Return the available and total memory of each control group that limits this process. ``root`` replaces ``/``."""
    root, own, found = root or ROOT, dict[str, str](), []
    with suppress(OSError, ValueError):
        lines = (line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines())
        own = {name: path for _, names, path in lines for name in names.split(",")}
    for controller, folder, limit, usage, cached in GROUPS:
        parts = [part for part in own.get(controller, "").split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            group = root.joinpath(folder, *parts[:depth])
            with suppress(OSError, ValueError, KeyError):  # raised for a group without a limit
                most, used = (int((group / name).read_text()) for name in (limit, usage))
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                found.append(Available(most - used + int(stat[cached]), most))
    return found
