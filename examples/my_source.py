"""A source of your own: `edgevlm run --camera ./examples/my_source.py:Sweep --ask "how many objects are there now?"`.

A package offers it by name instead, with an entry point of the group "edgevlm.sources" in its pyproject.toml.
"""

import numpy as np

from edgevlm.apps.sources import Frame, Source


class Sweep(Source):
    """A bright bar that sweeps over 32 frames; `...:Sweep:64` makes it 64."""

    name = "sweep"

    def __init__(self, target, options):
        self.number, self.last, self.fps = 0, int(target or 32), options.fps

    def read(self):
        """The next frame, RGB, with its time in seconds; None at the end."""
        if self.number == self.last:
            return None
        image = np.full((56, 56, 3), 40, np.uint8)
        image[:, self.number % 56] = 255
        self.number += 1
        return Frame(image, self.number / self.fps)
