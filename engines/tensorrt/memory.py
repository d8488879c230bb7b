"""Device memory by name, which stays where it is until a call needs more of it."""

from __future__ import annotations

from contextlib import suppress

from edgevlm.runtime.cuda.driver import Driver, Memory


class Blocks:
    """Blocks of one device. What is freed must not be in use by work that is still to be done."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._held: dict[str, Memory] = {}

    def at(self, name: str, nbytes: int) -> int:
        """The address of at least ``nbytes`` bytes, not cleared; another one when that is more than ever before."""
        held = self._held.get(name)
        if held is None or held.nbytes < nbytes:
            if held is not None:
                self._driver.free(self._held.pop(name))
            held = self._held[name] = self._driver.allocate(max(nbytes, 1), mapped=False)
        return held.address

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._held.values())

    def close(self) -> None:
        """Free all of them."""
        while self._held:
            self._driver.free(self._held.popitem()[1])

    def __del__(self) -> None:
        with suppress(Exception):  # the driver may have gone first, at the interpreter's end
            self.close()
