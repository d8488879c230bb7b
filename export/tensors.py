"""Tensors of safetensors files, views of the mapped file until they are converted; no path leaves the checkpoint's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.paths import look

AGAIN = "download or save the checkpoint again"


class Unread(Protocol):
    """A tensor in a file, not read yet. ``name`` and ``kind`` (of number) are the file's own words."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``[start, stop)`` as float32. Raises UserError for numbers that are no floating point of 16 bits or more."""
        ...


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor of a safetensors file; ``reader`` is the open file."""

    path: Path
    name: str
    reader: Any

    @property
    def kind(self) -> str:
        return str(self.reader.get_slice(self.name).get_dtype())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.reader.get_slice(self.name).get_shape())

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """See :class:`Unread`."""
        tensor = self.reader.get_tensor(self.name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{self.path}: tensor {self.name!r} is {kind}; give the checkpoint before quantisation, in float32 or 16 bits"
            )
        array: NDArray[np.float32] = tensor[start:stop].float().numpy()
        return array


def open_shard(path: Path) -> Any:
    """A safetensors file, mapped. Raises UserError for one that is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: is damaged or truncated ({error}); {AGAIN}") from None


def inside(folder: Path, name: str, named_in: str) -> Path:
    """The file ``name`` of a checkpoint folder. Raises UserError if it is missing or lies elsewhere.

    The Hugging Face Hub's cache keeps a snapshot as links into ``blobs`` two folders up, which is followed.
    """
    path = folder / name
    if Path(name).name != name or name in ("", ".", ".."):
        raise UserError(f"{folder / named_in}: names {name!r}, which lies outside the checkpoint's folder; {AGAIN}")
    if look(path) != "file":
        raise UserError(f"{path}: is named in {named_in} but is missing; {AGAIN}")
    check_link(folder, path)
    return path


def check_link(folder: Path, path: Path) -> None:
    """Raise UserError if ``path``, in ``folder``, is a link that leads out of it."""
    if not path.is_symlink():
        return
    home, target = folder.resolve(), path.resolve()
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if home not in target.parents and blobs not in target.parents:
        raise UserError(f"{path}: is a link out of the checkpoint's folder, to {target}; put the file in its place")
