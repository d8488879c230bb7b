"""Capture a session as a header and arrays, copied while it is held, and restore it from them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from edgevlm import __version__
from edgevlm.errors import SnapshotError, UserError, first_problem
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.changes import ChangedEncoder
from edgevlm.runtime.chat import Chat, Conversations
from edgevlm.runtime.chunk import Chunk
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.snapshots.format import Arrays, OtherFormat, Snapshot, padding
from edgevlm.runtime.stateful import add_prefix, strip_prefix
from edgevlm.runtime.stats import MemoryStats, Progress
from edgevlm.runtime.stream import Stream

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Count = Annotated[int, Ge(0), Le(1 << 53)]
Index = Annotated[int, Ge(0), Le(1 << 30)]
Seconds = Annotated[float, Ge(-1e12), Le(1e12)]


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """positions: see :class:`edgevlm.runtime.positions.Positions`."""

    positions: (
        tuple[Index, Index | None, Index, Seconds] | tuple[Index, Index | None, Index, Seconds, Index | None]
    )  # older snapshots have four
    seq: Count
    frames: Index  # int32 in the cache
    stats: MemoryStats


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Frames of the chunk that is being filled."""

    taken: Count
    encoded: Count


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """conversations: turns by name."""

    frames: Count
    chunks: Count
    time_s: Seconds
    conversations: dict[str, list[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields that :func:`identity` always has."""

    model: str
    name: str
    policy: str
    budget: Count
    dtype: str
    chunk: Count
    reindexing: str


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The schema of a snapshot's header."""

    edgevlm: str
    written: Annotated[float, Ge(0), Le(1e12)]
    source: str
    identity: Identity
    stream: StreamHeader
    chunk: ChunkHeader
    session: SessionHeader


@cache
def _schema() -> TypeAdapter[SnapshotHeader]:
    from pydantic import TypeAdapter

    return TypeAdapter(SnapshotHeader)


def check_header(about: Mapping[str, Any]) -> None:
    """Raise SnapshotError for an invalid header; OtherFormat if another version of edgevlm wrote it."""
    from pydantic import ValidationError
    from pydantic_core import to_json

    try:
        _schema().validate_json(to_json(dict(about)), strict=True)
    except ValidationError as error:
        why = first_problem(error)
        if isinstance(version := about.get("edgevlm"), str) and version != __version__:
            raise OtherFormat(
                f"was written by edgevlm {version[:40]}, and {__version__} cannot go on from it ({why})"
            ) from None
        raise SnapshotError(f"does not describe a session ({why})") from None


def identity(stream: Stream, chat: Chat, text: TextBudget, encoder: ChangedEncoder | None = None) -> dict[str, Any]:
    """Return the settings that must be the same in a session that resumes, as JSON; ``name`` is for people."""
    bundle = stream.model.bundle
    height, width = bundle.vision.size
    return {
        "model": model_hash(bundle),
        "name": bundle.source,
        **({"frame size": f"{width}x{height}"} if bundle.vision.pixels else {}),
        "policy": policy_text(stream.policy),
        "budget": stream.budget,
        "dtype": stream.cache.dtype.name,
        "chunk": stream.chunk,
        "reindexing": stream.positions.reindexing,
        "append": "all" if stream.references is None else str(stream.references.settings),
        "encode": "all" if encoder is None else str(encoder.settings),
        "text budget": [text.conversation, text.question, text.answer],
        "system prompt": hashlib.sha256(chat.prefix.encode()).hexdigest()[:16],
    }


def model_hash(bundle: Bundle) -> str:
    """Return the SHA-256 of a bundle's contents, calibration included; the same for every frame size that it takes."""
    parts = {part: asdict(getattr(bundle, part)) for part in ("decoder", "vision", "chat")}
    by_size = ("size", "grid", "tokens_per_frame", "changed") if bundle.vision.pixels else ("pixels",)
    parts["vision"] = {name: value for name, value in parts["vision"].items() if name not in by_size}
    files = {name: asdict(record) for name, record in sorted(bundle.files.items())}
    described = {"family": bundle.family, "files": files, **parts}
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def policy_text(policy: Policy) -> str:
    """Return ``name:setting=value,...`` with the settings that differ from the defaults."""
    if not is_dataclass(policy):
        return policy.name
    changed = (field.name for field in fields(policy) if getattr(policy, field.name) != field.default)
    settings = ",".join(f"{name}={getattr(policy, name)}" for name in changed)
    return f"{policy.name}:{settings}" if settings else policy.name


def capture(
    stream: Stream, chunk: Chunk, conversations: Conversations, progress: Progress
) -> tuple[dict[str, Any], dict[str, NDArray]]:
    """Return a header, and the arrays of the session: views, to be copied before anything changes."""
    numbers, held = stream.state()
    counts, waiting = chunk.state()
    turns = {name: list(of) for name, of in conversations.turns.items()}
    session = {**progress.state(), "conversations": turns}
    return {"stream": numbers, "chunk": counts, "session": session}, held | add_prefix("chunk", waiting)


def restore(snapshot: Snapshot, stream: Stream, chunk: Chunk, conversations: Conversations, progress: Progress) -> None:
    """Restore a snapshot of a session with the same :func:`identity`.

    Raises SnapshotError for one that does not fit, and UserError if another edgevlm wrote it; the parts are unusable then.
    """
    about, arrays = snapshot.about, snapshot.arrays
    try:
        stream.restore(about["stream"], arrays)
        chunk.restore(about["chunk"], strip_prefix("chunk", arrays))
        frame = stream.model.bundle.vision.tokens_per_frame, stream.model.bundle.decoder.row_width
        for name in ("chunk.features", "present.features"):
            if name in arrays and arrays[name].shape[-2:] != frame:
                raise ValueError(f"{name} is {list(arrays[name].shape)} and a frame {list(frame)}")
        progress.restore(about["session"])
        turns = about["session"]["conversations"]
        conversations.turns = {name: [(asked, said) for asked, said in of] for name, of in turns.items()}
    except MemoryError:
        raise
    except Exception as error:  # whatever does not fit, in any part
        why = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        if about["edgevlm"] == __version__:
            raise SnapshotError(f"does not fit this session ({why})") from None
        raise UserError(
            f"{snapshot.path}: edgevlm {about['edgevlm']} wrote it, and {__version__} cannot go on from it "
            f"({why}); use that edgevlm, or choose another folder"
        ) from None


class CaptureBuffer:
    """A second buffer: arrays are copied here while the stream waits, and written from here while it continues.

    Its pages are touched at the start; it grows when arrays need more.
    """

    def __init__(self, nbytes: int) -> None:
        self._block = np.ones(nbytes, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._block.nbytes

    def copy(self, arrays: Arrays) -> dict[str, NDArray]:
        """Dense copies of ``arrays``, which stay until the next call."""
        needed = sum(array.nbytes + padding(array.nbytes) for array in arrays.values())
        if needed > self.nbytes:
            self._block = np.ones(needed, np.uint8)
        copies, start = {}, 0
        for name, array in arrays.items():
            copies[name] = self._block[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(copies[name], array)
            start += array.nbytes + padding(array.nbytes)
        return copies


def described(about: Mapping[str, Any], now: float | None = None) -> str:
    """Describe a snapshot's length and age in one line."""
    age = max(0.0, (time.time() if now is None else now) - about["written"])
    session = about["session"]
    return f"{session['frames']:,} frames to {session['time_s']:.1f} s, written {ago(age)} ago"


def ago(seconds: float) -> str:
    """``90 s``, ``12 min``, ``5 h``, ``3 days``."""
    for size, unit in ((172_800, "days"), (7200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds / {'days': 86_400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.0f} s"
