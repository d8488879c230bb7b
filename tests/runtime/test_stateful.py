"""State declared once: what a snapshot stores, what is charged, and what goes back."""

import numpy as np
import pytest

from edgevlm.runtime.stateful import Stateful, bytes_of


class Part(Stateful):
    state_fields = ("_array",)

    def __init__(self, size=3):
        self._array = np.arange(size, dtype=np.float32)


class Whole(Stateful):
    state_fields = ("grows", "fixed", "_by_layer", "parts", "turns", "said", "on", "later", "rows")

    def __init__(self):
        self.grows, self.fixed = np.zeros(0, np.int64), np.zeros((2, 2))
        self._by_layer = {}
        self.parts = {5: Part(), "deep": Part()}
        self.turns, self.said, self.on, self.later = 0, "", False, None
        self.rows = []
        self.scratch = np.zeros(1000)


def changed():
    whole = Whole()
    whole.grows, whole.fixed[1, 1] = np.arange(4), 7
    whole._by_layer = {0: np.zeros(2, np.int32), 11: np.ones(1, np.int32)}
    whole.parts[5]._array[:] = 9
    whole.turns, whole.said, whole.on, whole.later = 12, "how many? two \u00e9", True, np.ones((1, 2))
    whole.rows = [np.full(index, index) for index in range(12)]
    return whole


def test_state_goes_back_whatever_a_field_holds():
    whole, again = changed(), Whole()
    state = dict(whole.state())
    assert {"fixed", "by_layer.11", "parts.5.array", "parts.deep.array", "rows.11"} < state.keys()
    assert all(isinstance(array, np.ndarray) and array.dtype.kind in "biuf" for array in state.values())
    assert not any("scratch" in name for name in state)
    for array in state.values():
        array.flags.writeable = False
    again.restore(state)
    assert (again.turns, again.said, again.on) == (12, "how many? two \u00e9", True)
    assert (type(again.turns), type(again.on)) == (int, bool)
    assert again.state().keys() == state.keys()
    for name, array in again.state().items():
        np.testing.assert_array_equal(array, state[name], name)
    again.fixed += 1
    again.parts[5]._array += 1
    assert (state["fixed"][1, 1], state["parts.5.array"][0]) == (7, 9), "what was given is copied"


def test_arrays_of_the_fields_are_charged_and_nothing_else():
    assert bytes_of(Whole()) == 4 * 8 + 2 * 12
    assert bytes_of(changed()) == 4 * 8 + 4 * 8 + 3 * 4 + 2 * 12 + 2 * 8 + 66 * 8


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"fixed": None}, KeyError, "fixed"),
        ({"fixed": np.zeros((2, 3))}, ValueError, r"fixed is float64 \[2, 3\], not float64 \[2, 2\]"),
        ({"grows": np.zeros(3, np.int32)}, ValueError, "grows is int32"),
        ({"parts.5.array": np.zeros(4, np.float32)}, ValueError, r"array is float32 \[4\]"),
        ({"other": np.zeros(1)}, ValueError, "Whole stores only by_layer, .* but the state has other"),
        ({"turns": np.zeros(2)}, ValueError, "size 1"),
    ],
)
def test_what_is_no_such_state_is_refused(change, error, says):
    state = {name: array for name, array in (dict(changed().state()) | change).items() if array is not None}
    with pytest.raises(error, match=says):
        Whole().restore(state)
