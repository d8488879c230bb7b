"""Which patches of a frame are encoded again, and when the whole frame is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from pictures import frames

from edgevlm.errors import UserError
from edgevlm.runtime import changes, kernels, opening
from edgevlm.runtime.bundle import ChangedTowerSpec, VisionSpec
from edgevlm.runtime.changes import ChangedEncoder, PatchChanges
from edgevlm.runtime.session import Session
from edgevlm.runtime.settings import EncodeChanged

GRID = (12, 12)
SIZE = (168, 168)
VISION = VisionSpec("", SIZE, "stretch", None, "bicubic", 1 / 255, (0.5,) * 3, (0.25,) * 3, 144, GRID, None)


def scene(seed=0, size=(200, 200)):
    """A picture with edges and fine texture, uint8 ``[3, *size]``, values from 20 to 200."""
    rng = np.random.default_rng(seed)
    total = np.full((3, *size), 100.0)
    for cell, swing in ((40, 35), (10, 25), (3, 15)):
        blocks = rng.uniform(-swing, swing, (3, size[0] // cell + 1, size[1] // cell + 1))
        total += blocks.repeat(cell, 1).repeat(cell, 2)[:, : size[0], : size[1]]
    return total.clip(20, 200)


def still(number, top=16, left=16):
    return scene()[:, top : top + SIZE[0], left : left + SIZE[1]]


def mover(number):
    """One patch-sized square that walks to the right, a patch every two frames."""
    picture = still(number)
    left = (7 * number) % (SIZE[1] - 14)
    picture[:, 70:84, left : left + 14] = np.float64([[[230]], [[30]], [[60]]])
    return picture


def noisy(pictures, sigma=2.0):
    rng = np.random.default_rng(7)
    return lambda number: pictures(number) + rng.normal(0, sigma, (3, *SIZE))


def watched(pictures, number=40, settings=EncodeChanged(64), changes=None, vision=VISION):  # noqa: B008
    """The patches encoded of each frame, bool ``[number, *GRID]``."""
    changes = changes or PatchChanges(settings, vision, GRID)
    encoded = []
    for at in range(number):
        levels = np.rint(pictures(at)).clip(0, 255)
        found = changes.compare(((levels / 255 - 0.5) / 0.25).astype(np.float32)[None], SIZE)
        changes.encoded(found)
        encoded.append(found.patches.reshape(GRID))
    return np.array(encoded)


def share(encoded):
    """Of the frames behind the first few, and without those that are whole by the interval."""
    return encoded[6:].mean()


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "neon"])
def test_the_kernel_is_the_mean_of_the_largest_tenth(isa):
    before = kernels.simd()
    try:
        kernels.use_simd(isa)
    except Exception:
        pytest.skip(f"this processor has no {isa}")
    try:
        rng = np.random.default_rng(1)
        for planes, height, width, rows, columns in (
            (3, 384, 384, 27, 27),
            (3, 40, 71, 2, 3),
            (6, 9, 50, 1, 2),
            (1, 3, 5, 3, 5),
        ):
            levels, low, other = rng.integers(0, 256, (3, planes, height, width), dtype=np.uint8)
            high = np.maximum(low, other)
            gain = rng.uniform(0.7, 1.5, rows * columns).astype(np.float32)
            pixels = (levels / 255 - 0.5).astype(np.float32)
            scale, offset = np.full(planes, 255, np.float32), np.full(planes, 127.5, np.float32)
            np.testing.assert_array_equal(kernels.levels(pixels, scale, offset), levels)
            np.testing.assert_array_equal(
                kernels.patch_sums(levels, rows, columns), [patch.sum() for patch in patches(levels, rows, columns)]
            )
            for factor in (None, gain):
                found = kernels.patch_distances(levels, low, high, rows, columns, factor)
                np.testing.assert_allclose(found, distances(levels, low, high, rows, columns, factor), rtol=1e-6)
    finally:
        kernels.use_simd(before)


def patches(levels, rows, columns):
    """Each patch's numbers, int64, one after another."""
    height, width = levels.shape[1] // rows, levels.shape[2] // columns
    for row in range(rows):
        for column in range(columns):
            yield levels[:, row * height :][:, :height, column * width :][..., :width].astype(np.int64)


