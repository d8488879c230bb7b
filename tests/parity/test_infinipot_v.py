"""InfiniPot-V's own program: what it kept of the same rows (``recorded/infinipot_v.py``)."""

from pathlib import Path

import numpy as np
import pytest
from parity.official import OfficialInfiniPotV, PooledInfiniPotV
from parity.recorded.infinipot_v import CASES, DIM, HEADS, SYSTEM
from pictures import frames
from policies.filled import Filled, rows_of, write

from edgevlm.runtime.cache import Kind, KVCache
from edgevlm.runtime.policies import StreamShape
from edgevlm.runtime.session import Session, TextBudget

RECORDED = np.load(Path(__file__).parent / "recorded" / "infinipot_v.npz")


class Stream:
    """A cache that the rows of a case are appended to as they are."""

    def __init__(self, case):
        self.case, (self.keys, self.values), self.seq = case, case.rows(), 0
        rows = SYSTEM + case.frames * case.per_frame
        self.cache = KVCache(case.layers, HEADS, DIM, rows, inv_freq=np.ones(DIM // 2))
        self.append(Kind.PREFIX, SYSTEM)

    def append(self, kind, count):
        seq = np.arange(self.seq, self.seq + count)
        frame, patch = np.divmod(seq - SYSTEM, self.case.per_frame)
        self.cache.reserve(count)
        for layer in range(self.case.layers):
            write(self.cache, layer, self.keys[layer][:, seq], self.values[layer][:, seq])
        self.cache.commit(rows_of(kind, seq, frame, *np.divmod(patch, self.case.grid[1]), seq))
        self.seq += count


@pytest.mark.parametrize("name", CASES)
def test_keeps_what_the_program_kept(name):
    case = CASES[name]
    stream, budget = Stream(case), case.frames * case.per_frame
    cache, step = stream.cache, case.step * case.per_frame
    how = {"alpha": case.alpha, "target": case.kept / case.frames, "recent": case.recent}
    revision, _, pooled = case.official.partition("-")
    policy = PooledInfiniPotV(revision=revision, **how) if pooled else OfficialInfiniPotV(**how)
    policy.attach(budget, StreamShape(case.layers, case.per_frame, SYSTEM))
    assert policy.compress_to == case.kept * case.per_frame
    stream.append(Kind.VISION, budget)
    mixed = 0
    for recorded in RECORDED[name]:
        plan = policy.before_append(cache, step, None)
        for layer, keep in enumerate(plan.keep):
            for head in range(HEADS):
                kept = np.sort(cache.seq(layer)[head, keep[head] & (cache.kind(layer)[head] == Kind.VISION)]) - SYSTEM
                assert kept.tolist() == recorded[layer, head].tolist(), (layer, head)
                mixed += (kept % case.per_frame != np.arange(len(kept)) % case.per_frame).any()
        cache.evict(plan.keep)
        if stream.seq < stream.keys.shape[2]:
            stream.append(Kind.VISION, step)
    assert mixed > case.layers, "pseudo-frames are not frames"


def test_a_budget_of_one_frame_keeps_the_newest():
    filled = Filled(4, 12, (2, 3), np.random.default_rng(0))
    policy = OfficialInfiniPotV()
    policy.attach(12, StreamShape(4, 6, 3))
    filled.frame(count=2)
    plan = policy.before_append(filled.cache, 6, None)
    filled.cache.evict(plan.keep)
    assert all((filled.cache.frame(layer)[:, 3:] == 1).all() for layer in range(4))


def test_a_session_keeps_its_cap():
    with Session.open("demo", policy=PooledInfiniPotV(), budget=130, chunk=4, text_budget=TextBudget(16, 64, 8)) as session:
        cache = session._stream.cache
        nbytes = cache.nbytes
        for image in frames(33, session.model):
            session.watch(image)
            assert session.stats.tokens <= 130
        assert session.stats.memory.compressions >= 3
        assert (cache.nbytes, cache.allocations) == (nbytes, 1)
        assert session.ask("how many objects are there now?", max_tokens=2).text
