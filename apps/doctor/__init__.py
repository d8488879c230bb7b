"""``edgevlm doctor``: what would stop a first run, and how to mend it. A check is a function and a line of the registry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator

from edgevlm.apps.doctor import cameras, graphics, jetson, nvidia, python, system
from edgevlm.engines.devices.machine import FAIL, Finding, Machine

Check = Callable[[Machine], Iterable[Finding]]

CHECKS: dict[str, Check] = {
    "python": python.version,
    "extension": python.extension,
    "onnxruntime": python.onnxruntime,
    "opencv": python.opencv,
    "cpu": system.cpu,
    "memory": system.memory,
    "disk": system.disk,
    "device": jetson.device,
    "jetpack": jetson.jetpack,
    "cuda": jetson.cuda,
    "tensorrt": jetson.tensorrt,
    "cma": jetson.cma,
    "swap": jetson.swap,
    "power mode": jetson.power_mode,
    "clocks": jetson.clocks,
    "gpu": graphics.gpu,
    "gpu in use": graphics.in_use,
    "cudnn": nvidia.cudnn,
    "cuda runtime": nvidia.runtime,
    "cuda wheels": nvidia.wheels,
    "permissions": graphics.permissions,
    "cameras": cameras.cameras,
}


def examine(machine: Machine | None = None) -> Iterator[Finding]:
    """The findings of every check, in the registry's order. A check that breaks is a finding too, and stops no other."""
    machine = machine or Machine()
    for name, check in CHECKS.items():
        try:
            yield from check(machine)
        except Exception as error:
            yield Finding(name, "warn", f"could not be looked at ({error!r})", "report it: a check should not break")


def report(as_json: bool, machine: Machine | None = None) -> tuple[list[str], bool]:
    """The lines of the command, and whether nothing would stop a run."""
    found = list(examine(machine))
    lines = [json.dumps(finding.line()) if as_json else str(finding) for finding in found]
    counted = {status: sum(finding.status == status for finding in found) for status in ("ok", "warn", "fail")}
    if not as_json:
        verdict = "a run would stop" if counted[FAIL] else "nothing would stop a run"
        lines += ["", f"{verdict}: {counted['ok']} ok, {counted['warn']} to look at, {counted['fail']} to mend"]
    return lines, not counted[FAIL]
