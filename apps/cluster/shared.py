"""What a cluster's nodes share: a folder, or an address such as ``s3://bucket/shop``, a folder for each epoch of a camera."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from edgevlm.runtime.files import UNFINISHED, atomic_write
from edgevlm.runtime.snapshots.directory import ObjectStore, as_os_error, is_address

EPOCH = "epoch-"  # begins the folder of a camera's placement
BEGUN = "begun"  # of an epoch in a store, where no folder can be renamed: it has been copied whole


def shared_at(where: str) -> Shared:
    """Open what nodes share, a folder or an address. Raises UserError for an address that fsspec does not know."""
    return SharedStore(where) if is_address(where) else SharedFolder(Path(where.removeprefix("file://")))


def folder_of(camera: str, epoch: int) -> str:
    return f"{camera}/{EPOCH}{epoch}"


def numbers(names: list[str]) -> list[int]:
    """The epochs among names of folders."""
    found = (name.removeprefix(EPOCH) for name in names if name.startswith(EPOCH))
    return sorted({int(number) for number in found if number.isdecimal()})


class SharedFolder:
    """Methods raise OSError, but those that delete. A file's name has a slash between folders."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def where(self, camera: str, epoch: int) -> Path:
        """Where a camera's snapshots of an epoch go."""
        return self.root / folder_of(camera, epoch)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """Write a small file in one step."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(self.root / name, private=True) as stream:
            stream.write(content)

    def epochs(self, camera: str, unfinished: bool = False) -> list[int]:
        """Epochs that have a folder, oldest first; with ``unfinished`` those too whose copy was cut short."""
        found = [path.name for path in (self.root / camera).glob(f"{EPOCH}*")]
        return numbers([name.removesuffix(UNFINISHED) for name in found] if unfinished else found)

    def begin(self, camera: str, epoch: int, like: int | None) -> None:
        """Make an epoch's folder, a copy of another's, or empty; one that exists stays."""
        folder = self.where(camera, epoch)
        if folder.exists():
            return
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = folder.with_name(f"{folder.name}{UNFINISHED}")
        shutil.rmtree(unfinished, ignore_errors=True)
        if like is None:
            unfinished.mkdir(mode=0o700)
        else:
            shutil.copytree(self.where(camera, like), unfinished, ignore=shutil.ignore_patterns("lock", f"*{UNFINISHED}"))
        unfinished.rename(folder)

    def delete(self, camera: str, epoch: int) -> None:
        folder = self.where(camera, epoch)
        for path in (folder, folder.with_name(f"{folder.name}{UNFINISHED}")):
            shutil.rmtree(path, ignore_errors=True)


class SharedStore:
    """:class:`SharedFolder` at an address that fsspec opens. Thumbnails stay on the node that took them."""

    def __init__(self, address: str) -> None:
        self._address, self._store = address.rstrip("/"), ObjectStore(address)
        self._files = self._store.files

    def where(self, camera: str, epoch: int) -> str:
        return f"{self._address}/{folder_of(camera, epoch)}"

    def read(self, name: str) -> bytes:
        with as_os_error():
            content: bytes = self._files.cat_file(self._path(name))
            return content

    def write(self, name: str, content: bytes) -> None:
        with as_os_error():
            self._store.make_folder(self._store.root / Path(name).parent)
            self._files.pipe_file(self._path(name), content)

    def epochs(self, camera: str, unfinished: bool = False) -> list[int]:
        with as_os_error():
            try:
                found = self._files.ls(self._path(camera), detail=False)
            except FileNotFoundError:
                return []
            epochs = numbers([path.rstrip("/").rpartition("/")[2] for path in found])
            return [
                each for each in epochs if unfinished or self._files.exists(self._path(f"{folder_of(camera, each)}/{BEGUN}"))
            ]

    def begin(self, camera: str, epoch: int, like: int | None) -> None:
        folder = folder_of(camera, epoch)
        with as_os_error():
            if self._files.exists(self._path(f"{folder}/{BEGUN}")):
                return
            self._store.make_folder(self._store.root / folder)
            before = None if like is None else self._path(folder_of(camera, like))
            for path in [] if before is None else self._files.find(before):
                name = path.rpartition("/")[2]
                if name != BEGUN and not name.endswith(UNFINISHED):
                    self._files.cp_file(path, self._path(f"{folder}/{name}"))
        self.write(f"{folder}/{BEGUN}", b"")

    def delete(self, camera: str, epoch: int) -> None:
        with suppress(OSError), as_os_error():
            self._files.rm(self._path(folder_of(camera, epoch)), recursive=True)

    def _path(self, name: str) -> str:
        return str(self._store.root / name)


Shared = SharedFolder | SharedStore
