"""``edgevlm forget``: delete what was seen in a period from a state folder that is not in use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from edgevlm.apps.journal import Journal
from edgevlm.apps.names import id_of
from edgevlm.apps.run.clock import Span
from edgevlm.apps.run.thumbnails import Thumbnails
from edgevlm.apps.watches.events import EventStore
from edgevlm.errors import UserError
from edgevlm.runtime.files import PRIVATE, private_folder
from edgevlm.runtime.opening import STORE
from edgevlm.runtime.snapshots.directory import LOCK, OTHER, SnapshotDirectory, SnapshotKey, is_address
from edgevlm.runtime.snapshots.forget import forget
from edgevlm.runtime.snapshots.format import Snapshot

OURS = ("*.unfinished", f"{Thumbnails.FILE}*", f"{STORE}*", f"*{OTHER}")
MARK = "forgotten"  # a file of this name keeps a server from watching a forgotten recording again
Forgotten = dict[str, int]


def in_words(name: str, counts: Forgotten) -> str:
    """Describe deletions, as in ``front-door: 120 rows of a layer, 40 thumbnails, 2 events, 3 journal lines deleted``."""
    called = {"rows": "rows of a layer", "journal": "journal lines"}
    said = ", ".join(f"{count:,} {called.get(what, what)}" for what, count in counts.items())
    return f"{name or 'all cameras'}: {said} deleted"


def forget_folder(state: str, span: Span, stream: str | None = None, key: SnapshotKey | None = None) -> dict[str, Forgotten]:
    """Delete what was seen in a period from the state folder of ``run`` or ``serve``; return counts by camera.

    ``state`` is the folder, or the address of one camera's snapshots. ``stream`` limits the deletion to one camera of a server.
    Raises UserError.
    """
    if is_address(state):
        return {state.rstrip("/").rpartition("/")[2]: forget_camera(state, span, key)}
    folder, stream = Path(state), stream and id_of(stream)
    found = {path: name for path, name in cameras(folder) if stream in (None, name)}
    stores = [kind for kind in (EventStore, Journal) if (folder / kind.FILE).exists()]
    if not (found or stores):
        raise UserError(f"{folder}: no state of {stream or 'a run or a server'} found")
    forgotten = {name: forget_camera(path, span, key) for path, name in found.items()}
    for kind in stores:
        with closing(kind(folder)) as store:
            forgotten.setdefault(stream or "", {})[Path(kind.FILE).stem] = store.delete(stream, span.since, span.until)
    return forgotten


def cameras(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folder and the name of each camera in ``folder``. Symbolic links are skipped."""
    if (folder / LOCK).exists():
        yield folder, folder.name
    for path in sorted(folder.glob("*")):
        if not path.is_symlink() and any((path / name).exists() for name in (LOCK, Thumbnails.FILE)):
            yield path, path.name


def forget_camera(where: str | Path, span: Span, key: SnapshotKey | None = None) -> Forgotten:
    """Delete what a camera saw in a period; return counts by kind. No process may use the place ``where``. Raises UserError."""
    with closing(SnapshotDirectory(where, key)) as directory:
        counts = Forgotten() if directory.folder is None else forget_pictures(directory.folder, span)
        if span.everything:
            return {"snapshots": directory.clear(), **counts}
        found = [snapshot for _, snapshot in directory.verified() if isinstance(snapshot, Snapshot)]
        if not found:
            if directory.storage.snapshots():
                raise UserError(f"{where}: no snapshot can be read; use --all to delete them")
            directory.clear()  # deletes files that other versions left behind
            return {"rows": 0, **counts}
        about, arrays = dict(found[0].about), {name: array.copy() for name, array in found[0].arrays.items()}
        offset = about["written"] - about["session"]["time_s"]
        rows = forget(about, arrays, span.with_slack.of_stream(offset), "st_spattn=True" in about["identity"]["policy"])
        try:
            directory.write(about, arrays, alone=True)
        except OSError as error:
            why = directory.storage.why(error)
            raise UserError(f"{where}: cannot be written or emptied ({why}); older snapshots were not deleted") from None
        return {"rows": rows, **counts}


def forget_pictures(folder: Path, span: Span) -> Forgotten:
    """Delete a period's thumbnails. If the period is all time, delete every file next to the snapshots. Raises UserError."""
    count = 0
    if (folder / Thumbnails.FILE).exists():
        with closing(Thumbnails(folder)) as thumbnails:
            count = thumbnails.delete(None, span.with_slack.since, span.with_slack.until)
    for pattern in OURS if span.everything else ():
        for path in folder.glob(pattern):
            path.unlink()
    if span.everything:
        mark(folder)
    return {"thumbnails": count}


def mark(folder: Path) -> None:
    """Mark a camera's folder, so that a server does not watch its recording again until a user resumes the camera.

    Raises UserError.
    """
    try:
        private_folder(folder)
        os.close(os.open(folder / MARK, os.O_CREAT | PRIVATE, 0o600))
    except OSError as error:
        raise UserError(f"{folder / MARK}: cannot be written ({error.strerror or error})") from None
