"""A bundle appears whole or not at all: kills, full disks, and what may be replaced."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint, writer
from edgevlm.runtime import files
from edgevlm.runtime.bundle import Bundle, check_target
from edgevlm.runtime.files import journal_of

SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2}
EXPORTING = """
import os, signal, sys
from edgevlm.export import export_checkpoint, writer
def progress(what):
    if sys.argv[3] in what:
        os.kill(os.getpid(), signal.SIGKILL)
export_checkpoint(sys.argv[1], sys.argv[2], progress=progress, force=True)
"""
LIMITED = """
import resource, sys
from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint, writer
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
for size in sys.argv[3:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), limits[1]))
    try:
        export_checkpoint(sys.argv[1], sys.argv[2], force=True)
    except UserError as error:
        print(error)
"""


def python(program: str, *arguments: Any) -> list[str]:
    return [sys.executable, "-c", program, *map(str, arguments)]


def atomic_directory(target: Path, force: bool = False, **options: Any) -> AbstractContextManager[Path]:
    return files.atomic_directory(target, partial(check_target, force=force), **options)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_an_export_killed_half_way_leaves_the_old_bundle(exported: Any, tmp_path: Path) -> None:
    made = exported("llava", **SHAPE)
    target = tmp_path / "bundle"
    shutil.copytree(exported("llava", **SHAPE, seed=1).bundle, target)
    old = Bundle.load(target).files
    (tmp_path / ".bundle.edgevlm-abandoned").mkdir()
    result = subprocess.run(python(EXPORTING, made.checkpoint, target, "hashing"), capture_output=True)
    assert result.returncode == -signal.SIGKILL
    assert Bundle.load(target).files == old
    assert len(leftovers(tmp_path)) == 1  # its own: what was abandoned before it is gone
    export_checkpoint(made.checkpoint, target, force=True)
    assert Bundle.load(target).files != old
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_one_line_and_changes_nothing(exported: Any, tmp_path: Path) -> None:
    """The file size limit stands for the disk: it strikes in the vision graph, in its weights, in the decoder's."""
    made = exported("llava", **SHAPE)
    target = tmp_path / "bundle"
    shutil.copytree(made.bundle, target)
    sizes = (200, 5_000, 100_000, 500_000)
    result = subprocess.run(python(LIMITED, made.checkpoint, target, *sizes), capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert len(lines) == len(sizes), result.stderr
    assert all("could not be written (the file grew too large)" in line for line in lines)
    Bundle.load(target)
    assert leftovers(tmp_path) == []


def test_a_disk_that_is_really_full_is_named(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of 1 MB: seen ahead, and met half way; some of what writes there does not pass on why it could not."""
    made, disk = exported("llava", **SHAPE), tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        with pytest.raises(UserError, match=r"the bundle takes 1 MB and its disk has 1 MB free; choose another --out"):
            export_checkpoint(made.checkpoint, disk / "bundle")
        monkeypatch.setattr(writer, "check_disk", lambda *_: None)
        with pytest.raises(UserError, match=r"could not be written \(the disk is full\); nothing was changed"):
            export_checkpoint(made.checkpoint, disk / "bundle")
        with pytest.raises(UserError, match="the disk is full"), atomic_directory(disk / "bundle") as folder:
            np.zeros(1 << 20, np.float32).tofile(folder / "weights")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize(("free", "says"), [(1000, "the disk is full"), (1 << 40, "problem writing element 7")])
def test_a_writer_that_passes_no_reason_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, says: str) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(UserError, match=says), atomic_directory(tmp_path / "bundle"):
        raise OSError("problem writing element 7 to file")


def test_a_name_too_long_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="File name too long"), atomic_directory(tmp_path / (300 * "x")):
        pass


def test_a_replaced_bundle_that_cannot_be_deleted_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "bundle.json").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with atomic_directory(target, force=True, key="settings") as folder:
            (folder / "bundle.json").write_text("new")
            journal_of(folder).write_text("all of it")
    assert len(leftovers(tmp_path)) == 1
    with atomic_directory(target, force=True, key="settings") as folder:
        assert list(folder.iterdir()) == []
        (folder / "bundle.json").write_text("new")
    assert (target / "bundle.json").read_text() == "new"
    assert leftovers(tmp_path) == []


def test_a_bundle_whose_replacement_was_killed_is_put_back(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    target.mkdir()
    (target / "bundle.json").write_text("old")
    child = os.fork()
    if child == 0:
        rename = os.rename

        def killed(source: Path, place: Path) -> None:
            rename(source, place)
            os.kill(os.getpid(), signal.SIGKILL)

        os.rename = killed  # type: ignore[assignment]
        with atomic_directory(target, force=True) as folder:
            (folder / "bundle.json").write_text("new")
    os.waitpid(child, 0)
    assert not target.exists()
    with pytest.raises(UserError, match="pass --force"), atomic_directory(target):
        pass
    assert (target / "bundle.json").read_text() == "old"
    assert leftovers(tmp_path) == []


def test_what_is_there_is_not_replaced_unasked(exported: Any, tmp_path: Path) -> None:
    made = exported("llava", **SHAPE)
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo.jpg").write_text("x")
    cases = [(made.bundle, False, "--force"), (tmp_path / "file", True, "is a file"), (tmp_path / "other", True, "else")]
    for target, force, message in cases:
        said: list[str] = []
        with pytest.raises(UserError, match=message):
            export_checkpoint(made.checkpoint, target, force=force, progress=said.append)
        assert said == []
    assert (tmp_path / "other" / "photo.jpg").exists()
    Bundle.load(made.bundle)


def test_an_empty_folder_and_missing_parents_are_taken(exported: Any, tmp_path: Path) -> None:
    made = exported("llava", **SHAPE)
    for target in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        if target.name == "empty":
            target.mkdir()
        with atomic_directory(target) as folder:
            shutil.copytree(made.bundle, folder, dirs_exist_ok=True)
        Bundle.load(target)
        assert target.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_another_export_in_progress_is_left_alone(exported: Any, tmp_path: Path) -> None:
    made = exported("llava", **SHAPE)
    target = tmp_path / "bundle"
    with atomic_directory(target) as folder:
        shutil.copytree(made.bundle, folder, dirs_exist_ok=True)
        with atomic_directory(target) as other:
            shutil.copytree(made.bundle, other, dirs_exist_ok=True)
            assert folder.exists()
        Bundle.load(target)
        shutil.rmtree(target)
    Bundle.load(target)
    assert leftovers(tmp_path) == []


def test_a_failure_inside_removes_the_temporary_folder(tmp_path: Path) -> None:
    def fail(error: type[BaseException]) -> None:
        with atomic_directory(tmp_path / "bundle") as folder:
            (folder / "file").write_text("x")
            raise error

    for error in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(error):
            fail(error)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"), atomic_directory(tmp_path / "file" / "bundle"):
        pass
