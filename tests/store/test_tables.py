"""The store's tables, and the records of its file."""

from zlib import crc32

import numpy as np
import pytest
from stored import block, same

from edgevlm.runtime.store.block import BlockRecord, read_record, record_bytes
from edgevlm.runtime.store.file import Extent
from edgevlm.runtime.store.ring import MAX_RECORDS, BlockTable, RecordTable


@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_a_dict_of_lists(seed):
    rng, blocks, wanted = np.random.default_rng(seed), BlockTable(), {}
    records = 0
    for number in range(600):
        blocks.add(3 * number)
        wanted[3 * number] = []
        for other in rng.choice(list(wanted), 3).tolist():
            if other not in wanted:
                continue
            if rng.random() < 0.1 + 0.6 * (len(wanted) > 100):
                blocks.remove(other)
                del wanted[other]
            elif len(wanted[other]) == MAX_RECORDS:
                blocks.clear(other)
                wanted[other] = []
            else:
                blocks.extend(other, records)
                wanted[other].append(records)
                records += 1
    assert len(wanted) > 50
    assert blocks.ids().tolist() == sorted(wanted)
    assert {number: list(blocks.records_of(number)) for number in wanted} == wanted
    assert blocks.records().tolist() == sorted(record for of in wanted.values() for record in of)
    assert [number for number in range(-1, 1802) if number in blocks] == sorted(wanted)
    assert blocks.nbytes < 600 * 20, "room is for what is held, not for what was"


def test_records_leave_in_the_order_in_which_they_came():
    records, wanted, rng = RecordTable(), {}, np.random.default_rng(0)
    for number in range(1000):
        if records.full:
            records.keep(np.array(list(wanted)))
            wanted = dict(enumerate(wanted.values()))
        extent = Extent(64 * number, 64, 2**64 - 1 - number)
        wanted[records.add(number, extent)] = (number, extent)
        while len(wanted) > 40 and rng.random() < 0.7:
            first = next(iter(wanted))
            assert records.oldest() == (first, wanted[first][0], wanted.pop(first)[1].offset)
            records.forget_oldest()
    assert {record: records.extent(record) for record in wanted} == {record: extent for record, (_, extent) in wanted.items()}
    arrays = records.arrays(np.array(list(wanted)))
    assert arrays["number"].tolist() == [number for number, _ in wanted.values()]
    assert arrays["stamp"].tolist() == [extent.stamp for _, extent in wanted.values()]
    assert records.nbytes < 1000 * 16


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


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 200])
def test_a_torn_record_is_none(cut):
    assert read_record(sealed(block(1))[:cut], 2**64 - 1) is None


@pytest.mark.parametrize("at", [32, 40])  # heads, head_dim
def test_a_record_of_no_rows_with_a_size_beyond_numpys_is_none(at):
    data = bytearray(sealed(block(1, 0, 4, 8)))
    data[at : at + 4] = b"\xff" * 4
    data[6:8] = b"\xff" * 2  # axes
    data[44:48] = bytes(4)
    data[44:48] = crc32(data).to_bytes(4, "little")
    assert read_record(bytes(data), 2**64 - 1) is None