def distances(levels, low, high, rows, columns, gain):
    """What ``kernels.patch_distances`` gives, slowly."""
    found = []
    parts = (patches(each, rows, columns) for each in (levels, low, high))
    for at, (x, least, most) in enumerate(zip(*parts, strict=True)):
        if gain is not None:
            by = int(np.rint(np.float32(256) * gain[at]))
            least, most = (np.minimum(255, (bound * by + 128) >> 8) for bound in (least, most))
        outside = np.sort(np.maximum(0, np.maximum(least - x, x - most)).ravel())
        found.append(outside[-((len(outside) + 9) // 10) :].mean())
    return np.float32(found)


def test_nothing_is_encoded_of_a_still_picture_but_every_interval():
    encoded = watched(still, 20, EncodeChanged(interval=8))
    whole = encoded.all((1, 2))
    assert np.flatnonzero(whole).tolist() == [0, 8, 16]
    assert not encoded[~whole].any()


def test_a_sensors_noise_is_no_change():
    for sigma in (1.0, 3.0, 8.0):
        assert share(watched(noisy(still, sigma))) < 0.01


@pytest.mark.parametrize("sigma", [0.0, 2.5])
def test_what_moves_is_encoded_where_it_was_and_is(sigma):
    encoded = watched(noisy(mover, sigma))
    for number in range(4, 40):
        for at in (number - 1, number):
            left = (7 * at) % (SIZE[1] - 14) // 14
            assert encoded[number, 5, left], f"frame {number}: what moved at {at}"
    assert share(encoded) < 0.15


def test_a_scene_cut_encodes_the_whole_frame_and_goes_on_from_it():
    other = scene(3)[:, : SIZE[0], : SIZE[1]]
    encoded = watched(lambda number: still(number) if number < 10 else other, 20)
    assert np.flatnonzero(encoded.all((1, 2))).tolist() == [0, 10]
    assert not encoded[11:].any()


def shaken(pictures=still):
    rng = np.random.default_rng(2)
    places = rng.integers(-2, 3, (100, 2))
    return lambda number: pictures(number, *(16 + places[number]))


def test_a_camera_that_shakes_has_not_moved():
    encoded = watched(noisy(shaken()), 40)
    assert share(encoded) < 0.1


def test_what_moves_while_the_camera_shakes_is_encoded():
    rng = np.random.default_rng(2)
    places = rng.integers(-2, 3, (100, 2))

    def pictures(number):
        picture = still(number, *(16 + places[number]))
        picture[:, 70:98, 14 * (number % 10) :][..., :28] = np.float64([[[230]], [[30]], [[60]]])
        return picture

    encoded = watched(noisy(pictures), 40)
    assert all(encoded[number, 5, number % 10 : number % 10 + 2].all() for number in range(2, 40))
    assert share(encoded) < 0.35


@pytest.mark.parametrize("swing", [0.04, 0.1])
def test_lamps_that_flicker_are_not_encoded_for_ever(swing):
    phase = np.arange(SIZE[0])[:, None] / SIZE[0] * 3
    whole = watched(noisy(lambda number: still(number) * (1 + swing * np.sin(2.1 * number))), 60)
    bands = watched(noisy(lambda number: still(number) * (1 + swing * np.sin(phase + 2.1 * number))), 60)
    assert share(whole) < 0.15
    assert share(bands) < 0.25


def test_a_patch_of_a_group_changed_if_it_did_in_either_frame():
    vision = replace(VISION, group=2)
    changes = PatchChanges(EncodeChanged(64), vision, GRID)
    pixels = np.zeros((2, 3, *SIZE), np.float32)
    changes.encoded(changes.compare(pixels, SIZE))
    for frame in (0, 1):
        other = pixels.copy()
        other[frame, :, 28:42, 42:56] = 1
        assert np.argwhere(changes.compare(other, SIZE).patches.reshape(GRID))[[0, -1]].tolist() == [[1, 2], [3, 4]]


class PatchMeans:
    """A tower whose token is its patch's mean colour; it keeps how often each was encoded, to see what it is asked."""

    def __init__(self, memory, vision, width):
        self.memory, self.vision, self.width, self.calls = memory, vision, width, []

    def encode(self, pixels, chosen):
        self.calls.append(len(chosen))
        self.memory[chosen] += 1
        return self.features(pixels)[chosen], chosen

    def features(self, pixels):
        rows, columns = self.vision.grid
        height, width = (size // along for size, along in zip(self.vision.size, self.vision.grid, strict=True))
        cut = pixels.reshape(-1, 3, *self.vision.size)[:, :, : rows * height, : columns * width].mean(0)
        means = cut.reshape(3, rows, height, columns, width).mean((2, 4)).reshape(3, -1).T
        return np.tile(means, (1, -(-self.width // 3)))[:, : self.width].astype(np.float32)


class Glances(PatchMeans):
    """A tower whose every token also says where the reddest patch is."""

    def features(self, pixels):
        own = super().features(pixels)
        return own + 2 * np.random.default_rng(int(own[:, 0].argmax())).standard_normal(self.width, np.float32)


@pytest.mark.parametrize(("tower", "least", "most"), [(PatchMeans, 0.1, 0.6), (Glances, 1, 1)])
def test_frames_are_encoded_whole_as_often_as_what_is_kept_was_wrong(tower, least, most):
    vision = replace(VISION, changed=ChangedTowerSpec("", GRID, 0, 0, 0, 0, outputs=(1,)))
    engine = SimpleNamespace(bind_tower=lambda buffer: tower(buffer.owner, vision, 6))
    encoder = ChangedEncoder(engine, SimpleNamespace(vision=vision, decoder=SimpleNamespace(row_width=6)), EncodeChanged())
    pictures = noisy(mover, 4.0)
    for number in range(60):
        pixels = ((np.rint(pictures(number)).clip(0, 255) / 255 - 0.5) / 0.25).astype(np.float32)[None]
        features = encoder.encode(pixels, np.full((1, 2), SIZE, np.int32))[0]
        np.testing.assert_allclose(features, tower(None, vision, 6).features(pixels), atol=0.1)
    assert least <= encoder.encoded <= most


@pytest.fixture
def faked(model, monkeypatch):
    """The model with a tower of its own for changed patches; the towers that were bound."""
    vision, towers = model.bundle.vision, []
    spec = ChangedTowerSpec("", vision.grid, 0, 0, 0, 0, outputs=(1,))
    monkeypatch.setattr(model, "bundle", replace(model.bundle, vision=replace(vision, changed=spec)))

    def bind_tower(buffer):
        towers.append(PatchMeans(buffer.owner, vision, model.bundle.decoder.row_width))
        return towers[-1]

    def encode(pixels):
        tower = PatchMeans(None, vision, model.bundle.decoder.row_width)
        return np.stack([tower.features(pixels[at : at + vision.group]) for at in range(0, len(pixels), vision.group)])

    monkeypatch.setattr(model.engine, "bind_tower", bind_tower, raising=False)
    monkeypatch.setattr(model.engine, "encode", encode)
    return model, towers


def ask(session):
    answer = session.ask("what color was the square?", max_tokens=8)
    answer.wait()
    return answer.token_ids


def opened(model, encode, **more):
    budget = 24 * (model.bundle.vision.tokens_per_frame + 40)
    return Session.open(model, policy="full", budget=budget, chunk=4, encode=encode, **more)


def test_threshold_0_gives_what_whole_frames_give(faked):
    model, _ = faked
    with opened(model, "all") as whole, opened(model, "changed:threshold=0") as changed:
        for image in frames(11, model):
            whole.watch(image)
            changed.watch(image)
        assert ask(changed) == ask(whole)
        np.testing.assert_array_equal(changed.cache.key(0), whole.cache.key(0))
        assert changed.stats.encoded == 1
        assert changed.stats.tower_bytes > 0 == whole.stats.tower_bytes


@pytest.mark.parametrize("append", ["all", "changed:tau=0.9999"])
def test_a_snapshot_goes_on_with_the_same_references(faked, tmp_path, append):
    model, _ = faked
    images = list(frames(30, model))
    with opened(model, "changed", append=append, state=tmp_path / "whole") as session:
        for image in images:
            session.watch(image)
        expected, encoded = ask(session), session.stats.encoded
        memory, keys = session._chunk.encoder._tower_cache.copy(), session.cache.key(0).copy()
    assert encoded < 1 or len(memory) <= 36, "nine patches, all neighbours of one"
    for part in (images[:17], images[17:]):
        with opened(model, "changed", append=append, state=tmp_path / "parts") as session:
            for image in part:
                session.watch(image)
            if len(part) == 13:
                assert ask(session) == expected
                assert session.stats.encoded == encoded
                np.testing.assert_array_equal(session._chunk.encoder._tower_cache, memory)
                np.testing.assert_array_equal(session.cache.key(0), keys)
    with pytest.raises(UserError, match="encode"):
        opened(model, "all", append=append, state=tmp_path / "parts")


def test_a_group_that_waits_leaves_no_trace(faked):
    """It is encoded for a question, its frame repeated, and once more with the frame that it waited for."""
    model, _ = faked
    vision = replace(model.bundle.vision, group=2)
    model.bundle = replace(model.bundle, vision=vision)
    pixels = np.float32([np.full((3, *vision.size), level) for level in (0, 0, 1)])
    sizes = np.zeros((3, 2), np.int32)
    once, twice = (ChangedEncoder(model.engine, model.bundle, EncodeChanged()) for _ in range(2))
    for encoder in (once, twice):
        encoder.encode(pixels[:2], sizes[:2])
    waiting = twice.encode(pixels[2:], sizes[2:], keep=False)
    assert waiting.mean() == pytest.approx(1)
    for name, array in once.state().items():
        np.testing.assert_array_equal(twice.state()[name], array, err_msg=name)


def test_auto_encodes_what_changed_where_memory_allows_it(faked, tmp_path, monkeypatch):
    model, _ = faked

    def kept(**more):
        with opened(model, "auto", **more) as session:
            return session.stats.tower_bytes > 0

    assert not kept(), "the frames of tiny models have few patches"
    monkeypatch.setattr(opening, "FEW", 0)
    assert kept()
    with opened(model, "all", state=tmp_path) as session:
        for image in frames(5, model):
            session.watch(image)
    assert not kept(state=tmp_path), "a memory of whole frames resumes as one"
    monkeypatch.setattr(changes, "available", lambda: SimpleNamespace(free=3 * model.bundle.vision.changed.cache_bytes))
    assert not kept()


def test_a_bundle_without_the_graph_says_so(model):
    if model.bundle.vision.changed is not None:
        pytest.skip("this one has it")
    with pytest.raises(UserError, match="use --encode all, or export"):
        opened(model, "changed")


def test_a_stream_that_encoded_changes_resumes_where_a_new_one_would_encode_all(faked, tmp_path, monkeypatch):
    model, _ = faked
    monkeypatch.setattr(opening, "FEW", 0)
    with opened(model, "auto", state=tmp_path / "state") as session:
        session.watch(next(iter(frames(1, model))))
    free = 3 * model.bundle.vision.changed.cache_bytes
    monkeypatch.setattr(changes, "available", lambda: SimpleNamespace(free=free))
    for state, encoder in (("state", ChangedEncoder), ("other", type(None))):
        with opened(model, "auto", state=tmp_path / state) as session:
            assert isinstance(session._chunk.encoder, encoder)
