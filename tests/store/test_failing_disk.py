"""A disk that is full, fails, or does not answer: one warning, and every answer that there can be."""

import errno
import os
import subprocess
import threading

import pytest
from stored import block, same, until

from edgevlm.runtime.store import Store, StoreSettings
from edgevlm.runtime.store import file as file_module

MB = 1 << 20


class Disk:
    """Stands before a system call; raises ``error`` while it is set."""

    def __init__(self, monkeypatch, name):
        self.error, self._real = 0, getattr(os, name)
        monkeypatch.setattr(file_module.os, name, self)

    def __call__(self, *arguments):
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self._real(*arguments)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EIO, "Input/output error"),
        (errno.EDQUOT, "the disk quota is used up"),
    ],
)
@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_it_costs_one_warning_and_ends_when_the_disk_works_again(opened, said, monkeypatch, call, error, why):
    disk = Disk(monkeypatch, call)
    store = opened(retry_s=0.02)
    blocks = [block(seed) for seed in range(59)]
    for each in blocks[:20]:
        store.put(each)
    store.sync()
    assert said == []
    disk.error = error
    store._file.nbytes -= 0 if call == "pwrite" else 3 * MB  # so that it has to grow
    for each in blocks[20:34]:
        store.put(each)
    until(lambda: said)
    assert all(map(same, store.get(range(34)), blocks)), "what was written is in the file, what came since in memory"
    assert store.append(25, block(99, 5))
    assert len(store.get([25])[0]) == 252 + 5
    store.put(blocks[34])
    store.put(blocks[35])
    assert store.lost(), "host memory is full, and there is nothing else"
    assert store.host_bytes <= MB
    assert len(said) == 1
    assert f"cannot be written ({why})" in said[0]
    disk.error = 0
    until(lambda: len(said) == 2)
    assert said[1].endswith("writing resumed")
    store.sync()
    for each in blocks[36:]:
        store.put(each)
    store.sync()
    numbers = set(range(59)) - set(range(20, 36))
    assert all(same(found, blocks[n]) for n, found in zip(numbers, store.get(sorted(numbers)), strict=True))
    assert len(said) == 2


def test_a_disk_that_does_not_answer_keeps_nobody_waiting_for_long(opened, said, monkeypatch):
    gate, real = threading.Event(), os.pwrite
    store = opened(patience_s=0.05)
    monkeypatch.setattr(file_module.os, "pwrite", lambda *arguments: gate.wait(120) and real(*arguments))
    blocks = [block(seed) for seed in range(12)]
    for each in blocks:
        store.put(each)
    assert any("the disk does not respond" in line for line in said)
    assert all(map(same, store.get(range(12)), blocks))
    assert store.state()["number"].tolist() == []
    gate.set()
    until(lambda: said[-1].endswith("writing resumed"))
    store.sync()
    assert store.state()["number"].tolist() == list(range(12))


def test_a_full_file_system(tmp_path, said):
    """Of 3 MB: the file grows until it is full, and no further than that."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        store = Store(tmp_path / "store.bin", "", StoreSettings(64 * MB, MB), said.append)
        for seed in range(60):
            store.put(block(seed))
        store.sync()
        found = store.get(range(60))
        there = [number for number, each in enumerate(found) if each is not None]
        assert all(same(found[number], block(number)) for number in there)
        assert there[:40] == list(range(40)), "those before it was full"
        assert there[-1] == 59, "and those in host memory"
        assert len([line for line in said if "the disk is full" in line]) == 1
        store.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)
