"""Commands that inspect the machine: ``edgevlm cameras``, ``check``, ``doctor``, ``power`` and ``state``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from edgevlm.apps.commands.cli_options import Json, StateKeyFile, of_file, option
from edgevlm.apps.commands.lazy import plain_app
from edgevlm.errors import UserError
from edgevlm.progress import progress, to_stderr, to_stdout


def cameras(json: Json = False) -> None:
    """List this machine's cameras, after taking one picture with each.

    If a camera gives no picture, its line contains the reason.
    """
    with progress("testing the cameras"):
        from edgevlm.apps.doctor.cameras import list_cameras

        lines = list(list_cameras(json))
    to_stdout("\n".join(lines))


def check(
    name: Annotated[str, typer.Argument(metavar="NAME|./FILE.py:THING", help="Check this policy, source, family or engine.")],
    checkpoint: Annotated[Path | None, option("DIR", "Try a family on this checkpoint.")] = None,
) -> None:
    """Check a policy, source, family or engine.

    Prints a line for each check that passed; the first failure ends the command with status 2.
    """
    with progress(f"checking {name}"):
        from edgevlm.packages import needed

        lines = needed("edgevlm.testing", "checking", "cpu").check(name, checkpoint=checkpoint)
    to_stdout("\n".join(lines))


def doctor(
    engine: Annotated[str | None, option("NAME|./FILE.py:CLASS", "Also compare this engine with onnxruntime-cpu.")] = None,
    json: Json = False,
) -> None:
    """Check this machine and suggest fixes.

    Exits with status 1 if a first run would fail.
    """
    with progress("checking this machine"):
        from edgevlm.apps.doctor.checks import Finding, report
        from edgevlm.packages import needed

        compared = []
        if engine is not None:
            try:
                *_, found = needed("edgevlm.testing", "checking", "cpu").check_engine(engine)
                compared = [Finding("engine", "ok", f"{engine}: {found}")]
            except UserError as error:
                compared = [Finding("engine", "fail", str(error))]
        lines, healthy = report(json, more=compared)
    to_stdout("\n".join(lines))
    if not healthy:
        raise typer.Exit(1)


def power(
    interval: Annotated[float, option("S", "Print a line this often.", min=0.05, max=86400)] = 1.0,
    seconds: Annotated[float | None, option("S", "Stop after this long.", "at ctrl-C", min=0.05, max=1e9)] = None,
    json: Json = False,
) -> None:
    """Show the power this machine draws.

    Prints the watts of every rail, the clocks and the power mode at each interval, and the total energy at the end.
    """
    from edgevlm.apps.doctor.power import show_power

    for is_data, line in show_power(interval, seconds, json):
        (to_stdout if is_data else to_stderr)(line)


def show(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Read snapshots from this folder or address.")],
    state_key_file: StateKeyFile = None,
    json: Json = False,
) -> None:
    """Verify and describe a directory's snapshots.

    The newest snapshot comes first. Exits with status 1 if no snapshot can be used.
    """
    from edgevlm.apps.credentials import state_key
    from edgevlm.apps.schemas import json_line
    from edgevlm.runtime.files import look
    from edgevlm.runtime.snapshots.directory import is_address, verified
    from edgevlm.runtime.snapshots.format import Snapshot
    from edgevlm.runtime.snapshots.writer import described

    try:
        found = (
            list(verified(folder, state_key(of_file(state_key_file)))) if is_address(folder) or look(folder) == "folder" else []
        )
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error})") from None
    if not found:
        raise UserError(f"{folder}: no snapshots found; give the folder used with edgevlm run --state")
    for path, snapshot in found:
        if not isinstance(snapshot, Snapshot):
            facts: dict[str, Any] = {"usable": False, "reason": str(snapshot)}
            words = f"cannot be used: {snapshot}"
        else:
            about, session = snapshot.about, snapshot.about["session"]
            rows = [of.shape[-1] for name, of in snapshot.arrays.items() if name.startswith("layer") and name.endswith(".kind")]
            facts = {
                "usable": True, "bytes": snapshot.nbytes, "edgevlm": about["edgevlm"], "written": about["written"],
                "source": about["source"], **about["identity"], "frames": session["frames"], "time_s": session["time_s"],
                "waiting": about["chunk"]["taken"], "rows": max(rows, default=0),
                "compressions": about["stream"]["stats"]["compressions"],
                "turns": {name: len(turns) for name, turns in session["conversations"].items()},
            }  # fmt: skip
            words = f"{described(about)}; {facts['name']}, {facts['policy']}, budget {facts['budget']}, {facts['rows']} rows"
        to_stdout(json_line("snapshot", {"snapshot": path.name, **facts}) if json else f"{path.name}: {words}")
    if not any(isinstance(snapshot, Snapshot) for _, snapshot in found):
        raise typer.Exit(1)


def key(path: Annotated[Path, typer.Argument(metavar="FILE", help="Write the key to this file.")]) -> None:
    """Make an age key that encrypts snapshots.

    Keep a copy elsewhere: without the key no snapshot can be read.
    """
    from edgevlm.runtime.snapshots.directory import SnapshotKey

    text = SnapshotKey.generate()
    try:
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(f"{text}\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


state = plain_app({"show": show, "key": key}, name="state", help="Inspect snapshots, or make a key for them.")
