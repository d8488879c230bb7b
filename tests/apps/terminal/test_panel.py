"""What the terminal shows of a memory, at any size, and how pictures are written."""

import numpy as np
import pytest

from edgevlm.apps.run.memory_view import LaneView, MemoryView
from edgevlm.apps.terminal.panel import draw, draw_plain, make_panel, whole_fields, wrap

IMAGE = np.zeros((56, 56, 3), np.uint8)


def memory(tokens=512, watched=64, frames=range(32, 64)):
    frames = np.array(frames)
    return MemoryView("sliding-window", tokens, 512, watched, frames, np.ones((len(frames), 1, 1)), ((0, 0),))


COMPARED = [
    LaneView("full KV", memory(), 64.0, 1, 3),
    LaneView("auto: last-seen", memory(), None, 3, 3),
    LaneView("sliding window", memory(), None, 0, 3),
]
ALONE = [LaneView("last-seen", memory(256))]


@pytest.mark.parametrize(("view", "says"), [(COMPARED, ["knows 1", "knows 3", "knows 0 of 3", "full 1:04"]), (ALONE, ["256"])])
@pytest.mark.parametrize("columns", [40, 80, 99, 120])
@pytest.mark.parametrize("lines", [3, 8, 14])
@pytest.mark.parametrize("image", [IMAGE, None])
def test_a_panel_fits_and_says_what_each_memory_knows(view, says, columns, lines, image):
    panel = make_panel(view, image, columns - 1, lines)
    rows = ["".join(text for _, text in line) for line in panel.lines]
    assert len(rows) <= lines
    assert max(map(len, rows)) < columns
    assert all(words in "\n".join(rows) for words in says)
    assert (panel.rows > 0) == (image is not None and columns >= 80 and lines >= 8)
    for row in rows[: panel.rows]:
        assert row[: panel.columns].strip() == "", "blank where the picture goes"


def test_lines_break_between_words_and_fields_are_left_out_whole():
    lines = wrap([("dim", "[0:05] "), ("", "is it raining  no"), ("x", "  seen 2 s ago")], 14)
    assert ["".join(text for _, text in line) for line in lines] == ["[0:05] is it", "raining  no", "seen 2 s ago"]
    assert [whole_fields("running · 12 frames · 8 fps", size) for size in (30, 26, 19, 7)] == [
        "running · 12 frames · 8 fps", "running · 12 frames", "running · 12 frames", "running",
    ]  # fmt: skip


def test_without_colours_an_object_differs_from_the_background():
    image = np.full((4, 4, 3), 90, np.uint8)
    image[:2, :2] = 200, 0, 0
    assert draw_plain(image, 2, 2) == ["█·", "··"]


def test_half_blocks_have_the_pixels_colours():
    image = np.array([[[255, 0, 0]], [[0, 0, 255]]], np.uint8)
    assert draw(image, 1, 1, True) == ["\x1b[38;2;255;0;0;48;2;0;0;255m▀\x1b[0m"]
    assert draw(image, 1, 1, False) == ["\x1b[38;5;196;48;5;21m▀\x1b[0m"]
