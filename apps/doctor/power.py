"""Print power, clocks, power mode, processor and memory at regular intervals, for ``edgevlm power``."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import psutil

from edgevlm.apps.schemas import json_line
from edgevlm.engines.devices.jetson import GPU_CLOCKS, power_modes
from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.power import NOT_MEASURED, Energy, Meter, find_meter, gained

DEVFREQ = "sys/class/devfreq"


def mode_of(machine: Machine) -> str | None:
    found = re.search(r"pmode:\s*(\d+)", machine.read("var/lib/nvpmodel/status") or "")
    return power_modes(machine).get(int(found[1])) if found else None


def clocks_of(machine: Machine) -> dict[str, float]:
    """Return the clocks of the GPU, the memory, other devices and the first processor core, in MHz."""
    found = {name: machine.number(f"{DEVFREQ}/{name}/cur_freq") for name in machine.names(DEVFREQ)}
    named = {"gpu" if f"{DEVFREQ}/{name}" in GPU_CLOCKS else name: hertz / 1e6 for name, hertz in found.items() if hertz}
    core = machine.number("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
    return named | ({"cpu0": core / 1e3} if core else {})


def show_power(
    interval_s: float, seconds: float | None, as_json: bool, machine: Machine | None = None
) -> Iterator[tuple[bool, str]]:
    """Yield a line every ``interval_s`` seconds and, after ``seconds`` or at ctrl-C, a summary.

    Each line comes with a flag: True for data, False for a note. A line gives the mean watts since the previous line.
    """
    machine = machine or Machine()
    meter, missing = find_meter(machine)
    if meter is None:
        yield False, f"power: {NOT_MEASURED} ({'; '.join(missing)})"
    else:
        yield False, f"power: {meter.name}; the total is {' + '.join(meter.summed)}: {meter.why}"
    with Energy(meter or Meter("none", (), (), "", dict)) as energy, suppress(KeyboardInterrupt):
        for line in _lines(machine, energy.meter, interval_s, seconds, as_json):
            yield True, line
    if meter is not None:
        yield True, json_line("energy", energy.figures()) if as_json else _summary(energy)


def _lines(machine: Machine, meter: Meter, interval_s: float, seconds: float | None, as_json: bool) -> Iterator[str]:
    begun = then = time.monotonic()
    before = meter.read()
    while seconds is None or then - begun < seconds:
        time.sleep(interval_s if seconds is None else min(interval_s, seconds - (then - begun)))
        now, after = time.monotonic(), meter.read()
        joules = {rail: gained(before.get(rail), after.get(rail), now - then) for rail in meter.rails}
        watts = {rail: None if joule is None else joule / (now - then) for rail, joule in joules.items()}
        parts = [watts[rail] for rail in meter.summed]
        known = [part for part in parts if part is not None]
        said: dict[str, Any] = {
            "time_s": round(now - begun, 3), "watts": round(sum(known), 3) if parts and len(known) == len(parts) else None,
            "rails": {rail: None if value is None else round(value, 3) for rail, value in watts.items()},
            "mode": mode_of(machine), "clocks_mhz": {name: round(mhz) for name, mhz in clocks_of(machine).items()},
            "cpu_percent": psutil.cpu_percent(), "memory_mb": round(psutil.virtual_memory().used / 1e6),
        }  # fmt: skip
        yield json_line("power", said) if as_json else _in_words(said)
        then, before = now, after


def _in_words(said: Mapping[str, Any]) -> str:
    total, *rails = (NOT_MEASURED if watts is None else f"{watts:.2f} W" for watts in (said["watts"], *said["rails"].values()))
    parts = [total, *(f"{rail} {watts}" for rail, watts in zip(said["rails"], rails, strict=True))]
    parts += [f"{name} {mhz} MHz" for name, mhz in said["clocks_mhz"].items()] + [said["mode"]] * bool(said["mode"])
    parts += [f"processor {said['cpu_percent']:.0f} %", f"memory {said['memory_mb']} MB"]
    return f"{said['time_s']:8.1f} s  {'  '.join(parts)}"


def _summary(energy: Energy) -> str:
    if energy.joules is None:
        return f"energy: {NOT_MEASURED} throughout"
    return f"energy: {energy.joules:.1f} J in {energy.seconds:.1f} s, {energy.watts:.2f} W"
