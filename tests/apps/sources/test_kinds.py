"""Kinds of source through the command: which is taken for what, and what they share."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from edgevlm import Session
from edgevlm.apps.doctor.cameras import list_cameras
from edgevlm.apps.sources import SourceOptions, comes_to_an_end, open_source
from edgevlm.apps.sources.base import State
from edgevlm.apps.sources.recordings import FolderSource
from edgevlm.cli import app
from edgevlm.errors import SourceError
from edgevlm.runtime.plugins import names


def test_what_is_prepared_ahead_is_what_the_session_prepares(tmp_path):
    for number in range(12):
        Image.fromarray(np.full((40, 60, 3), 255 if number in (5, 6, 7) else 90, np.uint8)).save(tmp_path / f"{number}.png")
    memories = []
    for ahead in (False, True):
        source = open_source(None, str(tmp_path))
        with Session.open("demo", budget=64) as session:
            if ahead:
                source.prepare = session.prepare
            for frame in source:
                assert (frame.pixels is not None) is ahead
                session.watch(frame.pixels if ahead else frame.image, frame.time_s)
            session.flush()
            memories.append([np.array(session.cache.key(layer)) for layer in range(2)])
    for plain, prepared in zip(*memories, strict=True):
        np.testing.assert_array_equal(plain, prepared)


EXAMPLE = Path(__file__).parents[3] / "examples" / "camera.py"
COUNT = "how many objects are there now?"


def test_the_example_is_watched_from_its_file():
    done = CliRunner().invoke(app, ["run", "--camera", f"{EXAMPLE}:bars:24", "--json", "--ask", COUNT], catch_exceptions=False)
    answer, summary = (line for line in map(json.loads, done.stdout.splitlines()) if line["event"] != "stats")
    assert (answer["question"], answer["time_s"], summary["frames"]) == (COUNT, 11.5, 24)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example as a package that was installed: its one file, and what pip writes beside it."""
    shutil.copy(EXAMPLE, tmp_path / "bars_camera.py")
    about = tmp_path / "bars_camera-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bars-camera\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[edgevlm.sources]\nbars = bars_camera:bars\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_package_gives_a_kind_of_camera_its_name(installed):
    assert "bars" in names("sources")
    for text, frames in (("bars", 32), ("bars://5", 5)):
        assert comes_to_an_end(text, None)
        assert len(list(open_source(text, options=SourceOptions(fps=4)))) == frames
    assert any(line.startswith("bars ") for line in list_cameras(False))
    with pytest.raises(SourceError, match=r"nosuch: not found; .* or \./file\.py:Name, bars://$"):
        open_source("nosuch")
    with pytest.raises(SourceError, match="only edgevlm serve supports NAME=SOURCE; use --camera demo"):
        open_source("Front Door=demo")


def picture(level):
    return Image.fromarray(np.full((10, 12, 3), (level, level // 2, 255 - level), np.uint8))


def test_pictures_come_in_natural_order_as_pillow_reads_them(tmp_path):
    names = ["img10.png", "img2.PNG", "IMG1.bmp", "img2b.tiff", "img02.ppm"]
    for level, name in enumerate(names):
        picture(40 * level).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "img3.png").mkdir()
    frames = list(FolderSource(tmp_path, fps=4))
    assert [frame.time_s for frame in frames] == [0, 0.25, 0.5, 0.75, 1.0]
    for frame, name in zip(frames, ["IMG1.bmp", "img02.ppm", "img2.PNG", "img2b.tiff", "img10.png"], strict=True):
        np.testing.assert_array_equal(frame.image, np.asarray(Image.open(tmp_path / name)))


def test_damaged_and_gigantic_pictures_are_counted_and_passed_over_and_others_turned_as_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise
    picture(90).save(tmp_path / "0.jpg", exif=exif)
    picture(50).save(tmp_path / "1.png")
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:50])
    (tmp_path / "2.png").write_bytes(b"")
    for number, side in enumerate((9_000, 60_000), 3):
        data = bytes(side**2 if side < 10_000 else 100)
        (tmp_path / f"{number}.pgm").write_bytes(b"P5\n%d %d\n255\n" % (side, side) + data)
    picture(50).save(tmp_path / "5.png")
    (tmp_path / "6.png").symlink_to(tmp_path / "nowhere")
    source = FolderSource(tmp_path, fps=2)
    assert [(frame.time_s, frame.image.shape) for frame in source] == [(0, (12, 10, 3)), (2.5, (10, 12, 3))]
    assert source.drops == {"corrupt": 4}
    assert source.state is State.ENDED


def test_sixteen_bits_are_scaled_and_transparency_is_white(tmp_path):
    """A thermal camera's picture, half as bright as can be, in each file that holds it; and a logo."""
    grey = np.full((8, 10), 0x8000, np.uint16)
    for kind in ("png", "tiff"):
        Image.fromarray(grey).save(tmp_path / f"grey.{kind}")
    (tmp_path / "grey.pgm").write_bytes(b"P5 10 8 65535\n" + grey.astype(">u2").tobytes())
    for name, color in (("LA", (0, 128)), ("RGBA", (0, 0, 0, 128))):
        Image.new(name, (10, 8), color).save(tmp_path / f"half{name}.png")
    palette = Image.new("P", (10, 8), 3)
    palette.save(tmp_path / "clear.gif", transparency=3)
    frames = list(FolderSource(tmp_path, fps=1))
    assert [(frame.image.shape, int(frame.image.mean())) for frame in frames] == [
        ((8, 10, 3), 255), *[((8, 10, 3), 128)] * 3, *[((8, 10, 3), 127)] * 2
    ]  # fmt: skip
