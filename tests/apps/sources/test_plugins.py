"""A kind of source from outside the package takes one file: by its path, or by a name that an installed package gives it."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgevlm.apps.sources import SourceOptions, comes_to_an_end, kind_of, open_source
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.runtime.plugins import names

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_source.py"
COUNT = "how many objects are there now?"


def test_the_example_is_watched_from_its_file():
    done = CliRunner().invoke(app, ["run", "--camera", f"{EXAMPLE}:Sweep:24", "--json", "--ask", COUNT], catch_exceptions=False)
    answer, summary = (line for line in map(json.loads, done.stdout.splitlines()) if line["event"] != "stats")
    assert (answer["question"], answer["time_s"], summary["frames"]) == (COUNT, 12.0, 24)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example as a package that was installed: its one file, and what pip writes beside it."""
    shutil.copy(EXAMPLE, tmp_path / "sweep_camera.py")
    about = tmp_path / "sweep_camera-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sweep-camera\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[edgevlm.sources]\nsweep = sweep_camera:Sweep\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_package_gives_a_kind_of_camera_its_name(installed):
    assert "sweep" in names("sources")
    for text, frames in (("sweep", 32), ("sweep://5", 5)):
        assert comes_to_an_end(text, None)
        assert len(list(open_source(text, options=SourceOptions(fps=4)))) == frames


def test_own_kinds_are_not_names_to_give():
    assert kind_of("http://host/sweep", None)[0] == "network"
    with pytest.raises(UserError, match="there is nothing there"):
        kind_of("usb", None)
    with pytest.raises(UserError, match="did you mean 'Sweep'"):
        open_source(f"{EXAMPLE}:Sweeps")
