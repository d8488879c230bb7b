"""The greedy coreset against its float64 twin."""

import numpy as np
import pytest
import reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgevlm.errors import CacheError
from edgevlm.runtime import kernels

pytestmark = pytest.mark.usefixtures("isa")


def scattered(rng, n, width, clusters, noise):
    """Rows of length 1 around ``clusters`` centres; a tenth of them zero."""
    rows = rng.standard_normal((clusters, width))[rng.integers(0, clusters, n)] + noise * rng.standard_normal((n, width))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[rng.random(n) < 0.1] = 0
    return rows.astype(np.float32)


@given(st.data())
@settings(deadline=None, max_examples=25)
def test_rows_are_taken_as_the_reference_takes_them(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n, width = data.draw(st.sampled_from([1, 2, 33, 130, 600])), data.draw(st.sampled_from([1, 6, 16, 72]))
    rows = scattered(rng, n, width, data.draw(st.sampled_from([1, 5, 40])), data.draw(st.sampled_from([0.1, 1.0])))
    diversity, directions = data.draw(st.sampled_from([(0, 0), (0.3, 4), (0.3, 64)]))
    count = data.draw(st.integers(0, min(n, 60)))
    steps = data.draw(st.sampled_from([1, 20, 60]))
    expected, ahead = reference.coreset(rows, count, diversity, directions, steps)
    assume(ahead > 1e-4)
    found = kernels.coreset(rows, count, diversity=diversity, directions=directions, steps=steps)
    assert found.dtype == np.int32
    assert found.tolist() == expected


def test_every_choice_of_many_is_the_best_there_was(isa):
    """More rows than are looked at together, where near ties may be decided either way."""
    rows = scattered(np.random.default_rng(1), 1500, 24, 30, 0.3)
    found = kernels.coreset(rows, 1500, diversity=0, directions=0, steps=1500).tolist()
    assert sorted(found) == list(range(1500))
    products = rows @ rows.T
    cover = np.full(1500, -1.0)
    for step, row in enumerate(found):
        if step:
            assert cover[row] <= cover[found[step:]].min() + 1e-5
        cover = np.maximum(cover, products[row])


def test_more_rows_than_there_are():
    with pytest.raises(CacheError, match="count must be 0 to 2, not 3"):
        kernels.coreset(np.zeros((2, 4), np.float32), 3, diversity=0, directions=0, steps=1)
