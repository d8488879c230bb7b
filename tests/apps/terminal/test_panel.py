"""What the terminal shows of a memory, at any size, and how pictures are written."""

import numpy as np
import pytest

from edgevlm.apps.run.comparison import ComparisonView, Lane
from edgevlm.apps.run.memory_view import MemoryView, StripView
from edgevlm.apps.terminal.panel import comparison_panel, draw, watching_panel
from edgevlm.calib.demo.scene import Fact

IMAGE = np.zeros((56, 56, 3), np.uint8)
FACTS = tuple(Fact(f"red {shape}", f"where was the red {shape}?", "top left", 3.0) for shape in ("star", "heart", "ring"))


def memory(tokens=512, watched=64, frames=range(32, 64)):
    frames = np.array(frames)
    return MemoryView("sliding-window", tokens, 512, watched, frames, np.ones((len(frames), 1, 1)), ((0, 0),))


def lane(name, right, stopped_s=None):
    answers = {fact.question: "top left" if i < right else "no" for i, fact in enumerate(FACTS)}
    return Lane(name, None, memory(), stopped_s, answers)


VIEW = ComparisonView((lane("full KV", 1, 64.0), lane("auto: last-seen", 3), lane("sliding window", 0)), FACTS)


def shown(panel):
    return ["".join(text for _, text in line) for line in panel.lines]


@pytest.mark.parametrize("columns", [40, 80, 99, 120])
@pytest.mark.parametrize("lines", [3, 8, 9, 14])
@pytest.mark.parametrize("pictures", [True, False])
def test_a_comparison_fits_and_says_what_each_memory_knows(columns, lines, pictures):
    panel = comparison_panel(VIEW, IMAGE, columns - 1, lines, pictures)
    rows = shown(panel)
    assert len(rows) <= lines
    assert max(map(len, rows)) < columns
    text = "\n".join(rows)
    assert all(knows in text for knows in ("knows 1 of 3", "knows 3 of 3", "knows 0 of 3"))
    assert "1:04" in text, "the full cache is full"
    assert pictures or not panel.images
    for placed in panel.images:
        assert placed.x + placed.columns < columns
        assert placed.y + placed.rows <= len(rows)
        for row in rows[placed.y : placed.y + placed.rows]:
            assert row[placed.x : placed.x + placed.columns].strip() == "", "blank where the picture goes"


@pytest.mark.parametrize(("columns", "lines"), [(39, 6), (79, 14), (119, 14), (119, 3)])
def test_a_camera_shows_frames_held_and_forgotten(columns, lines):
    picture = np.zeros((36, 48, 3), np.uint8)
    held, forgotten = tuple((float(i), i) for i in range(60)), ((9.0, 60),)
    panel = watching_panel(StripView(memory(256), held, forgotten, lambda frame: picture), IMAGE, columns, lines)
    rows = shown(panel)
    assert len(rows) <= lines
    assert max(map(len, rows)) <= columns
    assert "256" in rows[0]
    assert ("just forgotten" in "\n".join(rows)) == (columns > 60 and lines > 9)


def test_half_blocks_have_the_pixels_colours():
    image = np.array([[[255, 0, 0]], [[0, 0, 255]]], np.uint8)
    assert draw(image, 1, 1, True) == ["\x1b[38;2;255;0;0;48;2;0;0;255m▀\x1b[0m"]
    assert draw(image, 1, 1, False) == ["\x1b[38;5;196;48;5;21m▀\x1b[0m"]
