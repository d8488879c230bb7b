"""Delete a time window from a captured session: cache rows, conversations, and policy and encoder state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.cache import PARTS, Kind
from edgevlm.runtime.evidence import FrameTimes
from edgevlm.runtime.stateful import strip_prefix
from edgevlm.runtime.time_window import TimeWindow

Bool = NDArray[np.bool_]


class AllOrNothing(UserError):
    """The error for a time window that can be deleted only together with the whole memory."""


def forget(about: dict[str, Any], arrays: dict[str, NDArray], window: TimeWindow, keeps_first_frame: bool = False) -> int:
    """Delete a time window from a captured session. Return the largest number of rows that any layer lost.

    Deletes the vision rows whose patch was visible in the window, and all summaries, because a summary's time is unknown. All
    heads of a layer must keep the same number of rows, so some heads also lose their oldest rows. Policy scores do not change.
    Resets the reference patches, the vision tower's cache and the conversations. An empty window changes nothing.

    ``about``, ``arrays``: the capture's header and arrays. Raises AllOrNothing if the policy has a store, or if the window
    includes frame 0 and all later frames attend to frame 0.
    """
    if any(name.startswith("policy.store.") for name in arrays):
        raise AllOrNothing("the policy's store cannot forget a time range; use forget --all to delete the whole memory")
    times = FrameTimes()
    times.restore(strip_prefix("times", arrays))
    first, last = window.frames(times, float(about["session"]["time_s"]))
    gone: dict[str, Bool] = {}
    for layer in {name.partition(".")[0] for name in arrays if name.startswith("layer") and name.endswith(".kind")}:
        kind, frame, confirmed = (arrays[f"{layer}.{part}"] for part in ("kind", "frame", "confirmed"))
        gone[layer] = (kind == Kind.VISION) & (frame <= last) & (confirmed >= first)
    seconds, present = arrays["chunk.seconds"], arrays.get("present.seconds", np.zeros((0, 2))).reshape(-1, 2)
    is_waiting = ((seconds >= window.since) & (seconds <= window.until)).any()
    is_present = ((present[:, 0] <= window.until) & (present[:, 1] >= window.since)).any()
    if not (is_present or is_waiting or any(mask.any() for mask in gone.values())):
        return 0
    if keeps_first_frame and first <= 0 <= last:
        raise AllOrNothing("all later frames attend to the first frame; use forget --all, or a later time")
    most = 0
    for layer, mask in gone.items():
        keep = _kept(arrays, layer, mask | (arrays[f"{layer}.kind"] == Kind.SUMMARY), 1 if keeps_first_frame else 0)
        most = max(most, keep.shape[1] - int(keep[0].sum()))
        for part in PARTS:
            array = arrays[f"{layer}.{part}"]
            arrays[f"{layer}.{part}"] = array[keep].reshape(len(array), -1, *array.shape[2:])
    if is_present:
        del arrays["present.features"], arrays["present.seconds"]
        about["stream"]["frames"] += len(present)
    if is_waiting:
        _drop_waiting(about, arrays)
    arrays.update({name: _begun_anew(name, array) for name, array in arrays.items()})
    about["session"]["conversations"] = {}
    return most


def _kept(arrays: Mapping[str, NDArray], layer: str, gone: Bool, oldest: int) -> Bool:
    """Return a mask of the rows to keep, ``[kv_heads, n]``. A frame's text is deleted along with the last of the frame's vision
    rows.

    ``oldest``: frames before this number lose no rows outside the window.
    """
    kind, frame, seq = (arrays[f"{layer}.{part}"] for part in ("kind", "frame", "seq"))
    keep = ~gone
    for head, surplus in enumerate(keep.sum(1) - keep.sum(1).min()):
        rows = np.flatnonzero(keep[head] & (kind[head] == Kind.VISION) & (frame[head] >= oldest))
        keep[head, rows[np.argsort(seq[head, rows])[:surplus]]] = False
    of_frames = (kind == Kind.TEXT) & (frame >= 0)
    kept: Bool = keep & ~(of_frames & ~np.isin(frame, frame[keep & (kind == Kind.VISION)]))
    return kept


def _drop_waiting(about: dict[str, Any], arrays: dict[str, NDArray]) -> None:
    """Drop the frames of the unfinished chunk, but count them in the stream's number of frames."""
    frames, features = len(arrays["chunk.seconds"]), arrays.pop("chunk.features", None)
    encoded = frames - len(arrays["chunk.pixels"])
    group = max(1, encoded // len(features)) if features is not None and len(features) else 1
    about["stream"]["frames"] += -(-frames // group)
    about["chunk"] = {"taken": 0, "encoded": 0}
    for name in ("pixels", "sizes", "seconds"):
        arrays[f"chunk.{name}"] = arrays[f"chunk.{name}"][:0]


def _begun_anew(name: str, array: NDArray) -> NDArray:
    """Return one of the capture's arrays, reset or emptied if its values may reveal frames or texts."""
    if name in ("references.seq", "chunk.encoder.changes.since"):
        return np.full_like(array, -1)
    if name.startswith(("references.", "chunk.encoder.")):
        return array if name in ("chunk.encoder.seen", "chunk.encoder.computed") else np.zeros_like(array)
    if name.startswith("policy.") and array.dtype.kind == "f" and array.ndim == 3:
        return np.zeros_like(array)
    return array[:0] if name.startswith("policy.") and array.dtype == np.uint8 and array.ndim == 1 else array
