"""Pictures, as files hold them, to frames."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgevlm.apps.sources.capture import load_cv2


def decode_picture(data: bytes) -> NDArray[np.uint8] | None:
    """A picture of any kind that OpenCV reads, uint8 RGB ``[H, W, 3]``, turned as its EXIF says; None where it is damaged."""
    cv2 = load_cv2()
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    return None if image is None else np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB))
