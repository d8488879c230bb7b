"""Sessions that prefill with ST-SpAttn: the same memory and answers as a readable numpy decoder that masks."""

from dataclasses import dataclass
from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from pictures import frames
from reference_decoder import START, Shadow

from edgevlm.export import export_checkpoint
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import POLICIES, Needs, Policy
from edgevlm.runtime.session import Session, TextBudget

QUESTION = "what color was the square?"


@dataclass
class Lottery(Policy):
    """Keeps what is protected and a random choice of the rest, another in each layer and head."""

    variant: str = "st-spattn"

    name: ClassVar[str] = "lottery"
    paper: ClassVar[str] = "none"

    @property
    def needs(self):
        return Needs(probe_layers=(0, START), variant=self.variant)

    @property
    def compress_to(self):
        return self.budget // 2

    def after_append(self, layers, appended):
        assert sorted(appended.queries) == [0, START]
        assert appended.queries[START].shape[1] == len(appended.seq)

    def score(self, layer):
        return np.random.default_rng(int(layer.seq.max()) + layer.index).random(layer.seq.shape, np.float32)


@pytest.fixture(autouse=True)
def lottery(monkeypatch):
    monkeypatch.setitem(POLICIES, "lottery", Lottery)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    shape = {"layers": 5, "heads": 6, "kv_heads": 2, "max_positions": 2048}
    checkpoint = checkpoints.make_checkpoint(folder / "checkpoint", "llava_onevision", **shape)
    model = Model.load(export_checkpoint(checkpoint, folder / "bundle", kv="fp32"), threads=1)
    yield model, checkpoint
    model.close()


@pytest.mark.parametrize(
    ("policy", "at_once", "chunk"),
    [
        ("lottery", 4, 1),
        ("lottery", 4, 5),
        ("purekv:st_spattn=on", 2, 2),
        ("purekv:st_spattn=on,clie=0", 2, 5),
    ],
)
def test_answers_equal_the_numpy_decoder(made, policy, at_once, chunk):
    """With evictions other in every head and layer, two re-indexings, and a question in the middle."""
    model, checkpoint = made
    p = model.bundle.vision.tokens_per_frame
    with Session.open(
        model, append="all", policy=policy, budget=8 * p, chunk=chunk, text_budget=TextBudget(16, 64, 16)
    ) as session:
        stream = session._stream
        stream.positions.limit = stream.prefix + 8 * p + stream.positions.text_rows + 40
        shadow = Shadow(checkpoint, stream, session._chat.prefix)
        for index, image in enumerate(frames(61, model)):
            session.watch(image)
            if index == 30:
                dense, sparse, appended = len(shadow.dense_rows), len(shadow.sparse_frames), stream.frames
                session.ask(QUESTION, max_tokens=4).wait()
                shown = (index + 1 - stream.frames) * p  # of a chunk in progress, to be appended later
                stayed = (stream.frames - appended) * p
                assert sum(shadow.sparse_frames[sparse:]) == shown + stayed
                shadow.forget(shown + sum(shadow.dense_rows[dense:]))
                del shadow.sparse_frames[len(shadow.sparse_frames) - (shown > 0) :]
        session.flush()
        assert stream.stats.compressions >= 10
        assert stream.stats.reindexings >= 2
        assert shadow.dense_rows[0] == p, "frame 0 goes in alone"
        assert sum(shadow.sparse_frames) == 60 * p
        assert max(shadow.sparse_frames[2:]) == min(chunk, at_once) * p, "once the memory is full"
        for layer in range(5):
            assert (stream.cache.frame(layer)[:, stream.prefix : stream.prefix + p] == 0).all()
            for head, rows in enumerate(shadow.decoder.cache[layer]):
                held = np.argsort(stream.cache.seq(layer)[head])
                order = np.argsort(rows.seq)
                assert (stream.cache.seq(layer)[head][held] == rows.seq[order]).all()
                assert np.abs(stream.cache.value(layer)[head][held] - rows.values[order]).max() < 1e-3
        shadow.choices.clear()
        answer = session.ask(QUESTION, max_tokens=16)
        answer.wait()
    stop = [] if answer.finish_reason == "length" else [shadow.choices[-1]]
    assert shadow.choices == answer.token_ids + stop
    assert max(shadow.errors) < 1e-3
