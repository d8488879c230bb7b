"""Helper processes: their limits and their ends, and exports by one."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgevlm.apps.bundles.cache import export_apart
from edgevlm.errors import UserError
from edgevlm.runtime.helper_process import Helper, HelperEnded, call_in_helper


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
    apart(checkpoint, tmp_path / "out", steps.append)
    there = exported("llava", layers=3, heads=6, kv_heads=2, kv="fp16").bundle
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in there.iterdir()
    }
    assert "decoder layer 2 of 3" in steps


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

    with pytest.raises(UserError, match=r"the helper process was killed by signal 9; stop other programs and run"):
        apart(checkpoint, tmp_path / "out", killed)


@pytest.mark.parametrize(
    ("limits", "function", "arguments", "code"),
    [
        ({"wait_s": 1}, "time:sleep", [60], -15),
        ({"memory": 1 << 26}, "builtins:bytearray", [1 << 28], 1),
        ({"cpu_s": 0.5}, "math:factorial", [10**7], -27),
        ({}, "os:_exit", [3], 3),
    ],
)
def test_a_call_that_takes_too_much_or_crashes_is_one_line_and_the_next_one_works(limits, function, arguments, code):
    with Helper(**limits) as helper:
        began = time.monotonic()
        with pytest.raises(HelperEnded, match=r"the helper process (was killed by|exited with)") as error:
            helper.call(function, *arguments)
        assert error.value.code == code
        assert time.monotonic() < began + 30
        assert helper.call("os.path:basename", "/a/b") == "b"


def test_lines_come_one_by_one_and_leaving_ends_the_process():
    with Helper() as helper:
        for number in helper.lines("itertools:count"):
            process = helper.process
            if number == 5:
                break
        assert process is not None
        assert process.poll() is not None
        assert list(helper.lines("itertools:repeat", "x", 3)) == ["x"] * 3


def test_the_current_folder_hides_nothing(tmp_path, monkeypatch):
    """As in the root of a clone whose folder ``edgevlm`` is not the whole package."""
    (tmp_path / "edgevlm").mkdir()
    (tmp_path / "edgevlm" / "__init__.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert call_in_helper("os:getppid") == os.getpid()
