"""Sessions that prefill with ST-SpAttn: the same memory and answers as a readable numpy decoder that masks."""

from dataclasses import dataclass
from typing import ClassVar

import checkpoints
import numpy as np
import pytest
from pictures import frames
from reference_decoder import START, Shadow

from edgevlm.errors import CacheError
from edgevlm.export import export_checkpoint
from edgevlm.runtime.cache import Kind, KVCache, Rows
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import POLICIES, Needs, Policy
from edgevlm.runtime.session import Session, TextBudget
from edgevlm.runtime.stream import frame_pattern

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

    def after_append(self, cache, appended):
        assert sorted(appended.queries) == [0, START]
        assert appended.queries[START].shape[1] == len(appended.seq)

    def score(self, cache, layer):
        seq = cache.seq(layer)
        return np.random.default_rng(int(seq.max()) + layer).random(seq.shape, np.float32)


@pytest.fixture(autouse=True)
def lottery(monkeypatch):
    monkeypatch.setitem(POLICIES, "lottery", Lottery)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    shape = {"layers": 5, "heads": 6, "kv_heads": 2, "max_positions": 2048}
    checkpoint = checkpoints.make_checkpoint(folder / "checkpoint", "llava_onevision", **shape)
    model = Model.load(export_checkpoint(checkpoint, folder / "bundle"), threads=1)
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
    with Session.open(model, policy=policy, budget=8 * p, chunk=chunk, text_budget=TextBudget(16, 64, 16)) as session:
        stream = session._stream
        stream.positions.limit = stream.prefix + 8 * p + stream.positions.text_rows + 40
        shadow = Shadow(checkpoint, stream, model.encode(session._chat.prefix))
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


def a_cache(seen, prefix=2, grid=(2, 3)):
    """One layer, two heads; ``seen``: (frame, place) of the vision rows after the prefix."""
    cache = KVCache(1, 2, 8, 64, inv_freq=np.ones(4))
    count = prefix + len(seen)
    frame = np.array([-1] * prefix + [frame for frame, _ in seen], np.int32)
    place = np.array([0] * prefix + [place for _, place in seen])
    kind = np.array([Kind.PREFIX] * prefix + [Kind.VISION] * len(seen), np.uint8)
    cache.reserve(count)
    row, col = (place // grid[1]).astype(np.int16), (place % grid[1]).astype(np.int16)
    cache.commit(Rows(kind, np.arange(count), frame, row, col, np.arange(count, dtype=np.int32)[:, None]))
    return cache


def test_where_the_previous_tokens_are():
    first = [(0, place) for place in range(6)]
    cache = a_cache([*first, *((1, place) for place in range(6)), *((2, place) for place in range(6))])
    keep = np.ones((2, 20), bool)
    keep[0, [9, 15]] = False  # (1, 1) and (2, 1): hole 9 is filled by the tail
    keep[1, [14, 19]] = False  # (2, 0) and (2, 5)
    cache.evict([keep])
    pattern = frame_pattern(cache, 2, 3, (2, 3))
    assert pattern.shared == 8
    for head in range(2):
        for place, slot in enumerate(pattern.previous[0, head]):
            there = (cache.frame(0)[head] == 2) & (cache.row(0)[head] == place // 3) & (cache.col(0)[head] == place % 3)
            assert there.sum() == (slot >= 0)
            assert slot < 0 or there[slot]
    assert (pattern.previous < 0).sum(-1).tolist() == [[1, 2]]
    assert (frame_pattern(cache, 2, 9, (2, 3)).previous == -1).all()


def test_frame_one_has_no_previous_tokens():
    cache = a_cache([(0, place) for place in range(6)])
    assert (frame_pattern(cache, 2, 1, (2, 3)).previous == -1).all()


@pytest.mark.parametrize(
    "seen",
    [[], [(0, 0)], [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 5)], [(1, place) for place in range(6)]],
    ids=["nothing", "a part", "another frame's token", "another frame"],
)
def test_frame_zero_must_be_in_its_place(seen):
    with pytest.raises(CacheError, match="layer 0: ST-SpAttn needs frame 0 in rows 2 to 8"):
        frame_pattern(a_cache(seen), 2, 2, (2, 3))
