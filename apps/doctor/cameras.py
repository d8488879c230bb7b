"""``edgevlm cameras``: try each camera of this machine, and report why a camera cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from edgevlm.apps.schemas import json_line
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.apps.sources.devices import ROOT, UsbConnection, devices, problem_of
from edgevlm.apps.sources.gstreamer import csi_problem
from edgevlm.engines.devices.machine import Machine, Outcome
from edgevlm.errors import UserError
from edgevlm.runtime.plugins import names


@dataclass(frozen=True, slots=True)
class CameraEntry:
    """A camera. ``camera``: the value for ``--camera``. ``problem``: why the camera cannot be used, or None."""

    camera: str
    kind: str
    name: str
    problem: str | None
    mode: str = ""
    links: tuple[str, ...] = ()

    def as_json(self) -> str:
        fields = {"camera": self.camera, "kind": self.kind, "name": self.name, "usable": self.problem is None}
        return json_line("camera", {**fields, "reason": self.problem, "mode": self.mode, "links": self.links})

    def __str__(self) -> str:
        text = self.problem or self.mode
        line = f"{self.camera:<13} {'usable' if self.problem is None else 'no':<8}{self.name}" + (f": {text}" if text else "")
        return "\n".join([line, *(f"{'':<22}also {link}" for link in self.links)])


def look_around(root: Path = ROOT) -> list[CameraEntry]:
    """Try every camera. Return the cameras, with the demo first and a Jetson's CSI sensors last."""
    found, sensors = [CameraEntry("demo", "demo", "the world that the embedded model was taught", None)], 0
    for device in sorted(devices(root), key=lambda device: device.is_sensor):
        links = tuple(map(str, device.links))
        if device.is_sensor:
            found.append(CameraEntry(f"csi://{sensors}", "csi", device.name, csi_problem(), links=(str(device.path), *links)))
            sensors += 1
        else:
            problem, mode = look_through(device.path, root)
            found.append(CameraEntry(str(device.path), device.bus, device.name, problem, mode, links))
    return found


def look_through(path: Path, root: Path = ROOT) -> tuple[str | None, str]:
    """Take one picture with a camera. Return the problem, if any, and the camera's mode."""
    try:
        connection = UsbConnection(str(path), SourceOptions(), root)
    except UserError as error:
        return str(error), ""
    with closing(connection):
        if connection.grab() is not None and connection.retrieve() is not None:
            return None, connection.mode
        why = "captures no pictures; plug it into another port, or request another mode (--size, --pixel-format)"
        return problem_of(path, root) or why, connection.mode


def list_cameras(as_json: bool, root: Path = ROOT) -> Iterator[str]:
    """Yield the lines that ``edgevlm cameras`` prints."""
    found = look_around(root)
    packages = [CameraEntry(name, "package", f"from an installed package, also {name}://..", None) for name in names("sources")]
    yield from (entry.as_json() if as_json else str(entry) for entry in [*found, *packages])
    if len(found) == 1 and not as_json:
        yield "no camera found: /dev/videoN does not exist; connect one (a container needs --device /dev/video0), or give a URL"


def check_cameras(machine: Machine) -> list[Outcome]:
    """Check that every camera except the demo delivers an image."""
    found = machine.within(lambda: look_around(machine.root))
    if found is None:
        return [("warn", f"a camera did not respond within {machine.limit_s:g} s", "unplug it and plug it in again")]
    outcomes: list[Outcome] = []
    for entry in found[1:]:
        why, _, fix = (entry.problem or "").partition("; ")
        text = f"{entry.camera} ({entry.name})"
        outcomes.append(
            ("warn", f"{text}: {why}", fix or "see edgevlm cameras for details") if why else ("ok", f"{text} captures pictures")
        )
    return outcomes or [("ok", "no /dev/videoN found: the demo, files and URLs can be watched")]
