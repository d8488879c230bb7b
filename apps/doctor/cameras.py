"""``edgevlm cameras``: the cameras of this machine, each tried, with the reason where one cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edgevlm.apps.schemas import json_line
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.apps.sources.devices import CSI_DRIVER, ROOT, Probed, UsbConnection, devices, probe
from edgevlm.apps.sources.gstreamer import CSI_ELEMENT, has_element, jetson_problem, opencv_problem, pygobject_problem
from edgevlm.engines.devices.machine import Machine, Outcome
from edgevlm.errors import UserError

SHOWN = 4  # modes in a line for a person


@dataclass(frozen=True, slots=True)
class CameraEntry:
    """``camera``: a value of --camera; ``problem``: why it cannot be used, None where it can."""

    camera: str
    kind: str
    name: str
    problem: str | None
    modes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def as_json(self) -> str:
        fields = {"camera": self.camera, "kind": self.kind, "name": self.name, "usable": self.problem is None}
        return json_line("camera", {**fields, "reason": self.problem, "modes": self.modes, "links": self.links})

    def __str__(self) -> str:
        text = self.problem or ", ".join(self.modes[:SHOWN]) + (
            f" and {len(self.modes) - SHOWN} more" if self.modes[SHOWN:] else ""
        )
        lines = [
            f"{self.camera:<13} {'usable' if self.problem is None else 'no':<8}{self.name}" + (f": {text}" if text else "")
        ]
        return "\n".join([*lines, *(f"{'':<22}also {link}" for link in self.links)])


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that a kind of source needs, and why it is missing."""

    name: str
    problem: str | None

    def as_json(self) -> str:
        return json_line("ability", {"name": self.name, "usable": self.problem is None, "reason": self.problem})

    def __str__(self) -> str:
        return f"{self.name:<33} {'yes' if self.problem is None else 'no: ' + self.problem}"


@dataclass(slots=True)
class Found:
    """The cameras, the demo first, and the abilities."""

    cameras: list[CameraEntry] = field(default_factory=list)
    abilities: list[Ability] = field(default_factory=list)


def look_around(root: Path = ROOT) -> Found:
    """Query every device and take a picture with it; find what GStreamer and the platform offer."""
    probed = [probe(device, root, see=look_through) for device in devices(root)]
    sensors = [each for each in probed if each.described is not None and each.described.driver == CSI_DRIVER]
    cameras = [CameraEntry("demo", "demo", "the world that the embedded model was taught", None)]
    cameras += [_usb(each) for each in probed if each not in sensors]
    cameras += [_csi(number, each) for number, each in enumerate(sensors)]
    abilities = [
        Ability("GStreamer through OpenCV", opencv_problem()),
        Ability("GStreamer through PyGObject", pygobject_problem()),
        Ability("decoding by a Jetson's decoder", jetson_problem(root)),
    ]
    return Found(cameras, abilities)


def look_through(path: Path) -> str | None:
    """Take one picture; return why that failed, or None."""
    try:
        connection = UsbConnection(str(path), SourceOptions())
    except UserError as error:
        return str(error)
    try:
        if connection.grab() is None or connection.retrieve() is None:
            return "opens, but gives no picture; plug it into another port, or ask for another mode (--size, --pixel-format)"
    finally:
        connection.close()
    return None


def list_cameras(as_json: bool, root: Path = ROOT) -> Iterator[str]:
    """Yield the lines of the command."""
    found = look_around(root)
    entries: list[CameraEntry | Ability] = [*found.cameras, *found.abilities]
    if as_json:
        yield from (entry.as_json() for entry in entries)
        return
    yield from map(str, found.cameras)
    if len(found.cameras) == 1:
        yield "no camera: there is no /dev/videoN; connect one (a container needs --device /dev/video0), or give a URL"
    yield ""
    yield from map(str, found.abilities)


def _usb(probed: Probed) -> CameraEntry:
    device = probed.device
    modes = tuple(map(str, probed.described.modes)) if probed.described else ()
    return CameraEntry(str(device.path), device.bus, device.name, probed.problem, modes, tuple(map(str, device.links)))


def _csi(number: int, probed: Probed) -> CameraEntry:
    problem = None
    if opencv_problem() is not None and not has_element(CSI_ELEMENT):
        problem = pygobject_problem() or f"GStreamer has no {CSI_ELEMENT}: sudo apt install nvidia-l4t-gstreamer"
    return CameraEntry(f"csi://{number}", "csi", probed.device.name, problem, links=(str(probed.device.path),))


def check_cameras(machine: Machine) -> list[Outcome]:
    """Check every camera but the demo: whether it gives a picture, and why not."""
    found = machine.within(lambda: look_around(machine.root))
    if found is None:
        return [("warn", f"one gave no answer in {machine.limit_s:g} s", "unplug it and plug it in again")]
    outcomes: list[Outcome] = []
    for entry in found.cameras[1:]:
        status, _, fix = (entry.problem or "").partition("; ")
        text = f"{entry.camera} ({entry.name})"
        if entry.problem is None:
            outcomes.append(("ok", f"{text} gives pictures"))
        else:
            outcomes.append(("warn", f"{text}: {status}", fix or "edgevlm cameras says more"))
    return outcomes or [("ok", "no /dev/videoN found: the demo, files and URLs can be watched")]
