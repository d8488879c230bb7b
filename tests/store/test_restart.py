"""What a store still has after its process has gone, in order or not."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from stored import block, same, until

from edgevlm.runtime.store.file import START

MB = 1 << 20


def fill(store, seeds):
    for seed in seeds:
        store.put(block(seed))


def there(store, numbers):
    """Numbers of those that are, and equal to the block of that seed."""
    found = store.get(numbers)
    assert all(each is None or same(each, block(number)) for number, each in zip(numbers, found, strict=True))
    return [number for number, each in zip(numbers, found, strict=True) if each is not None]


def test_all_is_there_and_numbers_go_on(opened, said):
    store = opened()
    fill(store, range(30))
    store.append(4, block(99, 10))
    store.drop([7])
    assert store.renumber([9, 4, 7, 11]) == range(30, 33), "what is not there gets no number"
    state = {name: array.copy() for name, array in store.state().items()}
    wanted = store.get(range(33))
    assert [number for number, each in enumerate(wanted) if each is None] == [4, 7, 9, 11]
    store.close()
    again = opened()
    again.restore(state)
    assert all(map(same, again.get(range(33)), wanted))
    assert again.put(block(33)) == 33
    again.sync()
    assert there(again, [3, 5, 33]) == [3, 5, 33]
    assert again.stats.lost == 0
    assert said == []


def test_what_was_written_after_the_state_is_forgotten_and_its_room_used_again(opened):
    store = opened()
    fill(store, range(20))
    state = store.state()
    fill(store, range(100, 110))
    store.close()
    again = opened()
    again.restore(state)
    assert there(again, range(20)) == list(range(20))
    assert again.get([20, 25]) == [None, None]
    again.put(block(20))
    again.sync()
    assert again._tables.ring.extents(20)[0].offset == START + 20 * 70_656
    assert there(again, [20]) == [20]
    assert again.stats.lost == 0


@pytest.mark.parametrize("more", [1, 5, 30, 58, 59, 70, 150])
def test_what_was_overwritten_after_the_state_is_known_at_once(opened, said, more):
    store = opened()
    fill(store, range(80))  # 21 to 79 are in the file
    state = store.state()
    fill(store, range(100, 100 + more))
    store.close()
    again = opened()
    again.restore(state)
    lost = again.lost()
    assert lost == list(range(21, min(21 + more, 80)))
    assert again.stats.lost == len(lost)
    assert there(again, range(21, 80)) == list(range(21 + len(lost), 80))
    assert again.stats.damaged == 0, "nothing had to be read to find that out"
    assert sum("clusters are lost" in line for line in said) == 1


def test_old_records_of_blocks_long_dropped_are_not_taken_for_new_ones(opened):
    """Four records more are put over four blocks, which are written again over others, and so on to where dropped ones lay."""
    store = opened()
    fill(store, range(80))
    store.sync()
    store.drop(range(30, 60))
    state = store.state()
    fill(store, range(100, 104))
    store.close()
    again = opened()
    again.restore(state)
    assert again.lost() == list(range(21, 30))
    assert there(again, range(30, 80)) == list(range(60, 80))


def test_a_file_that_may_be_smaller_or_larger_than_it_was(opened):
    store = opened()
    fill(store, range(80))
    state = store.state()
    store.close()
    small = opened(file_bytes=2 * MB)
    small.restore(state)
    assert small.file_bytes == 2 * MB
    kept = there(small, range(21, 80))
    assert kept == sorted(set(range(21, 80)) - set(small.lost()))
    assert len(kept) == (2 * MB - START) // 70_656
    fill(small, range(80, 90))
    state = small.state()
    small.close()
    large = opened(file_bytes=8 * MB)
    large.restore(state)
    before = there(large, range(21, 90))
    assert before[-10:] == list(range(80, 90))
    fill(large, range(90, 150))
    large.sync()
    assert there(large, range(90, 150)) == list(range(90, 150))


def test_the_state_of_another_file_or_of_none_finds_nothing(opened, tmp_path, said):
    store = opened()
    fill(store, range(5))
    state = store.state()
    store.close()
    for path in (tmp_path / "new.bin", None):
        other = opened(path=path)
        other.restore(state)
        assert other.lost() == [0, 1, 2, 3, 4]
        assert other.put(block(5)) == 5
        assert there(other, range(6)) == [5]
    (tmp_path / "store.bin").unlink()
    again = opened()
    again.restore(state)
    assert again.lost() == [0, 1, 2, 3, 4]
    assert [line for line in said if line.startswith("5 of 5 clusters are lost")] == said


WRITER = """
import sys
sys.path[:0] = sys.argv[3:]
import numpy as np
from pathlib import Path
from stored import block
from edgevlm.runtime.store import StoreSettings, Store
store = Store(sys.argv[1], "a stream", StoreSettings(4 << 20, 1 << 20))
for seed in range(10_000):
    store.put(block(seed))
    if seed % 25 == 24:
        np.savez(sys.argv[2] + ".new.npz", **store.state())
        Path(sys.argv[2] + ".new.npz").rename(sys.argv[2])
        print(seed, flush=True)
"""


@pytest.mark.parametrize("states", [1, 3, 7])
def test_a_process_killed_while_it_writes(opened, tmp_path, states):
    command = [sys.executable, "-c", WRITER, tmp_path / "store.bin", tmp_path / "state.npz", *sys.path]
    child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    for _ in range(states):
        assert child.stdout.readline()
    before = (tmp_path / "store.bin").stat().st_mtime_ns
    until(lambda: (tmp_path / "store.bin").stat().st_mtime_ns != before)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    store = opened()
    with np.load(tmp_path / "state.npz") as state:
        store.restore(state)
        named, following = state["numbers"].tolist(), int(state["next"])
    lost = store.lost()
    found = there(store, range(following))
    assert found == sorted(set(named) - set(lost))
    assert store.stats.damaged == 0
    assert lost == named[: len(lost)], "the oldest"
    fill(store, range(following, following + 40))
    store.sync()
    assert there(store, range(following, following + 40)) == list(range(following, following + 40))
