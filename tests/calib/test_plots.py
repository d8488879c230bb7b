"""Charts are checked before long work, and written as SVG or PNG."""

import sys
import xml.etree.ElementTree as ET

import pytest

from edgevlm.calib.plots import check_plot, plot_ages
from edgevlm.errors import UserError

AGES = tuple(tuple(share / 55 for share in range(10, 0, -1)) if layer == 0 else (0.1,) * 10 for layer in range(5))


@pytest.mark.parametrize("ages", [AGES, ((0.1,) * 10,) * 5], ids=["skewed", "even"])
def test_ages_are_drawn_as_svg_and_png(made_up, tmp_path, ages):
    for name in ("age.svg", "age.png"):
        plot_ages(made_up(ages=ages, clips=("<$&>.mp4",)), tmp_path / name)
    assert "<$&>.mp4" in "".join(ET.parse(tmp_path / "age.svg").getroot().itertext()) or (tmp_path / "age.svg").stat().st_size
    assert (tmp_path / "age.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"ends in .svg or .png"):
        check_plot(tmp_path / "age.pdf")
    with pytest.raises(UserError, match="there is no folder"):
        check_plot(tmp_path / "no" / "age.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install"):
        check_plot(tmp_path / "age.svg")
