"""``edgevlm doctor``: check this machine and suggest fixes. A check is a function and a line of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from edgevlm.apps.doctor import checks
from edgevlm.apps.doctor.cameras import check_cameras
from edgevlm.apps.schemas import json_line
from edgevlm.engines.devices.jetson import is_jetson
from edgevlm.engines.devices.machine import Machine, Outcome, Status

Check = Callable[[Machine], "Outcome | list[Outcome] | None"]


def anywhere(machine: Machine) -> bool:
    return True


CHECKS: dict[str, tuple[Callable[[Machine], bool], Check]] = {  # where each applies, and what it calls
    "python": (anywhere, checks.python),
    "extension": (anywhere, checks.extension),
    "onnxruntime": (anywhere, checks.onnxruntime),
    "opencv": (anywhere, checks.opencv),
    "cpu": (anywhere, checks.cpu),
    "memory": (anywhere, checks.memory),
    "disk": (anywhere, checks.disk),
    "device": (is_jetson, checks.device),
    "jetpack": (is_jetson, checks.jetpack),
    "cuda": (is_jetson, checks.cuda),
    "tensorrt": (is_jetson, checks.tensorrt),
    "cma": (is_jetson, checks.cma),
    "swap": (is_jetson, checks.swap),
    "power mode": (is_jetson, checks.power_mode),
    "clocks": (is_jetson, checks.clocks),
    "gpu": (anywhere, checks.gpu),
    "gpu in use": (checks.has_gpu, checks.in_use),
    "cudnn": (checks.has_gpu, checks.cudnn),
    "cuda runtime": (checks.has_gpu, checks.cuda_runtime),
    "cuda wheels": (checks.has_gpu, checks.wheels),
    "permissions": (anywhere, checks.permissions),
    "cameras": (anywhere, check_cameras),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """status: ``ok``, ``warn`` (works, but worse than it could), ``fail`` (a run would fail). fix: how, if there is a way."""

    check: str
    status: Status
    found: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.status:<5}{self.check:<13}{self.found}"
        return f"{text}\n{'':<18}-> {self.fix}" if self.fix else text


def examine(machine: Machine | None = None) -> Iterator[Finding]:
    """Yield the findings of every check, in the table's order. A check that breaks is a finding too, and stops no other."""
    machine = machine or Machine()
    for name, (applies, check) in CHECKS.items():
        try:
            found = check(machine) if applies(machine) else None
        except Exception as error:
            found = "warn", f"the check failed ({error!r})", "please report this"
        if found is not None:
            yield from (Finding(name, *outcome) for outcome in (found if isinstance(found, list) else [found]))


def report(as_json: bool, machine: Machine | None = None) -> tuple[list[str], bool]:
    """Return the lines of the command, and whether this machine is ready for a run."""
    found = list(examine(machine))
    lines = [json_line("finding", asdict(finding)) if as_json else str(finding) for finding in found]
    counted = {status: sum(finding.status == status for finding in found) for status in ("ok", "warn", "fail")}
    if not as_json:
        verdict = "not ready" if counted["fail"] else "ready"
        lines += ["", f"{verdict}: {counted['ok']} ok, {counted['warn']} warnings, {counted['fail']} failures"]
    return lines, not counted["fail"]
