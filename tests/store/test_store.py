"""A store does what the plainest one does, within its bytes."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stored import PlainStore, block, same, until

from edgevlm.runtime.store import Store, StoreSettings
from edgevlm.runtime.store import file as file_module
from edgevlm.runtime.store.block import record_bytes

MB = 1 << 20


class Beside(RuleBasedStateMachine):
    """Every call to both. The file holds all that there can be; host memory a few blocks."""

    path = "temporary"
    file_bytes = 64 * MB

    def __init__(self):
        super().__init__()
        self.store = Store(self.path, "", StoreSettings(self.file_bytes, MB))
        self.plain = PlainStore()
        self.count = 0

    def some(self, chosen):
        return [number % self.count for number in chosen] if self.count else []

    @rule(seed=st.integers(0, 99), rows=st.integers(1, 900), times=st.integers(1, 6))
    def put(self, seed, rows, times):
        for more in range(times):
            given = block(seed + more, rows)
            assert self.store.put(given) == self.plain.put(given) == self.count
            self.count += 1

    @rule(chosen=st.lists(st.integers(0, 999), max_size=4), rows=st.integers(1, 40), times=st.integers(1, 6))
    def append(self, chosen, rows, times):
        for number in self.some(chosen):
            for seed in range(times):
                given = block(seed, rows)
                assert self.store.append(number, given) == self.plain.append(number, given)

    @rule(chosen=st.lists(st.integers(0, 999), max_size=9), ahead=st.booleans())
    def get(self, chosen, ahead):
        numbers = self.some(chosen)
        if ahead:
            self.store.prefetch(numbers[::2])
        assert all(map(same, self.store.get(numbers), self.plain.get(numbers)))

    @rule(chosen=st.lists(st.integers(0, 999), max_size=2))
    def drop(self, chosen):
        numbers = self.some(chosen)
        self.store.prefetch(numbers)
        self.store.drop(numbers)
        self.plain.drop(numbers)

    @rule(chosen=st.lists(st.integers(0, 999), max_size=9, unique=True))
    def renumber(self, chosen):
        numbers = list(dict.fromkeys(self.some(chosen)))
        self.store.prefetch(numbers[::2])
        new = self.store.renumber(numbers)
        assert new == self.plain.renumber(numbers)
        assert new.start == self.count
        self.count = new.stop

    @rule()
    def state(self):
        state = self.store.state()
        assert sorted(set(state["number"].tolist())) == state["numbers"].tolist(), "all of it is in the file"
        assert state["numbers"].tolist() == self.plain.state()["numbers"].tolist()

    @invariant()
    def within_its_bytes(self):
        assert self.store.host_bytes <= MB + 4 * record_bytes(block(0, 900))
        assert self.store.file_bytes <= self.file_bytes
        assert self.store.lost() == []

    def teardown(self):
        assert all(map(same, self.store.get(range(self.count)), self.plain.get(range(self.count))))
        self.store.close()
        assert self.store.stats.lost == 0


Beside.TestCase.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
TestBeside = Beside.TestCase


def test_when_the_file_is_full_the_oldest_are_overwritten_and_named(opened, said):
    store = opened()
    blocks = [block(seed) for seed in range(130)]
    for each in blocks:
        store.put(each)
    store.sync()
    found = store.get(range(130))
    gone = [number for number, each in enumerate(found) if each is None]
    kept = len(blocks) - len(gone)
    assert gone == list(range(len(gone)))
    assert kept == 59, "as many as the file holds"
    assert store.lost() == gone
    assert store.lost() == []
    assert store.stats.lost == len(gone)
    assert store.stats.damaged == 0
    assert all(map(same, found[len(gone) :], blocks[len(gone) :]))
    assert store.file_bytes == os.path.getsize(store._file.path) <= 4 * MB
    assert len([line for line in said if "overwriting the oldest clusters" in line]) == len(said) == 1


@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_again_and_again_costs_nobody_a_block(opened, seed):
    """Some blocks are put once and renumbered, others grow and are dropped, for many times the file's bytes: all stay."""
    rng, store, plain, number = np.random.default_rng(seed), opened(), PlainStore(), 0
    cold, hot = [], []
    for each in range(20):
        assert store.put(block(each)) == plain.put(block(each))
        cold.append(number)
        number += 1
    for each in range(900):
        if rng.random() < 0.5 or not hot:
            given = block(each, int(rng.integers(50, 300)))
            assert store.put(given) == plain.put(given)
            hot.append(number)
            number += 1
        else:
            given, grown = block(each, int(rng.integers(1, 60))), int(rng.choice(hot))
            assert store.append(grown, given)
            assert plain.append(grown, given)
        if len(hot) > 8:
            gone = hot.pop(int(rng.integers(len(hot))))
            store.drop([gone])
            plain.drop([gone])
        if each % 5 == 4:
            some = rng.choice(cold, 4, replace=False).tolist()
            new = store.renumber(some)
            assert new == plain.renumber(some) == range(number, number + 4)
            cold, number = [kept for kept in cold if kept not in some] + list(new), new.stop
    store.sync()
    assert store.stats.bytes_written > 4 * store.file_bytes, "four times round"
    assert store.stats.lost == 0
    assert all(map(same, store.get(cold + hot), plain.get(cold + hot)))


