"""Building engines: what is built, what is left alone, and what is said when something stands in the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from fake_cuda import CARD, FakeDriver
from fake_tensorrt import World
from trt_world import build, faked

from edgevlm.apps.bundles.build import capacity_for
from edgevlm.engines.tensorrt import jobs
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle, seal_manifest

HERE = Path(__file__).parent
VERSION, CAPACITY = "10.3.0", 96
GRAPHS = ["vision", "decoder"]


@pytest.fixture
def world() -> Iterator[World]:
    with faked(VERSION) as world:
        yield world


@pytest.fixture
def folder(exported: Any, tmp_path: Path) -> Path:
    source = exported("llava", profile="tensorrt-10.3", kv="fp32").bundle
    return Path(shutil.copytree(source, tmp_path / "bundle", ignore=shutil.ignore_patterns("engines")))


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    return Bundle.load(folder)


def built(world: World) -> list[str]:
    """Graphs that were built since the last look."""
    found = [call.split()[1] for call in world.calls if call.startswith("build ")]
    world.calls.clear()
    return found


def plans(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.plan"))


def test_every_graph_becomes_an_engine_of_this_device(world: World, bundle: Bundle) -> None:
    made = build(bundle, FakeDriver(), CAPACITY, workspace=5 << 20)
    assert [one.graph for one in made] == GRAPHS
    assert not any(one.kept for one in made)
    assert all("workspace 5242880" in call for call in world.calls if call.startswith("build"))
    key = bundle.path / "engines" / "orin-sm87-trt10.3.0-fp32-kv-fp32-vision-fp32"
    for one in made:
        plan = Path(one.path)
        about = json.loads(plan.with_suffix(".json").read_text())
        assert plan.parent == key
        assert plan.stat().st_size == one.bytes == about["bytes"]
    Bundle.load(bundle.path)  # is as good as it was


def test_what_matches_is_left_alone(world: World, bundle: Bundle) -> None:
    first = build(bundle, FakeDriver(), CAPACITY)
    world.calls.clear()
    again = build(bundle, FakeDriver(), CAPACITY)
    assert world.calls == []
    assert [(one.path, one.bytes) for one in again] == [(one.path, one.bytes) for one in first]
    assert all(one.kept for one in again)
    build(bundle, FakeDriver(), CAPACITY, force=True)
    assert built(world) == GRAPHS


def test_a_change_builds_what_depends_on_it(world: World, bundle: Bundle) -> None:
    build(bundle, FakeDriver(), CAPACITY)
    built(world)
    before = plans(bundle.path)
    build(bundle, FakeDriver(), 2 * CAPACITY)
    assert built(world) == ["decoder"]
    after = plans(bundle.path)
    assert len(after) == 2
    assert len(set(after) & set(before)) == 1  # the old decoder's is gone
    build(bundle, FakeDriver(), 2 * CAPACITY, probes=False)
    assert built(world) == ["decoder"]
    manifest = json.loads((bundle.path / "bundle.json").read_text())
    weights = bundle.path / "vision.weights"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    manifest["files"]["vision.weights"]["sha256"] = hashlib.sha256(content).hexdigest()
    (bundle.path / "bundle.json").write_bytes(seal_manifest(manifest))
    build(Bundle.load(bundle.path), FakeDriver(), 2 * CAPACITY, probes=False)
    assert built(world) == ["vision"]


def test_a_full_disk_leaves_what_is_finished(world: World, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if target.name.startswith("decoder-") and target.suffix == ".plan":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UserError, match=r"decoder-.*cannot be written \(the disk is full\); free disk space and build again"):
        build(bundle, FakeDriver(), CAPACITY)
    assert [Path(plan).name.split("-")[0] for plan in plans(bundle.path)] == ["vision"]
    assert list(bundle.path.rglob("*.unfinished")) == []
    monkeypatch.setattr(os, "replace", real)
    built(world)
    build(bundle, FakeDriver(), CAPACITY)
    assert built(world) == GRAPHS[1:]


@pytest.mark.parametrize(
    ("device", "available", "swap", "on_card", "fits"),
    [
        ("orin", 3000, 0, 0, True),  # MB; the build below needs 800 + 500 on the host and 300 for the device
        ("orin", 1500, 0, 0, False),
        ("orin", 250, 9000, 0, False),  # the device's part cannot lie in swap
        ("card", 1400, 0, 400, True),
        ("card", 900, 0, 400, False),
    ],
)
def test_memory_is_checked_before(
    monkeypatch: pytest.MonkeyPatch, device: str, available: int, swap: int, on_card: int, fits: bool
) -> None:
    mb = 10**6
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available * mb))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=swap * mb))
    driver: Any = FakeDriver(free=on_card * mb) if device == "orin" else FakeDriver(CARD, free=on_card * mb)
    wanted = jobs.build_need(200 * mb, 100 * mb)
    assert (wanted.host, wanted.device) == (3 * 200 * mb + 500 * mb, 300 * mb)
    wanted = jobs.BuildNeed(1300 * mb, 300 * mb)
    if fits:
        jobs.check_memory("decoder", wanted, driver)
    else:
        with pytest.raises(UserError, match=r"building an engine of decoder needs about .* --workspace") as error:
            jobs.check_memory("decoder", wanted, driver)
        assert "\n" not in str(error.value)


def test_the_capacity_is_that_of_a_session(exported: Any) -> None:
    from edgevlm.runtime.session import Session

    made = exported("llava", kv="fp32")
    with Session.open(made.bundle, budget=64) as session:
        rows = int(session.cache.capacities.max())
    capacity = capacity_for(str(made.bundle), 64)
    assert rows <= capacity < rows + 64
    assert capacity % 64 == 0
    with pytest.raises(UserError, match=r"a budget of 9000000 tokens is out of range for .*; use --budget"):
        capacity_for(str(made.bundle), 9_000_000)


def edgevlm(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    program = [sys.executable, str(HERE / "faked_build.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, env=environment)


def test_the_command_line(folder: Path) -> None:
    done = edgevlm(VERSION, "--", "build", str(folder), "--budget", "64", "--json")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["graph"] for one in found] == GRAPHS
    assert [one["kept"] for one in found] == [False] * 2
    assert "building decoder, engine 2 of 2" in done.stderr
    done = edgevlm(VERSION, "--", "build", str(folder), "--budget", "64")
    assert [line.split("  ")[0] for line in done.stdout.splitlines()] == [one["path"] for one in found]
    assert done.stdout.count("(kept)") == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_any_step_the_same_command_goes_on(folder: Path, how: int) -> None:
    done = edgevlm(VERSION, "decoder", "1", str(int(how)), "--", "build", str(folder))
    assert done.returncode == -how
    assert "Traceback" not in done.stderr
    assert [Path(plan).name.split("-")[0] for plan in plans(folder)] == ["vision"]
    (next(folder.rglob("*.plan")).parent / "decoder-half.plan.unfinished").write_bytes(b"half")
    done = edgevlm(VERSION, "--", "build", str(folder), "--json")
    assert [json.loads(line)["kept"] for line in done.stdout.splitlines()] == [True, False]
    assert list(folder.rglob("*.unfinished")) == []
    assert np.all([json.loads(line)["bytes"] > 0 for line in done.stdout.splitlines()])
