"""A bundle appears whole or not at all, and an export that was killed resumes and makes the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint, writer
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import ExportJournal
from edgevlm.export.options import fingerprint
from edgevlm.runtime import files
from edgevlm.runtime.bundle import Bundle, check_target

SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2, "kv": "fp16"}


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


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked process, which ends with it; its id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def killed_at(step: str, checkpoint: Path, target: Path, **options: Any) -> None:
    """Export in a process that kills itself when it comes to ``step``."""

    def progress(what: str) -> None:
        if what == step:
            os.kill(os.getpid(), signal.SIGKILL)

    child = in_child(lambda: export_checkpoint(checkpoint, target, progress=progress, **options))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def calls_of(work: Callable[[], object]) -> int:
    """How many functions ``work`` calls, Python's and C's."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += "call" in event and "_return" not in event

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def killed_after(calls: int, checkpoint: Path, target: Path) -> None:
    """Export in a process that kills itself at so many function calls, if it comes to as many."""
    left = calls

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal left
        left -= "call" in event and "_return" not in event
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def export() -> None:
        sys.setprofile(count)
        export_checkpoint(checkpoint, target)
        sys.setprofile(None)

    os.waitpid(in_child(export), 0)


def test_killed_at_random_times(exported: Any, tmp_path: Path) -> None:
    """Nothing half-written is ever at the target, at most one unfinished folder beside it, and the end is the same bytes."""
    made, rng, target, finished = exported("llava", **SHAPE), random.Random(0), tmp_path / "bundle", []
    calls = calls_of(lambda: export_checkpoint(made.checkpoint, tmp_path / "counted"))
    while not target.exists() and len(finished) < 8:
        killed_after(int(rng.uniform(0.3, 0.9) * calls), made.checkpoint, target)
        left = list(tmp_path.glob(".bundle.edgevlm-*"))
        assert len(left) <= 1
        if not target.exists():
            finished.append(len(ExportJournal(left[0] / "journal").records) if left else 0)
    assert finished == sorted(finished)
    assert finished[-1] > 0, finished
    if target.exists():
        Bundle.load(target)
    export_checkpoint(made.checkpoint, target, force=True)
    assert contents(target) == contents(made.bundle)
    assert leftovers(tmp_path) == []


def test_what_was_finished_is_not_done_again(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, target, read, said = exported("llava", **SHAPE), tmp_path / "bundle", [], []
    killed_at("decoder layer 3 of 3", made.checkpoint, target)
    assert not target.exists()
    rows = Checkpoint.rows

    def watched(self: Checkpoint, name: str, shape: tuple[int, ...]) -> Any:
        read.append(name)
        return rows(self, name, shape)

    monkeypatch.setattr(Checkpoint, "rows", watched)
    monkeypatch.setattr(writer.vision, "write_vision", lambda *_, **__: pytest.fail("the tower was written again"))
    export_checkpoint(made.checkpoint, target, notify=said.append)
    assert {name.split(".")[2] for name in read if name.startswith("text.layers")} == {"2"}
    assert "text.embed_tokens.weight" not in read
    assert said[0] == "continuing the export that was stopped"
    assert contents(target) == contents(made.bundle)


def test_an_interrupt_keeps_what_is_finished_and_a_failure_does_not(exported: Any, tmp_path: Path) -> None:
    made, said = exported("llava", **SHAPE), []

    def stop(error: BaseException) -> Callable[[str], None]:
        def progress(what: str) -> None:
            if what == "decoder layer 2 of 3":
                raise error

        return progress

    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(made.checkpoint, tmp_path / "out", progress=stop(KeyboardInterrupt()), notify=said.append)
    assert said == ["stopped; run the same command to continue"]
    assert len(leftovers(tmp_path)) == 1
    with pytest.raises(UserError):
        export_checkpoint(made.checkpoint, tmp_path / "out", progress=stop(UserError("NaN")))
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_of_files_and_options(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    keys = {fingerprint(tmp_path, {})}
    assert fingerprint(tmp_path, {}) in keys
    keys.add(fingerprint(tmp_path, {"camera": (1, 2)}))
    (tmp_path / "config.json").write_text("{ }")
    keys.add(fingerprint(tmp_path, {}))
    os.utime(tmp_path / "model.safetensors", (1, 1))
    keys.add(fingerprint(tmp_path, {}))
    assert len(keys) == 4


@pytest.mark.parametrize("change", ["options", "checkpoint"])
def test_a_stale_one_is_thrown_away(exported: Any, tmp_path: Path, change: str) -> None:
    checkpoint = Path(shutil.copytree(exported("llava", **SHAPE).checkpoint, tmp_path / "checkpoint"))
    out, said = tmp_path / "out", []
    killed_at("decoder layer 2 of 3", checkpoint, out / "bundle")
    if change == "checkpoint":
        os.utime(checkpoint / "model.safetensors", (1, 1))
    export_checkpoint(checkpoint, out / "bundle", st_spattn_from=1 if change == "options" else None, notify=said.append)
    assert said[0] == "discarding an unfinished export with different settings or of another checkpoint"
    assert leftovers(out) == []


def test_an_export_killed_half_way_leaves_the_old_bundle(exported: Any, tmp_path: Path) -> None:
    made = exported("llava", **SHAPE)
    target = tmp_path / "bundle"
    shutil.copytree(exported("llava", **SHAPE, seed=1).bundle, target)
    old = Bundle.load(target).files
    (tmp_path / ".bundle.edgevlm-abandoned").mkdir()
    killed_at("hashing", made.checkpoint, target, force=True)
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
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, made.checkpoint, target, *map(str, sizes)], capture_output=True, text=True
    )
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
        with files.atomic_directory(target, partial(check_target, force=True)) as folder:
            (folder / "bundle.json").write_text("new")
    os.waitpid(child, 0)
    assert not target.exists()
    if loaded:
        with pytest.raises(UserError, match="bundle"):
            Bundle.load(target)
    else:
        with (
            pytest.raises(UserError, match="add --force"),
            files.atomic_directory(target, partial(check_target, force=False)),
        ):
            pass
    assert (target / "bundle.json").read_text() == "old"


def test_what_is_there_is_not_replaced_unasked(exported: Any, tmp_path: Path) -> None:
    made = exported("llava", **SHAPE)
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo.jpg").write_text("x")
    cases = [
        (made.bundle, False, "--force"),
        (tmp_path / "file", True, "is a file"),
        (tmp_path / "other", True, "is not empty"),
    ]
    for target, force, message in cases:
        said: list[str] = []
        with pytest.raises(UserError, match=message):
            export_checkpoint(made.checkpoint, target, force=force, progress=said.append)
        assert said == []
    assert (tmp_path / "other" / "photo.jpg").exists()
    Bundle.load(made.bundle)
