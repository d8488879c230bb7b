"""The multi-turn contrast of InfiniPot-V's App. C on the demo model: a memory chosen by one question fails the next."""

import numpy as np
import pytest

from edgevlm.calib.demo.questions import is_about_now, sample
from edgevlm.calib.demo.world import World
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

HELD_OUT = (1_000_000, 7)  # begins the seeds of the worlds
FRAMES, KEPT = 64, 0.05


@pytest.fixture(scope="module")
def model():
    loaded = Model.load("demo", threads=1)
    yield loaded
    loaded.close()


def right(model, policy, budget, streams):
    """Of pairs of questions about before, asked in either order: the shares of right answers to the first and the second."""
    answers = []
    for stream in range(streams):
        world, random = World([*HELD_OUT, stream]), np.random.default_rng([*HELD_OUT, stream, 1])
        images = [world.step() for _ in range(FRAMES)]
        asked = [(question, answer) for kind, question, answer in sample(world.history, random) if not is_about_now(kind)]
        for pair in (asked[:2], asked[1::-1]):
            with Session.open(model, policy=policy, budget=budget, append="all") as session:
                for image in images:
                    session.watch(image)
                answers.append([session.ask(question).text.strip() == answer for question, answer in pair])
    assert len(answers) == 2 * streams
    return np.mean(answers, 0).tolist()


def test_what_the_first_question_left_is_not_enough_for_the_second(model, capsys):
    capacity = FRAMES * model.bundle.vision.tokens_per_frame
    guided = right(model, f"snapkv-guided:target={KEPT}", capacity, 10)
    whole, agnostic = right(model, "full", capacity, 3), right(model, "infinipot-v", int(2 * KEPT * capacity), 3)
    with capsys.disabled():
        print(f"\nright first, second: snapkv-guided {guided}, full {whole}, infinipot-v {agnostic}")
    assert whole[0] == whole[1], "the order of questions is nothing to a memory that they do not change"
    assert agnostic[0] == agnostic[1]
    assert guided[0] > guided[1] + 0.15
