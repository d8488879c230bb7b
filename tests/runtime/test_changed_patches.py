"""Which patches of a frame are encoded again, and when the whole frame is."""

from __future__ import annotations

import pytest

from edgevlm.errors import UserError
from edgevlm.runtime.changed_patches import EncodeChanged, parse_encode


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("chnaged", "did you mean 'changed'"),
        ("all:interval=3", "all has no settings"),
        ("changed:interval=0", "1 or more frames"),
        ("changed:threshold=256", "0 to 255 levels"),
        ("changed:treshold=3", "give changed:interval"),
        ("changed:interval=1.5", "give changed:interval"),
    ],
)
def test_wrong_settings_are_named(text, says):
    with pytest.raises(UserError, match=says):
        parse_encode(text)


def test_settings_that_are_left_out_are_presets():
    assert parse_encode("auto").name == "auto"
    assert parse_encode("changed:threshold=2.5").changed == EncodeChanged(threshold=2.5)
    assert parse_encode("changed:interval=9").changed == EncodeChanged(9)
