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
from typing import Any

import pytest

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.runtime import files
from edgevlm.runtime.bundle import Bundle, check_target

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


@pytest.mark.parametrize("loaded", [True, False])
def test_a_bundle_whose_replacement_was_killed_is_put_back(tmp_path: Path, loaded: bool) -> None:
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
    if loaded:
        with pytest.raises(UserError, match="bundle"):
            Bundle.load(target)
    else:
        with pytest.raises(UserError, match="pass --force"), atomic_directory(target):
            pass
    assert (target / "bundle.json").read_text() == "old"


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
