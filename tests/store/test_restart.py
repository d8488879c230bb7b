"""What a store still has after its process has gone, in order or not."""

import signal
import subprocess
import sys

import numpy as np
import pytest
from stored import block, same, until

from edgevlm.runtime.store import joined

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


def test_blocks_of_several_records_are_joined(opened, said):
    """Versions up to 2026-11-23 wrote what was appended to a block as a record of its own."""
    store, parts = opened(), [block(0), block(1), block(99, 10)]
    for part in parts:
        store.put(part)
    state = {name: array.copy() for name, array in store.state().items()}
    store.close()
    state["number"][state["number"] == 2], state["numbers"] = 0, state["numbers"][:2]
    for _ in range(2):  # as they were, and as they are written now
        again = opened()
        again.restore(state)
        assert all(map(same, again.get(range(2)), [joined([parts[0], parts[2]]), parts[1]]))
        state = {name: array.copy() for name, array in again.state().items()}
        again.close()
    assert len(state["number"]) == 2
    assert said == []


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
