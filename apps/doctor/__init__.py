"""``edgevlm doctor``: check this machine and suggest fixes. A check is a function and a line of the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from edgevlm.apps.doctor import cameras, gpu, software
from edgevlm.apps.schemas import json_line
from edgevlm.engines.devices import jetson
from edgevlm.engines.devices.machine import FAIL, Finding, Machine, Outcome

Check = Callable[[Machine], Iterable[Outcome]]

CHECKS: dict[str, Check] = {
    "python": software.version,
    "extension": software.extension,
    "onnxruntime": software.onnxruntime,
    "opencv": software.opencv,
    "cpu": software.cpu,
    "memory": software.memory,
    "disk": software.disk,
    "device": jetson.device,
    "jetpack": jetson.jetpack,
    "cuda": jetson.cuda,
    "tensorrt": jetson.tensorrt,
    "cma": jetson.cma,
    "swap": jetson.swap,
    "power mode": jetson.power_mode,
    "clocks": jetson.clocks,
    "gpu": gpu.gpu,
    "gpu in use": gpu.in_use,
    "cudnn": gpu.cudnn,
    "cuda runtime": gpu.runtime,
    "cuda wheels": gpu.wheels,
    "permissions": gpu.permissions,
    "cameras": cameras.cameras,
}


def examine(machine: Machine | None = None) -> Iterator[Finding]:
    """The findings of every check, in the registry's order. A check that breaks is a finding too, and stops no other."""
    machine = machine or Machine()
    for name, check in CHECKS.items():
        try:
            for outcome in check(machine):
                yield Finding(name, *outcome)
        except Exception as error:
            yield Finding(name, "warn", f"the check failed ({error!r})", "please report this")


def report(as_json: bool, machine: Machine | None = None) -> tuple[list[str], bool]:
    """The lines of the command, and whether this machine is ready for a run."""
    found = list(examine(machine))
    lines = [json_line("finding", asdict(finding)) if as_json else str(finding) for finding in found]
    counted = {status: sum(finding.status == status for finding in found) for status in ("ok", "warn", "fail")}
    if not as_json:
        verdict = "not ready" if counted[FAIL] else "ready"
        lines += ["", f"{verdict}: {counted['ok']} ok, {counted['warn']} warnings, {counted['fail']} failures"]
    return lines, not counted[FAIL]
