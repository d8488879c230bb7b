"""A folder of pictures as a stream, against Pillow."""

import numpy as np
import pytest
from PIL import Image

from edgevlm.apps.sources.base import State
from edgevlm.apps.sources.folder import FolderSource, natural
from edgevlm.errors import SourceError


def picture(level, size=(12, 10)):
    return Image.fromarray(np.full((size[1], size[0], 3), (level, level // 2, 255 - level), np.uint8))


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


def test_numbers_of_any_length_have_their_place():
    names = ["a1", "a" + "9" * 30, "a10", "b", "a", "10", "9", "a1b10", "a1b9", "²"]
    assert sorted(names, key=natural) == ["9", "10", "a", "a1", "a1b9", "a1b10", "a10", "a" + "9" * 30, "b", "²"]


def test_a_rate_of_its_own_is_sampled_from(tmp_path):
    for number in range(10):
        picture(number).save(tmp_path / f"{number}.png")
    frames = list(FolderSource(tmp_path, fps=2, rate=4))
    assert [frame.time_s for frame in frames] == [0, 0.5, 1.0, 1.5, 2.0]
    assert [frame.image[0, 0, 0] for frame in frames] == [0, 2, 4, 6, 8]


def test_a_jpeg_is_turned_as_its_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise
    picture(90, (12, 10)).save(tmp_path / "turned.jpg", exif=exif)
    (frame,) = FolderSource(tmp_path, fps=2)
    assert frame.image.shape == (12, 10, 3)


def test_damaged_pictures_are_counted_and_passed_over(tmp_path):
    for number in range(4):
        picture(50).save(tmp_path / f"{number}.png")
    whole = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "2.png").write_bytes(b"")
    (tmp_path / "4.png").symlink_to(tmp_path / "nowhere")
    source = FolderSource(tmp_path, fps=2)
    assert [frame.time_s for frame in source] == [0, 1.5]
    assert source.drops == {"corrupt": 2}
    assert source.state is State.ENDED


@pytest.mark.parametrize(
    ("names", "says"),
    [([], "is a folder without pictures"), (["a.txt"], "is a folder without pictures"), (["a.png"], "none of its 1")],
)
def test_a_folder_without_pictures_is_one_line(tmp_path, names, says):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(SourceError, match=says) as caught:
        list(FolderSource(tmp_path, fps=2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("side", [9_000, 60_000])
def test_a_picture_of_too_many_pixels_is_passed_over(tmp_path, side):
    data = b"\0" * (side**2 if side < 10_000 else 100)
    (tmp_path / "huge.pgm").write_bytes(b"P5\n%d %d\n255\n" % (side, side) + data)
    picture(40).save(tmp_path / "small.png")
    source = FolderSource(tmp_path, fps=2)
    assert [frame.image.shape for frame in source] == [(10, 12, 3)]
    assert source.drops["corrupt"] == 1
