"""What a fixed camera goes through: whatever moves is in the memory soon, and the present is seen as whole frames show it."""

import io
from contextlib import closing
from fractions import Fraction

import av
import numpy as np
import pytest

from edgevlm.calib.demo import questions as demo
from edgevlm.calib.demo.world import GRID, SIZE, World
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session, TextBudget

FRAMES, EVERY = 48, 4  # frames, and how often questions are asked
NOW = ("now_count", "now_color", "now_where", "now_seen")


def scaled(images, gains):
    return [(image * gain).clip(0, 255).astype(np.uint8) for image, gain in zip(images, gains, strict=True)]


def still(images, random):
    return images


def shaking(images, random):
    """Wind: a pixel to any side."""
    return [np.roll(image, random.integers(-1, 2, 2), (0, 1)) for image in images]


def day_to_night(images, random):
    return scaled(images, np.linspace(1, 0.4, FRAMES))


def auto_exposure(images, random):
    """A step up or down every ten frames, within two."""
    steps = np.resize([1.0, 1.2, 0.8, 1.1, 0.9], FRAMES // 10 + 1).repeat(10)[:FRAMES]
    return scaled(images, (steps + np.append(steps[:1], steps[:-1])) / 2)


def flicker(hertz, fps):
    """Lamps at twice the mains' frequency under a rolling shutter: bands that wander with the frame rate."""

    def lamps(images, random):
        lines = np.arange(SIZE)[:, None, None] / SIZE / 30  # seconds at which a line is read
        return scaled(images, [1 + 0.08 * np.sin(4 * np.pi * hertz * (number / fps + lines)) for number in range(FRAMES)])

    return lamps


def snow(images, random):
    return [np.where(random.random((SIZE, SIZE, 1)) < 0.02, np.uint8(235), image) for image in images]


def rain(images, random):
    wet = []
    for image in images:
        image = image.copy()
        for top, left in random.integers(0, SIZE - 6, (10, 2)):
            image[top : top + 6, left] = image[top : top + 6, left] // 2 + 90
        wet.append(image)
    return wet


def h264(images, random):
    """Through a camera's encoder, four times as large."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", Fraction(2), {"crf": "28", "g": "12"})
        stream.width = stream.height = 4 * SIZE
        stream.pix_fmt = "yuv420p"
        for image in images:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(image.repeat(4, 0).repeat(4, 1), "rgb24")))
        output.mux(stream.encode())
    file.seek(0)
    with av.open(file) as again:
        return [frame.to_ndarray(format="rgb24") for frame in again.decode(video=0)]


DISTURBANCES = {
    "still": still, "shaking camera": shaking, "day to night": day_to_night, "auto-exposure": auto_exposure,
    "flicker, 50 Hz at 30 fps": flicker(50, 30), "flicker, 60 Hz at 25 fps": flicker(60, 25), "snow": snow, "rain": rain,
    "H.264": h264,
}  # fmt: skip


@pytest.fixture(scope="module")
def demo_model():
    with closing(Model.load("demo", threads=1)) as model:
        yield model


def world_frames(seed, cut=None):
    """Frames, what each shows in which patch, and questions about now: (frame, text, answer). cut: to another world there."""
    world, other, random = World(seed), World(seed + 1000), np.random.default_rng(seed)
    images, owners, asked = [], [], []
    for number in range(FRAMES):
        shown = [world.step(), other.step()]
        is_other = cut is not None and number >= cut
        images.append(shown[is_other])
        seen = other if is_other else world
        owners.append(seen.owners + 1000 * is_other * (seen.owners >= 0))
        if number % EVERY == EVERY - 1:
            drawn = (demo.draw(kind, seen.history, random) for kind in NOW)
            asked += [(number, question.text, answer) for question, answer in filter(None, drawn)]
    return images, np.stack(owners), asked


def watched(model, images, asked, append, encode):
    """Whether each answer was right, and the session's newest memory: the frames that each patch was appended of."""
    right, answers = [], {number: [] for number, _, _ in asked}
    for number, text, answer in asked:
        answers[number].append((text, answer))
    with Session.open(
        model, policy="full", budget=FRAMES * GRID**2, chunk=4, text_budget=TextBudget(32, 64, 32), append=append, encode=encode
    ) as session:
        for number, image in enumerate(images):
            session.watch(image, float(number))
            right += [session.ask(text).text.strip() == answer for text, answer in answers.get(number, ())]
        cache = session.cache
        vision = cache.kind(0)[0] == Kind.VISION
        patches = cache.row(0)[0, vision] * GRID + cache.col(0)[0, vision]
        frames = cache.frame(0)[0, vision]
        return right, {patch: frames[patches == patch] for patch in range(GRID**2)}, session.stats


def check(model, images, owners, asked, append, encode, within):
    right, held, stats = watched(model, images, asked, append, encode)
    if encode == "all":  # with stale surroundings the demo's tower, of 16 patches, lets it miscount now and then
        whole, _, _ = watched(model, images, asked, "all", "all")
        assert sum(right) >= 0.95 * sum(whole), "the present is seen as whole frames show it"
    came = owners[1:] != owners[:-1]
    found = 0
    for before, patch in zip(*np.nonzero(came & (owners[1:] >= 0)), strict=True):
        first = before + 1
        stays = int((np.cumprod(owners[first:, patch] == owners[first, patch])).sum())
        if stays > within and first + within < FRAMES - 1:  # the newest frame is the present, which is not in the memory
            soon = (held[patch] >= first) & (held[patch] <= first + within)
            found += 1
            assert soon.any(), f"what came to patch {patch} at frame {first} is not in the memory {within} frames later"
    assert found, "something came and stayed"
    return stats


WAYS = [("changed:tau=0.97", "all", 0), ("changed:tau=0.97", "changed:interval=8", 8)]


@pytest.mark.parametrize(("append", "encode", "within"), WAYS)
@pytest.mark.parametrize("name", DISTURBANCES)
def test_what_moves_is_remembered_and_the_present_is_seen(demo_model, name, append, encode, within):
    images, owners, asked = world_frames(11)
    disturbed = DISTURBANCES[name](images, np.random.default_rng(5))
    assert len(disturbed) == FRAMES
    stats = check(demo_model, disturbed, owners, asked, append, encode, within)
    assert stats.memory.appended < 0.5, "what stands still was not appended again"


@pytest.mark.parametrize(("append", "encode", "within"), WAYS)
def test_a_scene_cut_is_another_scene_at_once(demo_model, append, encode, within):
    check(demo_model, *world_frames(12, cut=22), append, encode, within)
