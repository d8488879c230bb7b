"""`edgevlm bench stream changed`: clips that change as they say, and whole beside changed on the same frames."""

import json
from itertools import islice

import numpy as np
from typer.testing import CliRunner

from edgevlm.bench.clips import CLIPS, open_clip
from edgevlm.cli import app


def changed_blocks(images, block=20, level=12):
    """Of the blocks of each frame, the fraction whose mean colour is another than in the frame before."""
    pixels = np.stack(images).astype(np.float32)
    count, height, width, _ = pixels.shape
    means = pixels.reshape(count, height // block, block, width // block, block, 3).mean((2, 4))
    return float((np.abs(np.diff(means, axis=0)) > level).any(-1).mean())


def test_clips_change_as_much_as_they_say_and_are_the_same_every_time():
    shares = {}
    for name in CLIPS:
        images = list(islice(open_clip(name), 8))
        assert all(np.array_equal(*pair) for pair in zip(images, islice(open_clip(name), 8), strict=True))
        assert {(image.shape, image.dtype.name) for image in images} == {((480, 640, 3), "uint8")}
        shares[name] = changed_blocks(images)
    assert 0 < shares["room"] < 0.02 < shares["street"] < 0.2 < 0.4 < shares["moving"]


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "stream", *map(str, arguments)], catch_exceptions=False)


def test_each_way_is_a_line_beside_the_first():
    done = bench(
        "changed", "--append", "all,changed:tau=0.9,refresh=40", "--encode", "all", "--model", "demo", "--clips", "room,moving",
        "--frames", 25, "--chunk", 8, "--threads", 1, "--json",
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["clip"], line["append"], line["encode"]) for line in lines] == [
        (clip, way, "all") for clip in ("room", "moving") for way in ("all", "changed:tau=0.9,refresh=40")
    ]
    for line in lines:
        assert (line["bench"], line["model"], line["frames"], line["chunk"]) == ("stream-changed", "demo", 16, 8)
        assert line["low"] <= line["fps_ratio"] <= line["high"]
        assert (line["encoded"], line["tower_mb"]) == (1.0, 0.0)
    whole, room, _, moving = lines
    assert (whole["appended"], whole["fps_ratio"], whole["ceiling"]) == (1.0, 1.0, 1.0)
    assert room["appended"] < 0.2 < moving["appended"]
    assert room["ceiling"] > 1
