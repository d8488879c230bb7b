"""CUDA graphs through the driver's library: one compiled here in its place says what it was called with."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgevlm.runtime.cuda import graphs

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
STREAM = 2**45 + 16  # an address: more than an int holds


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    target = tmp_path / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda_graphs.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(target), str(source)], check=True)
    found = ctypes.CDLL(str(target))
    monkeypatch.setattr(graphs, "_library", lambda: found)
    return found


def said(library: Any) -> list[str]:
    """The calls since the last look."""
    buffer = (ctypes.c_char * 4096).in_dll(library, "said")
    calls = buffer.value.decode().split(";")[:-1]
    buffer.value = b""
    return calls


def fail(library: Any, name: bytes) -> None:
    (ctypes.c_char * 64).in_dll(library, "fails").value = name


def test_a_graph_is_recorded_launched_and_dropped(library: Any) -> None:
    asked: list[str] = []
    graph = graphs.record(STREAM, lambda: asked.extend(said(library)))
    assert asked == [f"begin {STREAM}"]
    assert said(library) == [f"end {STREAM}", "instantiate 0", "destroy 0"]
    graph.launch(STREAM)
    graph.launch(STREAM)
    graph.close()
    graph.close()
    assert said(library) == [f"launch {STREAM}"] * 2 + ["close 0"]


@pytest.mark.parametrize(
    ("name", "words", "calls"),
    [
        ("begin", "cuStreamBeginCapture_v2: operation not permitted", ["begin"]),
        ("end", "cuStreamEndCapture: operation not permitted", ["begin", "end"]),
        ("no graph", "cuStreamEndCapture: error 0", ["begin", "end"]),
        ("instantiate", "cuGraphInstantiateWithFlags: operation not permitted", ["begin", "end", "instantiate", "destroy"]),
    ],
)
def test_what_cannot_be_recorded_leaves_nothing(library: Any, name: str, words: str, calls: list[str]) -> None:
    fail(library, name.encode())
    with pytest.raises(RuntimeError, match=words):
        graphs.record(STREAM, lambda: None)
    assert [call.split()[0] for call in said(library)] == calls


def test_work_that_fails_ends_the_recording(library: Any) -> None:
    def work() -> None:
        raise KeyError("mine")

    failing: Callable[[], None] = work
    with pytest.raises(KeyError, match="mine"):
        graphs.record(STREAM, failing)
    assert [call.split()[0] for call in said(library)] == ["begin", "end", "destroy"]


def test_a_launch_that_fails_says_why(library: Any) -> None:
    graph = graphs.record(STREAM, lambda: None)
    fail(library, b"launch")
    with pytest.raises(RuntimeError, match="cuGraphLaunch: operation not permitted when stream is capturing"):
        graph.launch(STREAM)
