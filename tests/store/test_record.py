"""A block's record: everything comes back, and nothing that was changed."""

from zlib import crc32

import numpy as np
import pytest
from stored import block, same

from edgevlm.runtime.store.block import BlockRecord, read_record, record_bytes


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
