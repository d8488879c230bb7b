"""A file that is not what it was."""

import os
import subprocess
import sys

import numpy as np
import pytest
from stored import block, same

from edgevlm.errors import UserError
from edgevlm.runtime.store import Store, StoreSettings
from edgevlm.runtime.store.block import BlockRecord, read_record, record_bytes
from edgevlm.runtime.store.file import START

MB = 1 << 20


def filled(store, count=40):
    for seed in range(count):
        store.put(block(seed))
    store.sync()
    return [store._table.extent(number) for number in range(count)]


def flip(path, at):
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))


def test_a_damaged_record_is_dropped_and_counted_and_said_once(opened, said, tmp_path):
    store = opened()
    extents = filled(store)
    for number, at in ((3, 0), (4, 20), (5, 64), (6, extents[6].nbytes - 1)):
        flip(tmp_path / "store.bin", extents[number].offset + at)
    found = store.get(range(40))
    assert [number for number, each in enumerate(found) if each is None] == [3, 4, 5, 6]
    assert all(same(each, block(number)) for number, each in enumerate(found) if each is not None)
    assert sorted(store.lost()) == [3, 4, 5, 6]
    assert (store.stats.lost, store.stats.damaged) == (4, 4)
    assert len(said) == 1
    assert "damaged" in said[0]
    assert store.get([3]) == [None]
    assert not store.append(3, block(1))
    assert store.stats.damaged == 4


def test_a_file_cut_short_while_it_is_used(opened, tmp_path):
    store = opened()
    filled(store)
    os.truncate(tmp_path / "store.bin", START + 3 * 70_656 + 100)
    found = store.get(range(20))
    assert [number for number, each in enumerate(found) if each is not None] == [0, 1, 2]
    assert store.stats.damaged == 17


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: b"something else" + data, "is not an edgevlm store"),
        (lambda data: data[:8] + b"\x02" + data[9:], "has store format 2, but this edgevlm supports 1"),
        (lambda data: data[:30] + b"?" + data[31:], "has a damaged header"),
        (lambda data: b"x", "is not an edgevlm store"),
    ],
)
def test_a_file_that_is_no_store_of_ours_is_refused_and_left(tmp_path, change, why):
    path = tmp_path / "store.bin"
    Store(path, "").close()
    data = change(path.read_bytes())
    path.write_bytes(data)
    with pytest.raises(UserError, match=why):
        Store(path, "")
    assert path.read_bytes() == data


OPEN = """
import sys
from edgevlm.errors import UserError
from edgevlm.runtime.store import Store
try:
    Store(sys.argv[1], "a stream")
except UserError as error:
    print(error)
"""


def test_two_processes_on_one_store(opened, tmp_path):
    store, path = opened(), tmp_path / "store.bin"
    store.put(block(0))
    command = [sys.executable, "-c", OPEN, path]
    refused = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert refused == f"{path}: in use by another process; stop it or choose another folder\n"
    assert same(store.get([0])[0], block(0))
    store.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout == ""


def test_what_a_camera_has_seen_is_for_its_owner_alone(tmp_path):
    Store(tmp_path / "store.bin", "", StoreSettings(MB, MB)).close()
    assert (tmp_path / "store.bin").stat().st_mode & 0o777 == 0o600


def sealed(of, number=7, stamp=2**64 - 1):
    record = BlockRecord.of(of)
    record.seal(number, stamp)
    return record.buffer.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
@pytest.mark.parametrize(("heads", "rows", "head_dim", "axes"), [(1, 1, 1, 1), (2, 5, 3, 3), (4, 0, 8, 1), (3, 7, 64, 3)])
def test_a_block_comes_back_as_it_was(dtype, heads, rows, head_dim, axes):
    wanted = block(1, rows, heads, head_dim, dtype, axes)
    data = sealed(wanted)
    assert len(data) == record_bytes(wanted)
    assert len(data) % 64 == 0
    assert same(read_record(data, 2**64 - 1), wanted)


def test_every_byte_is_under_the_checksum():
    data = sealed(block(1, 3, 2, 4, np.float16))
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        assert read_record(bytes(changed), 2**64 - 1) is None, at
