"""Which graphs a TensorRT version takes."""

from __future__ import annotations

import pytest

from edgevlm.errors import UserError
from edgevlm.runtime.graph_profiles import PROFILES, profile_for


@pytest.mark.parametrize(
    ("tensorrt", "profile"),
    [
        (None, "onnxruntime"),
        ("10.3", "tensorrt-10.3"),
        ("10.3.0.30", "tensorrt-10.3"),
        ("10.14", "tensorrt-10.3"),
        ("10.15.1", "tensorrt-10.15"),
        ("10.16", "tensorrt-10.15"),
        ("11.0", "tensorrt-10.15"),
    ],
)
def test_the_newest_profile_that_a_version_takes(tensorrt: str | None, profile: str) -> None:
    assert profile_for(tensorrt) == profile
    assert profile in PROFILES


def test_an_old_tensorrt_is_refused() -> None:
    with pytest.raises(UserError, match=r"^TensorRT 8\.6 is too old: .*; upgrade JetPack$"):
        profile_for("8.6")
