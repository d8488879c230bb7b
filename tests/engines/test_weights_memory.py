"""What opening a graph left behind goes back; huge pages are asked for under memory that is resident, and under no other."""

import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from edgevlm.engines import weights_memory

FEW = 4  # huge pages


@pytest.fixture
def size() -> int:
    where = Path("/sys/kernel/mm/transparent_hugepage")
    if not weights_memory.SIZE.exists() or "[never]" in (where / "enabled").read_text():
        pytest.skip("this system gives no huge pages")
    return int(weights_memory.SIZE.read_text())


def mapped(size: int) -> tuple[mmap.mmap, np.ndarray]:
    """Private memory whose FEW huge pages, of ``size`` bytes, are small pages as yet; and a view that begins where one can."""
    memory = mmap.mmap(-1, (FEW + 1) * size + weights_memory.LEAST, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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


def test_memory_that_is_filled_goes_into_huge_pages(size: int, tmp_path: Path) -> None:
    memory, view = mapped(size)
    view[:] = np.arange(view.size, dtype=np.uint64).astype(np.uint8)
    before = view.copy()
    assert huge_and_resident(view)[0] == 0
    assert weights_memory.settle_weights(tmp_path) >= FEW * size
    np.testing.assert_array_equal(view, before)
    if huge_and_resident(view)[0] == 0:
        pytest.skip("asked for, and this system gives them by and by")
    del view, memory


def resident(path: Path) -> int:
    """Bytes of a file's mappings in this process that are resident."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_pages_of_the_bundles_files_are_given_back_and_written_ones_are_not(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 64 * mmap.PAGESIZE, np.uint8)
    read, written = tmp_path / "read.weights", tmp_path / "written.weights"
    views = []
    for path in (read, written):
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a page that is still to be written is not given back
        views.append(np.memmap(path, np.uint8, "c"))
        np.testing.assert_array_equal(views[-1], data)
    views[1][:] = 7
    assert resident(read) == resident(written) == data.nbytes
    weights_memory.settle_weights(tmp_path)
    assert (resident(read), resident(written)) == (0, data.nbytes)
    np.testing.assert_array_equal(views[0], data)
    assert np.all(views[1] == 7)
