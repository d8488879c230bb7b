"""The tables beside a dict and a list."""

import numpy as np
import pytest

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
