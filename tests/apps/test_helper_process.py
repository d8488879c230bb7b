"""Exports by a helper process: what is said comes through, and ctrl-C ends both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from edgevlm.apps.bundles.cache import export_apart
from edgevlm.errors import UserError


@pytest.fixture
def checkpoint(exported, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("EDGEVLM_CACHE", str(tmp_path / "cache"))
    return exported("llava", layers=3, heads=6, kv_heads=2).checkpoint


def apart(checkpoint: Path, out: Path, progress: Any = print, **options: Any) -> list[str]:
    notices: list[str] = []
    camera = {"camera": (480, 640)}
    export_apart(checkpoint, out, gptq=False, progress=progress, notify=notices.append, **camera | options)
    return notices


def test_the_bundle_is_the_same_and_is_told_of(exported, checkpoint, tmp_path):
    steps: list[str] = []
    notices = apart(checkpoint, tmp_path / "out", steps.append)
    there = exported("llava", layers=3, heads=6, kv_heads=2).bundle
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in there.iterdir()
    }
    assert "decoder layer 2 of 3" in steps
    assert notices[-1].startswith("peak memory")


def test_what_cannot_be_exported_is_one_line(checkpoint, tmp_path):
    with pytest.raises(UserError, match="--vision-precision 'int3' is not known"):
        apart(checkpoint, tmp_path / "out", vision_precision="int3")


def test_an_interrupt_ends_the_export(checkpoint, tmp_path):
    """As ctrl-C does it: raised in whatever is running, here the progress."""
    before, children = psutil.Process().children(), []

    def interrupted(step: str) -> None:
        children.extend(child for child in psutil.Process().children() if child not in before)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apart(checkpoint, tmp_path / "out", interrupted)
    assert children
    assert not psutil.wait_procs(children, timeout=120)[1]
    assert not (tmp_path / "out").exists()


def test_an_export_that_is_killed_says_so(checkpoint, tmp_path):
    def killed(step: str) -> None:
        for child in psutil.Process().children():
            child.kill()

    with pytest.raises(UserError, match=r"the helper process was ended by signal 9; end other programs and run"):
        apart(checkpoint, tmp_path / "out", killed)
