"""Your own camera: `edgevlm run --camera ./examples/camera.py:bars --ask "how many objects are there now?"`.

In a package, an entry point lets you give `--camera bars` or `--camera bars://64`:

[project.entry-points."edgevlm.sources"]
bars = "my_package.camera:bars"
"""

from collections.abc import Iterator

import numpy as np


def bars(target: str, fps: float) -> Iterator[tuple[float, np.ndarray]]:
    """Yield frames with a moving bright bar: 32, or as many as `target` asks for (`...:bars:64`)."""
    for number in range(int(target or 32)):
        image = np.full((56, 56, 3), 40, np.uint8)  # RGB
        image[:, number % 56] = 255
        yield number / fps, image  # or only the image; frames then come at --fps
