"""Any sequence of operations, checked after each against plain arrays that do the same."""

import numpy as np
import reference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from edgevlm.errors import CacheError, CacheFull
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import PARTS, Kind

LAYERS, CAPACITIES = 3, [24, 30, 40]


class Twin(RuleBasedStateMachine):
    """``held[l]`` is what layer l must hold, name -> ``[H, n, ...]``; ``marks`` the moments to go back to, newest last."""

    kit = None

    @initialize(seed=st.integers(0, 2**32), heads=st.integers(1, 3))
    def start(self, seed, heads):
        self.rng, self.heads, self.next = np.random.default_rng(seed), heads, 0
        self.cache = self.kit.make(layers=LAYERS, kv_heads=heads, head_dim=6, capacity=CAPACITIES)
        self.nbytes = self.cache.nbytes
        self.held = [self.kit.arrays(self.cache, layer) for layer in range(LAYERS)]
        self.marks, self.stale = [], []

    @property
    def length(self):
        return [layer["key"].shape[1] for layer in self.held]

    def restructured(self):
        self.stale += [mark for mark, _, _ in self.marks]
        self.marks = []

    @rule(n=st.integers(0, 9), goes_wrong=st.booleans())
    def append(self, n, goes_wrong):
        if any(length + n > capacity for length, capacity in zip(self.length, CAPACITIES, strict=True)):
            before = self.cache.memory.copy()
            try:
                self.cache.reserve(n)
            except CacheFull:
                np.testing.assert_array_equal(self.cache.memory, before)
                return
            raise AssertionError("reserved more than fits")
        self.cache.reserve(n)
        self.kit.write(self.cache, n, self.rng)
        if goes_wrong:
            self.cache.abort()
            return
        rows = self.kit.rows(n, self.next)
        for layer, buffer in zip(self.held, self.cache.buffers(), strict=True):
            length = layer["key"].shape[1]
            new = dict(zip(("key", "value"), (array[:, length : length + n] for array in self.kit.memory(buffer)), strict=True))
            for name in PARTS[2:]:
                array = getattr(rows, "frame" if name == "confirmed" else name)
                new[name] = np.broadcast_to(array, (self.heads, *array.shape))
            for name in PARTS:
                layer[name] = np.concatenate([layer[name], new[name]], axis=1)
        self.cache.commit(rows)
        self.next += n

    @rule()
    def mark(self):
        self.marks.append((self.cache.mark(), [dict(layer) for layer in self.held], self.next))

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def rollback(self, data):
        chosen = data.draw(st.integers(0, len(self.marks) - 1))
        mark, held, _ = self.marks[chosen]
        shorter = held[0]["key"].shape[1]
        self.cache.rollback(mark)
        # marks that stand on more rows than are left are gone; those on as many are still good
        gone = [m for m, layers, _ in self.marks if layers[0]["key"].shape[1] > shorter]
        self.marks = [entry for entry in self.marks if entry[1][0]["key"].shape[1] <= shorter]
        self.stale += gone
        for then, now in zip(held, self.held, strict=True):  # only rows go back: confirmations, seq and position go on
            now.update(then | {"confirmed": now["confirmed"][:, : then["confirmed"].shape[1]]})

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def rollback_to_a_stale_mark(self, data):
        mark, before = data.draw(st.sampled_from(self.stale)), self.cache.memory.copy()
        try:
            self.cache.rollback(mark)
        except CacheError:
            np.testing.assert_array_equal(self.cache.memory, before)
            return
        raise AssertionError("rolled back to a stale mark")

    @rule(data=st.data())
    def evict(self, data):
        keep = []
        for length in self.length:
            kept = data.draw(st.integers(0, length))
            keep.append(None if data.draw(st.booleans()) else self.kit.random_keep(self.rng, self.heads, length, kept))
        before = self.length
        evicted = self.cache.evict(keep)
        for layer, mask in zip(self.held, keep, strict=True):
            if mask is not None:
                layer.update(zip(PARTS, reference.evict([layer[name] for name in PARTS], mask), strict=True))
        assert evicted == sum(before) - sum(self.length)
        if evicted:
            self.restructured()

    @rule(layer=st.integers(0, LAYERS - 1), furthest=st.sampled_from([1, 100, 2**31 - 1]))
    def shift(self, layer, furthest):
        held = self.held[layer]
        new = self.rng.integers(0, furthest, held["position"].shape, dtype=np.int32)
        if (new != held["position"]).any():
            self.restructured()
        self.cache.shift(layer, new)
        self.turned(layer, new)

    @rule(frame=st.integers(0, 1000), columns=st.integers(1, 9))
    def confirm(self, frame, columns):
        """Some patch of each row of the grid shows again what a token of it showed."""
        seq = np.full((9, columns), -1, np.int64)
        for layer in self.held:
            for at in np.flatnonzero((layer["kind"][0] == Kind.VISION) & (self.rng.random(layer["seq"].shape[1]) < 0.5)):
                row, col = layer["row"][0, at], layer["col"][0, at]
                if row < 9 and col < columns:
                    seq[row, col] = layer["seq"][0, at]
        self.cache.confirm(seq, frame)
        for layer in self.held:
            row, col = layer["row"].astype(int), layer["col"].astype(int)
            inside = (layer["kind"] == Kind.VISION) & (row < 9) & (col < columns)
            known = seq[np.where(inside, row, 0), np.where(inside, col, 0)] == layer["seq"]
            layer["confirmed"] = np.where(inside & known, frame, layer["confirmed"]).astype(np.int32)

    @rule(prefix=st.integers(0, 10))
    def reindex(self, prefix):
        dense, following = reference.reindex([layer["position"] for layer in self.held], prefix)
        assert self.cache.reindex(prefix) == following
        if any((new != layer["position"]).any() for new, layer in zip(dense, self.held, strict=True)):
            self.restructured()
        for layer, new in enumerate(dense):
            self.turned(layer, new)

    def turned(self, layer, new):
        held, stored = self.held[layer], self.cache.key(layer).copy()
        exact = reference.shift(held["key"], held["position"], new, self.cache.inv_freq)
        np.testing.assert_allclose(stored, exact, atol=self.error(held["key"]))
        held["key"], held["position"] = stored, new

    def error(self, key):
        """Of keys turned once: codes are rounded alike whatever their size, floating numbers by more when large."""
        return self.kit.error * (1 if key.dtype == np.int8 else np.abs(key).max(initial=1))

    @rule(layer=st.integers(0, LAYERS - 1))
    def append_to_one_layer(self, layer):
        if self.length[layer] == CAPACITIES[layer]:
            return
        held, rows = self.held[layer], self.kit.rows(1, self.next)
        key, value = self.rng.standard_normal((2, self.heads, 1, 6), np.float32)
        self.cache.append(layer, key, value, rows)
        scale, kind = (self.cache.key_scale(layer), self.cache.value_scale(layer)), self.kit.numpy
        new = {"key": self.kit.stored(key, scale[0], kind), "value": self.kit.stored(value, scale[1], kind)}
        for name in PARTS:
            array = new.get(name)
            if array is None:
                array = getattr(rows, "frame" if name == "confirmed" else name)
                array = np.broadcast_to(array, (self.heads, *array.shape))
            held[name] = np.concatenate([held[name], array], axis=1)
        self.next += 1
        self.restructured()

    @invariant()
    def holds_what_the_twin_holds(self):
        assert self.cache.lengths.tolist() == self.length
        assert self.cache.nbytes == self.nbytes
        assert self.cache.allocations == 1
        for layer, held in enumerate(self.held):
            for name in PARTS:
                np.testing.assert_array_equal(getattr(self.cache, name)(layer), held[name])

    @rule()
    def norms(self):
        for layer in range(LAYERS):
            expected = reference.value_norms(self.cache.dequantize("value", layer))
            np.testing.assert_allclose(self.cache.value_norms(layer), expected, rtol=2e-6)

    @rule()
    def score(self):
        """Value norms are kept from one call to the next: rows that came, moved or went since must not have another's."""
        among = [np.ones((self.heads, length), np.bool_) for length in self.length]
        scores = kernels.infinipot_scores(self.cache, among, among)
        for layer, (_, norms) in enumerate(scores):
            np.testing.assert_allclose(norms, reference.value_norms(self.cache.dequantize("value", layer)), rtol=2e-6)

    @rule()
    def spoil_free_rows(self):
        """Nobody reads them: whatever follows comes out as it would."""
        for buffer, length in zip(self.cache.buffers(), self.length, strict=True):
            for array in self.kit.memory(buffer):
                array[:, length:] = np.nan if array.dtype.kind == "f" else 99


def test_any_sequence_of_operations(kit):
    Twin.kit = kit
    examples = 16 if kit.where == "cpu" else 8
    run_state_machine_as_test(Twin, settings=settings(deadline=None, max_examples=examples, stateful_step_count=30))
