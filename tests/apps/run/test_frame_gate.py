"""The frame gate, against a reference pixel by pixel; what drifts, what flickers, and what waits in the slot."""

import numpy as np
import pytest

from edgevlm.apps.run.frame_preparation import (
    CELLS,
    SAMPLES,
    FramePreparation,
    Gate,
    GateRule,
    cell_means,
)
from edgevlm.apps.sources.base import Frame
from edgevlm.calib.demo.world import World
from edgevlm.runtime.session import Session


def cells_slowly(image):
    """float64: the mean of each cell's picked pixels, one after the other."""
    height, width = image.shape[:2]
    rows, columns = min(CELLS, height), min(CELLS, width)
    down, across = (max(1, min(SAMPLES, size // cells)) for size, cells in ((height, rows), (width, columns)))
    means = np.zeros((rows, columns, 3))
    for row in range(rows):
        for column in range(columns):
            picked = []
            for i in range(down):
                for j in range(across):
                    y = int((row * down + i + 0.5) * height / (rows * down))
                    x = int((column * across + j + 0.5) * width / (columns * across))
                    picked.append(image[y, x].astype(float))
            means[row, column] = np.mean(picked, axis=0)
    return means


def gate_slowly(images, threshold, every=None):
    """Which frames pass, by the words of the rule."""
    passed, last, still = [], None, 0
    for image in images:
        cells = cells_slowly(image)
        near = last is not None and cells.shape == last.shape and np.abs(cells - last).max() <= threshold
        still = still + 1 if near else 0
        through = not near or (every is not None and still % every == 0)
        last = cells if through else last
        passed.append(through)
    return passed


def noisy(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def plain(level, shape=(64, 64)):
    return np.full((*shape, 3), level, np.uint8)


@pytest.mark.parametrize("shape", [(480, 640), (256, 256), (100, 33), (32, 32), (5, 7), (1, 1), (1080, 50)], ids=str)
def test_cells_are_the_means_of_their_pixels(shape):
    image = noisy(*shape)
    np.testing.assert_allclose(cell_means(image, min(CELLS, shape[0]), min(CELLS, shape[1])), cells_slowly(image), atol=1e-3)


@pytest.mark.parametrize("rule", [GateRule("skip", 6), GateRule("thin", 6, 3), GateRule("skip", 0)], ids=str)
def test_a_stream_is_gated_as_the_rule_says(rule):
    random = np.random.default_rng(1)
    base, images = noisy(40, 50), []
    for _ in range(60):
        if random.random() < 0.2:
            base = np.roll(base, int(random.integers(0, 3)), axis=1)
        images.append((base // 2 + random.integers(0, 8)).astype(np.uint8))
    gate = Gate(rule)
    passed = [gate(image) for image in images]
    assert passed == gate_slowly(images, rule.threshold, rule.every if rule.name == "thin" else None)
    assert gate.gated == passed.count(False)
    assert 0 < gate.gated < 60


def test_a_gate_before_a_memory_of_changes_takes_nothing_from_it(tmp_path):
    """Also where a stream goes on from a snapshot: a frame that is held back would have appended nothing."""
    world, images = World(3), []
    for number in range(48):
        images.append(world.step() if number % 3 == 0 else images[-1])

    def watched(images, gate, state=None):
        model = {"policy": "last-seen", "budget": 64, "chunk": 4, "append": "changed:tau=0.999"}
        with Session.open("demo", **model, state=state) as session:
            for image in images:
                if gate(image):
                    session.watch(image)
            answer = session.ask("how many objects are there now?")
            answer.wait()
            return answer.token_ids, [np.array(session.cache.key(layer)) for layer in range(4)], session.stats.memory

    tokens, keys, memory = watched(images, lambda image: True)
    gate = Gate(GateRule("skip", 0))
    watched(images[:24], gate, tmp_path)
    gated_tokens, gated_keys, gated_memory = watched(images[24:], gate, tmp_path)
    assert gate.gated >= 32
    assert gated_tokens == tokens
    assert [of.shape for of in gated_keys] == [of.shape for of in keys]
    assert gated_memory.tokens_appended == memory.tokens_appended
    assert gated_memory.tokens_seen < memory.tokens_seen


def test_only_frames_that_pass_are_prepared():
    prepared = []
    finish = FramePreparation(lambda image: prepared.append(int(image[0, 0, 0])), Gate(GateRule("skip", 4)))
    frames = [finish(Frame(plain(level), time_s)) for time_s, level in enumerate((10, 11, 50, 51, 52))]
    assert prepared == [10, 50]
    assert [frame.still for frame in frames] == [False, True, False, True, True]
    assert [frame.gated for frame in frames] == [0, 1, 1, 2, 3]
