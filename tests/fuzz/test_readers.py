"""Each reader of outside bytes, on what it reads and on a few mutations of that; ``readers.py`` makes millions, guided."""

import numpy as np
import pytest
from readers import READERS, feed, mutated


@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_or_refuses(name: str) -> None:
    for number, seed in enumerate(READERS[name].seeds()):
        assert feed(name, seed), "a seed is read"
        for case in range(40):
            feed(name, mutated(seed, np.random.default_rng([number, case])))
