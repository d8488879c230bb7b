"""Cameras, as ``edgevlm cameras`` sees them, within a time limit."""

from __future__ import annotations

from collections.abc import Iterator

from edgevlm.engines.devices.machine import Finding, Machine


def cameras(machine: Machine) -> Iterator[Finding]:
    """Every camera but the demo: whether it gives a picture, and why not."""
    try:
        from edgevlm.apps.cameras import look_around
    except ImportError as error:
        yield Finding("cameras", "warn", f"cannot be looked for ({error})", "pip install 'edgevlm[cpu]'")
        return
    found = machine.within(lambda: look_around(machine.root))
    if found is None:
        yield Finding("cameras", "warn", f"one gave no answer in {machine.limit_s:g} s", "unplug it and plug it in again")
        return
    entries = [entry for entry in found.cameras if entry.kind != "demo"]
    if not entries:
        yield Finding("cameras", "ok", "no /dev/videoN found: the demo, files and URLs can be watched")
    for entry in entries:
        status, _, mend = (entry.problem or "").partition("; ")
        said = f"{entry.camera} ({entry.name})"
        if entry.problem is None:
            yield Finding("cameras", "ok", f"{said} gives pictures")
        else:
            yield Finding("cameras", "warn", f"{said}: {status}", mend or "edgevlm cameras says more")
