"""The figure has a cell a layer and frame, the newest at the right, brighter where there is more attention."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from edgevlm.calib.figure import LEFT, WIDE, check_plot, draw, plot
from edgevlm.errors import UserError

AGES = tuple(tuple(share / 55 for share in range(10, 0, -1)) if layer == 0 else (0.1,) * 10 for layer in range(5))


def test_cells_stand_where_they_should(made_up):
    boxes = draw(made_up(ages=AGES)).boxes
    assert len(boxes) == 50
    bottom = max(box.y for box in boxes)
    row = sorted((box for box in boxes if box.y == bottom), key=lambda box: box.x)
    brightness = [sum(box.colour) for box in row]
    assert brightness == sorted(brightness), "layer 0 at the bottom, its newest frame at the right and brightest"
    assert brightness[0] < brightness[-1]
    assert (row[0].x, row[-1].x + row[-1].width) == (LEFT, pytest.approx(LEFT + WIDE))
    assert len({box.colour for box in boxes if box.y == min(box.y for box in boxes)}) == 1, "an even layer is of one colour"


def test_an_svg_is_xml_with_all_of_it(made_up, tmp_path):
    plot(made_up(ages=AGES, clips=("<&>.mp4",)), tmp_path / "age.svg")
    root = ET.parse(tmp_path / "age.svg").getroot()
    kinds = [element.tag.split("}")[1] for element in root]
    assert kinds.count("rect") == 51
    assert any("<&>.mp4" in (element.text or "") for element in root)


def test_a_png_is_the_same_picture(made_up, tmp_path):
    cv2 = pytest.importorskip("cv2")
    drawing = draw(made_up(ages=AGES))
    plot(made_up(ages=AGES), tmp_path / "age.png")
    image = cv2.imread(str(tmp_path / "age.png"))[:, :, ::-1]
    assert image.shape == (drawing.height, drawing.width, 3)
    for box in drawing.boxes:
        assert tuple(image[int(box.y + box.height / 2), int(box.x + box.width / 2)]) == box.colour


def test_nothing_but_even_attention_can_be_drawn(made_up):
    assert np.isfinite([box.x for box in draw(made_up()).boxes]).all()


def test_what_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(UserError, match=r"ends in .svg or .png"):
        check_plot(tmp_path / "age.pdf")
    with pytest.raises(UserError, match="there is no folder"):
        check_plot(tmp_path / "no" / "age.svg")
