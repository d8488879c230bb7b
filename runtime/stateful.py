"""Base class for state that an object keeps between calls, declared once for snapshots, byte accounting and stats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

State = Mapping[str, NDArray]
"""Arrays by dotted name, such as ``part.part.field``."""


class Stateful:
    """A base class for objects that keep arrays between calls, in the attributes that ``state_fields`` names.

    A field holds an array, a number, a string, None (no value yet), another Stateful, or a list or dict of these. A dict's keys
    are int or str. Snapshots store only declared fields, and only arrays in declared fields count as the policy's memory::

        class Counts(Stateful):
            state_fields = ("seen", "_mass")

            def __init__(self) -> None:
                self.seen = 0
                self._mass: dict[int, Float32] = {}

    Names in a snapshot have no leading underscores: ``_mass[3]`` is stored as ``mass.3``.
    """

    state_fields: ClassVar[tuple[str, ...]] = ()
    _scratch_fields: ClassVar[tuple[str, ...]] = ()  # fields that snapshots omit, such as arrays used within one call

    def state(self) -> State:
        """Return views of the fields as arrays, keyed by name, for a snapshot."""
        return {name: array for field in self.state_fields for name, array in _arrays(field.lstrip("_"), getattr(self, field))}

    def restore(self, state: State) -> None:
        """Restore the fields from what :meth:`state` returned for an object with the same settings.

        Raises KeyError for a missing field, and ValueError for an undeclared field or a wrong type or shape. A field that holds
        an empty array accepts an array of any shape.
        """
        known = {field.lstrip("_") for field in self.state_fields}
        if unknown := [name for name in state if name.partition(".")[0] not in known]:
            keeps = f"only {', '.join(sorted(known))}" if known else "nothing"
            raise ValueError(
                f"{getattr(self, 'name', type(self).__name__)} stores {keeps}, but the state has {', '.join(unknown)}"
            )
        for field in self.state_fields:
            setattr(self, field, _restored(field.lstrip("_"), getattr(self, field), state))


def bytes_of(value: object) -> int:
    """Return the size in bytes of all arrays in a field's value. Numbers and strings count as 0 bytes."""
    if isinstance(value, Stateful):
        return sum(bytes_of(getattr(value, name)) for name in value.state_fields)
    if isinstance(value, Mapping | list | tuple):
        return sum(bytes_of(part) for _, part in _items(value))
    return value.nbytes if isinstance(value, np.ndarray) else 0


def undeclared(of: Stateful) -> list[str]:
    """Return the names of undeclared attributes that hold arrays, which the budget and snapshots therefore leave out."""
    named = (*of.state_fields, *of._scratch_fields)
    return [name for name, value in vars(of).items() if name not in named and bytes_of(value)]


def add_prefix(part: str, state: State) -> dict[str, NDArray]:
    """Add ``part.`` in front of each name of a state."""
    return {f"{part}.{name}": array for name, array in state.items()}


def strip_prefix(part: str, state: State) -> dict[str, NDArray]:
    """Return the entries whose names start with ``part.``, with that prefix removed from the names."""
    return {name.removeprefix(f"{part}."): array for name, array in state.items() if name.startswith(f"{part}.")}


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    yield from value.items() if isinstance(value, Mapping) else enumerate(value)


def _arrays(name: str, value: object) -> Iterator[tuple[str, NDArray]]:
    if isinstance(value, Stateful):
        yield from add_prefix(name, value.state()).items()
    elif isinstance(value, Mapping | list):
        for key, part in _items(value):
            yield from _arrays(f"{name}.{key}", part)
    elif value is not None:
        yield name, np.frombuffer(value.encode(), np.uint8) if isinstance(value, str) else np.asarray(value)


def _restored(name: str, value: Any, state: State) -> object:
    below = strip_prefix(name, state)
    if isinstance(value, Stateful):
        value.restore(below)
        return value
    if isinstance(value, Mapping | list):
        if any(isinstance(part, Stateful) for _, part in _items(value)):
            for key, part in _items(value):
                _restored(str(key), part, below)
            return value
        if isinstance(value, Mapping):
            return {int(key) if key.isdecimal() else key: array.copy() for key, array in below.items()}
        return [below[str(index)].copy() for index in range(len(below))]
    if value is None:
        return state[name].copy() if name in state else None
    array = state[name]
    if isinstance(value, str):
        return array.tobytes().decode()
    if not isinstance(value, np.ndarray):
        return type(value)(array.item())
    if array.dtype != value.dtype or array.ndim != value.ndim or (value.size and array.shape != value.shape):
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, not {value.dtype} {list(value.shape)}")
    return array.copy()
