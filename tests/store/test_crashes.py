"""A small ring, crashes at any moment, and going on from the last state: what is not named as lost is there, to the bit."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from stored import block, same

from edgevlm.runtime.store import Store, StoreSettings, joined

MB = 1 << 20


class Crashes(RuleBasedStateMachine):
    """The model: what was put and not dropped, less what the store has named."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.wanted, self.next, self.saved = {}, 0, None
        self.open(2 * MB)

    def open(self, file_bytes):
        self.said = []
        path = Path(self.folder.name) / "store.bin"
        self.store = Store(path, "", StoreSettings(file_bytes, MB), self.said.append)

    def forget_lost(self):
        for number in self.store.lost():
            assert self.wanted.pop(number, None) is not None, "it was there, and is named once"

    @rule(seed=st.integers(0, 99), rows=st.integers(1, 900), times=st.integers(1, 12))
    def put(self, seed, rows, times):
        for more in range(times):
            given = block(seed + more, 1 + (rows + 97 * more) % 900)
            number = self.store.put(given)
            assert number == self.next
            self.wanted[number], self.next = given, number + 1

    @rule(chosen=st.lists(st.integers(0, 99), max_size=3), rows=st.integers(1, 40), times=st.integers(1, 6))
    def append(self, chosen, rows, times):
        for place in chosen:
            number = max(0, self.next - 1 - place)
            for seed in range(times):
                if self.store.append(number, block(seed, rows)):
                    self.wanted[number] = joined([self.wanted[number], block(seed, rows)])

    @rule(chosen=st.lists(st.integers(0, 99), max_size=5))
    def drop(self, chosen):
        self.forget_lost()
        numbers = [max(0, self.next - 1 - place) for place in chosen]
        self.store.drop(numbers)
        self.forget_lost()
        for number in numbers:
            self.wanted.pop(number, None)

    @rule(expect=st.booleans())
    def get(self, expect):
        numbers = sorted(self.wanted)
        if expect:
            self.store.prefetch(numbers[::3])
        found = dict(zip(numbers, self.store.get(numbers), strict=True))
        self.forget_lost()
        assert all(found[number] is None or same(found[number], self.wanted[number]) for number in self.wanted)

    @rule()
    def everything(self):
        """Once nothing is being written, what has not been named is there."""
        self.store.sync()
        self.forget_lost()
        assert all(map(same, self.store.get(sorted(self.wanted)), [self.wanted[number] for number in sorted(self.wanted)]))

    @rule()
    def save(self):
        state = {name: array.copy() for name, array in self.store.state().items()}
        self.forget_lost()
        assert state["numbers"].tolist() == sorted(self.wanted)
        self.saved = state, dict(self.wanted), self.next

    @precondition(lambda self: self.saved is not None)
    @rule(file_bytes=st.sampled_from([2 * MB] * 6 + [MB + MB // 2, 3 * MB]))
    def crash(self, file_bytes):
        self.store.close()
        self.open(file_bytes)
        state, wanted, self.next = self.saved
        self.wanted = dict(wanted)
        self.store.restore(state)
        self.everything()
        assert sum("clusters are lost" in line for line in self.said) == (len(self.wanted) < len(wanted))

    def teardown(self):
        self.everything()
        assert self.store.stats.damaged == 0
        self.store.close()
        self.folder.cleanup()


Crashes.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TestCrashes = Crashes.TestCase
