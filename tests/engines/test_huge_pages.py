"""Huge pages: asked for under memory that is resident, and under no other."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from edgevlm.engines import huge_pages

FEW = 4  # huge pages


@pytest.fixture
def size() -> int:
    where = Path("/sys/kernel/mm/transparent_hugepage")
    if not huge_pages.SIZE.exists() or "[never]" in (where / "enabled").read_text():
        pytest.skip("this system gives no huge pages")
    return int(huge_pages.SIZE.read_text())


def mapped(size: int) -> tuple[mmap.mmap, np.ndarray]:
    """Private memory whose FEW huge pages, of ``size`` bytes, are small pages as yet; and a view that begins where one can."""
    memory = mmap.mmap(-1, (FEW + 1) * size + huge_pages.LEAST, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    view = np.frombuffer(memory, np.uint8)
    return memory, view[-view.ctypes.data % size :][: FEW * size]


def huge_and_resident(view: np.ndarray) -> tuple[int, int]:
    """Bytes in huge pages, and resident ones, of the mappings that the view lies in."""
    huge = resident = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(address, 16) for address in place.groups())
            inside = start < view.ctypes.data + view.size and end > view.ctypes.data
        elif inside and line.startswith("AnonHugePages:"):
            huge += int(line.split()[1]) << 10
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) << 10
    return huge, resident


def test_memory_that_is_filled_goes_into_huge_pages(size: int) -> None:
    memory, view = mapped(size)
    view[:] = np.arange(view.size, dtype=np.uint64).astype(np.uint8)
    before = view.copy()
    assert huge_and_resident(view)[0] == 0
    assert huge_pages.use_huge_pages() >= FEW * size
    np.testing.assert_array_equal(view, before)
    if huge_and_resident(view)[0] == 0:
        pytest.skip("asked for, and this system gives them by and by")
    del view, memory


def test_memory_that_is_not_is_left_alone(size: int) -> None:
    memory, view = mapped(size)
    view[: size + size // 2] = 1
    view[2 * size] = 1
    resident = huge_and_resident(view)[1]
    huge_pages.use_huge_pages()
    huge, after = huge_and_resident(view)
    assert huge <= size
    assert after == resident
    del view, memory


@pytest.mark.parametrize("gone", ["SIZE", "libc"])
def test_a_system_without_them_asks_for_nothing(gone: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if gone == "SIZE":
        monkeypatch.setattr(huge_pages, "SIZE", tmp_path / "none")
    else:
        monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda name: object())
    assert huge_pages.use_huge_pages() == 0


def test_runs() -> None:
    assert list(huge_pages._runs(np.array([True, True, False, True]))) == [(0, 2), (3, 1)]
    assert list(huge_pages._runs(np.zeros(3, np.bool_))) == []
