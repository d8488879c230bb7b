"""``edgevlm state show``: what the snapshots of a folder hold, or why they cannot be used."""

from __future__ import annotations

import time
from pathlib import PurePath
from typing import Any

from edgevlm.apps.schemas import json_line
from edgevlm.errors import SnapshotError, UserError
from edgevlm.runtime.files import look
from edgevlm.runtime.snapshots.capture import described
from edgevlm.runtime.snapshots.directory import verified
from edgevlm.runtime.snapshots.encryption import SnapshotKey
from edgevlm.runtime.snapshots.format import Snapshot
from edgevlm.runtime.snapshots.storage import is_address


def show_state(state: str, as_json: bool, key: SnapshotKey | None = None) -> tuple[str, bool]:
    """Lines about each snapshot, newest first, and whether one can be used. Raises UserError where there is none."""
    try:
        found = list(verified(state, key)) if is_address(state) or look(state) == "folder" else []
    except OSError as error:
        raise UserError(f"{state}: cannot be read ({error}); try again later") from None
    if not found:
        raise UserError(f"{state}: there are no snapshots; give the folder of edgevlm run --state")
    describe = as_record if as_json else as_text
    return "\n".join(describe(path, what) for path, what in found), any(isinstance(what, Snapshot) for _, what in found)


def as_record(path: PurePath, found: Snapshot | SnapshotError) -> str:
    if isinstance(found, SnapshotError):
        return json_line("snapshot", {"snapshot": path.name, "usable": False, "reason": str(found)})
    return json_line("snapshot", {"snapshot": path.name, "usable": True, **facts(found)})


def facts(snapshot: Snapshot) -> dict[str, Any]:
    """What is of interest in a header."""
    about = snapshot.about
    session, numbers, identity = about["session"], about["stream"], about["identity"]
    layers = [array.shape[-1] for name, array in snapshot.arrays.items() if name.startswith("layer") and name.endswith(".kind")]
    return {
        "bytes": snapshot.nbytes,
        "edgevlm": about["edgevlm"],
        "written": about["written"],
        "source": about["source"],
        **identity,
        "frames": session["frames"],
        "time_s": session["time_s"],
        "waiting": about["chunk"]["taken"],
        "rows": max(layers, default=0),
        "compressions": numbers["stats"]["compressions"],
        "turns": {name: len(turns) for name, turns in session["conversations"].items()},
    }


def as_text(path: PurePath, found: Snapshot | SnapshotError) -> str:
    if isinstance(found, SnapshotError):
        return f"{path.name}: cannot be used: {found}"
    of = facts(found)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(of["written"]))
    turns = ", ".join(f"{name}: {count}" for name, count in of["turns"].items()) or "none"
    return "\n".join(
        [
            f"{path.name}: {described(found.about)} ({written}, edgevlm {of['edgevlm']})",
            f"  source {of['source'] or '-'} · model {of['name']} {of['model'][:12]} · {of['dtype']}",
            f"  policy {of['policy']} · budget {of['budget']} · chunk {of['chunk']} · re-indexing {of['reindexing']}",
            f"  {of['rows']} rows in the fullest layer · {of['compressions']} compressions · "
            f"{of['waiting']} frames of a chunk waiting · {of['bytes'] / 1e6:.1f} MB",
            f"  turns of conversations: {turns}",
        ]
    )
