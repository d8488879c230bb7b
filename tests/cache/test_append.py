"""Reserve, write in place, commit or abort; mark and roll back."""

import numpy as np
import pytest

from edgevlm.errors import CacheFull


def test_an_engine_appends_in_place(kit):
    cache = kit.make(kv_heads=3)
    kit.append(cache, 5, start=0)
    before = kit.arrays(cache, 1)
    cache.reserve(4)
    key, value = kit.memory(cache.buffers()[1])
    key[:, 5:9], value[:, 5:9] = 7, 8
    assert cache.lengths.tolist() == [5, 5]
    cache.commit(kit.rows(4, 5))
    assert cache.lengths.tolist() == [9, 9]
    after = kit.arrays(cache, 1)
    for name in before:
        np.testing.assert_array_equal(after[name][:, :5], before[name])
    assert (after["key"][:, 5:] == 7).all()
    assert (after["value"][:, 5:] == 8).all()
    assert after["seq"].tolist() == [list(range(9))] * 3


def test_an_aborted_append_leaves_no_trace(kit):
    cache = kit.make()
    kit.append(cache, 6)
    cache.evict([kit.random_keep(np.random.default_rng(1), 2, 6, 3)] * 2)
    before = [kit.arrays(cache, layer) for layer in range(2)]
    cache.reserve(9)
    kit.write(cache, 9, np.random.default_rng(2))
    cache.abort()
    assert cache.lengths.tolist() == [3, 3]
    for layer, buffer in enumerate(cache.buffers()):
        for name, array in kit.arrays(cache, layer).items():
            np.testing.assert_array_equal(array, before[layer][name])
        assert not any(array[:, 3:12].any() for array in kit.memory(buffer)), "an engine that failed may have left a NaN"


def test_a_full_layer_says_so_and_nothing_is_reserved(kit):
    cache = kit.make(capacity=[40, 16])
    kit.append(cache, 12)
    with pytest.raises(CacheFull, match="layer 1 holds 12 of 16 rows and cannot take 5 more: evict at least 1"):
        cache.reserve(5)
    cache.reserve(4)
    cache.abort()
    with pytest.raises(CacheFull):
        cache.reserve(2**62)


def test_a_question_is_rolled_back_to_the_byte(kit):
    cache = kit.make()
    kit.append(cache, 6)
    before, mark = kit.rows_memory(cache), cache.mark()
    for repeat in range(3):
        kit.append(cache, 5, start=6 + repeat)
        for token in range(4):
            kit.append(cache, 1, start=11 + token)
        assert cache.lengths.tolist() == [15, 15]
        cache.rollback(mark)
        assert cache.lengths.tolist() == [6, 6]
        np.testing.assert_array_equal(kit.rows_memory(cache), before)
