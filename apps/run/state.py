"""``edgevlm state show``: describe the snapshots of a folder, or why they cannot be used."""

from __future__ import annotations

import time
from typing import Any

from edgevlm.apps.schemas import json_line
from edgevlm.errors import UserError
from edgevlm.runtime.files import look
from edgevlm.runtime.snapshots.capture import described
from edgevlm.runtime.snapshots.directory import verified
from edgevlm.runtime.snapshots.encryption import SnapshotKey
from edgevlm.runtime.snapshots.format import Snapshot
from edgevlm.runtime.snapshots.storage import is_address


def show_state(state: str, as_json: bool, key: SnapshotKey | None = None) -> tuple[str, bool]:
    """Describe each snapshot, newest first; return that, and whether one can be used. Raises UserError where there is none."""
    try:
        found = list(verified(state, key)) if is_address(state) or look(state) == "folder" else []
    except OSError as error:
        raise UserError(f"{state}: cannot be read ({error}); try again later") from None
    if not found:
        raise UserError(f"{state}: there are no snapshots; give the folder of edgevlm run --state")
    shown = []
    for path, what in found:
        facts = facts_of(what) if isinstance(what, Snapshot) else {"usable": False, "reason": str(what)}
        if as_json:
            shown.append(json_line("snapshot", {"snapshot": path.name, **facts}))
        else:
            shown.append(
                f"{path.name}: " + (in_words(what, facts) if isinstance(what, Snapshot) else f"cannot be used: {what}")
            )
    return "\n".join(shown), any(isinstance(what, Snapshot) for _, what in found)


def facts_of(snapshot: Snapshot) -> dict[str, Any]:
    about, session = snapshot.about, snapshot.about["session"]
    layers = [array.shape[-1] for name, array in snapshot.arrays.items() if name.startswith("layer") and name.endswith(".kind")]
    return {
        "usable": True, "bytes": snapshot.nbytes, "edgevlm": about["edgevlm"], "written": about["written"],
        "source": about["source"], **about["identity"], "frames": session["frames"], "time_s": session["time_s"],
        "waiting": about["chunk"]["taken"], "rows": max(layers, default=0),
        "compressions": about["stream"]["stats"]["compressions"],
        "turns": {name: len(turns) for name, turns in session["conversations"].items()},
    }  # fmt: skip


def in_words(snapshot: Snapshot, facts: dict[str, Any]) -> str:
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["written"]))
    turns = ", ".join(f"{name}: {count}" for name, count in facts["turns"].items()) or "none"
    return (
        f"{described(snapshot.about)} ({written}, edgevlm {facts['edgevlm']})\n"
        f"  source {facts['source'] or '-'} · model {facts['name']} {facts['model'][:12]} · {facts['dtype']}\n"
        f"  policy {facts['policy']} · budget {facts['budget']} · chunk {facts['chunk']} · re-indexing {facts['reindexing']}\n"
        f"  {facts['rows']} rows in the fullest layer · {facts['compressions']} compressions · "
        f"{facts['waiting']} frames of a chunk waiting · {facts['bytes'] / 1e6:.1f} MB\n"
        f"  turns of conversations: {turns}"
    )
