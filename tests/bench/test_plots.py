"""Charts are checked before long work."""

import sys

import pytest

from edgevlm.bench.plots import check_plot
from edgevlm.errors import UserError


def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"ends in .svg or .png"):
        check_plot(tmp_path / "age.pdf")
    with pytest.raises(UserError, match="there is no folder"):
        check_plot(tmp_path / "no" / "age.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install"):
        check_plot(tmp_path / "age.svg")