def test_threads_share_a_store(opened):
    """Each finds its own blocks again, and the one that all append to, whatever the others do meanwhile."""
    store = opened(path="temporary", file_bytes=64 * MB)
    shared = store.put(block(0))

    def use(who):
        random, mine = np.random.default_rng(who), {}
        for turn in range(60):
            seed = 1000 * who + turn
            mine[store.put(block(seed))] = block(seed)
            number = int(random.choice(list(mine)))
            store.prefetch(mine)
            assert store.append(shared, block(seed, rows=1))
            found = store.get([number, shared])
            assert same(found[0], mine[number])
            assert found[1] is not None
            if turn % 3 == 0:
                (new,) = store.renumber([number])
                mine[new] = mine.pop(number)
            elif turn % 7 == 0:
                store.drop([number])
                del mine[number]
                assert store.get([number]) == [None]
        assert all(map(same, store.get(list(mine)), mine.values()))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))


@pytest.mark.parametrize("nameless", [True, False])
def test_a_temporary_file_has_no_name(tmp_path, monkeypatch, opened, nameless):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if not nameless:
        monkeypatch.setattr(file_module.os, "O_TMPFILE", os.O_DIRECTORY, raising=False)  # cannot be written: EISDIR
    store = opened(path="temporary")
    for seed in range(40):
        store.put(block(seed))
    store.sync()
    assert list(tmp_path.iterdir()) == []
    assert store.file_bytes > 40 * block(0).nbytes
    assert same(store.get([3])[0], block(3))


def test_what_is_expected_is_read_while_nobody_waits(opened, monkeypatch):
    store, real = opened(), os.pread
    for seed in range(40):
        store.put(block(seed))
    store.sync()
    store.get(range(20, 40))
    slow, gate = store._table.extent(3).offset, threading.Event()

    def pread(handle, nbytes, offset):
        if offset == slow:
            assert gate.wait(120)
        return real(handle, nbytes, offset)

    monkeypatch.setattr(file_module.os, "pread", pread)
    store.prefetch([3, 5, 6])
    until(lambda: store.resident(6))  # while the disk turns for 3
    reads = store.stats.reads
    assert all(map(same, store.get([5, 6]), [block(5), block(6)]))
    assert store.stats.reads == reads, "they were there"
    assert all(map(same, store.get([7, 8]), [block(7), block(8)])), "nor does what was not expected wait for 3"
    assert not gate.is_set()
    threading.Timer(0.05, gate.set).start()
    assert same(store.get([3])[0], block(3))
    assert store.stats.reads == reads + 3, "3 was read once, by who expected it"


def test_a_file_too_small_for_what_there_is_loses_and_does_not_go_round_for_ever(opened):
    """Two blocks leave a quarter, which no third fits in: to write the others again for each that comes would never end."""
    store = opened(file_bytes=MB)
    for seed in range(8):
        store.put(block(seed, 1400))
    ended = threading.Thread(target=lambda: (store.sync(), store.state()), daemon=True)
    ended.start()
    ended.join(120)
    assert not ended.is_alive(), "all that waits is written at some time"
    assert store.stats.bytes_written < 16 * record_bytes(block(0, 1400))
    assert store.lost()
    assert same(store.get([7])[0], block(7, 1400))
