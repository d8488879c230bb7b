"""InfiniPot-V ``mode=official`` against the authors' program written down token by token in float64."""

import numpy as np
import pytest
from pictures import frames
from policies.filled import HEADS, PREFIX, Filled
from policies.reference_infinipot_v import cosine

from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import StreamShape, create_policy
from edgevlm.runtime.session import Session, TextBudget


def pooled(norms, i, quarter, per_frame, cols):
    """The mean norm around the i-th token, places outside counted as zero."""
    if quarter == 3:
        return norms[i]
    if quarter == 2:
        return sum(norms[j] for j in (i - 1, i, i + 1) if 0 <= j < len(norms)) / 3
    reach, (frame, patch) = (3, 2)[quarter], divmod(i, per_frame)
    row, col = divmod(patch, cols)
    total = 0.0
    for other in range(per_frame):
        if abs(other // cols - row) <= reach and abs(other % cols - col) <= reach:
            total += norms[frame * per_frame + other]
    return total / (2 * reach + 1) ** 2


def reference(tokens, target, per_frame, cols, quarter, alpha, recent):
    """The seqs that one head keeps; ``tokens`` are its vision tokens."""
    tokens = sorted(tokens, key=lambda token: token["seq"])
    count = len(tokens)
    norms = [float(np.linalg.norm(token["value"].astype(np.float64))) for token in tokens]
    scores = [pooled(norms, i, quarter, per_frame, cols) for i in range(count)]
    if alpha > 0:
        new = per_frame * max(1, int(recent * (count // per_frame) + 1e-9))
        keys, likeness = [token["key"].astype(np.float64) for token in tokens], {}
        for i in range(count - new):
            same = [j for j in range(count - new, count) if j % per_frame == i % per_frame]
            likeness[i] = sum(cosine(keys[i], keys[j]) for j in same) / len(same)
        quota = max(0, target - round((1 - alpha) * target) - new)
        chosen = sorted(likeness, key=lambda i: (likeness[i], -i))[:quota]
        for i in [*chosen, *range(count - new, count)]:
            scores[i] = np.inf
    best = sorted(range(count), key=lambda i: (scores[i], i), reverse=True)[:target]
    return sorted(tokens[i]["seq"] for i in best)


@pytest.mark.usefixtures("kv")
@pytest.mark.parametrize(
    ("alpha", "recent", "grid"), [(0.5, 0.125, (2, 3)), (0.8, 0.34, (4, 4)), (1.0, 0.25, (1, 5)), (0.0, 0.125, (4, 4))]
)
def test_keeps_what_the_program_keeps(alpha, recent, grid):
    per_frame, chunk = grid[0] * grid[1], 3
    budget = 8 * per_frame + 2
    filled = Filled(4, budget + chunk * per_frame, grid, np.random.default_rng(int(10 * alpha)))
    policy = create_policy(f"infinipot-v:mode=official,alpha={alpha},recent={recent}")
    policy.attach(budget, StreamShape(4, per_frame, PREFIX))
    cache, mixed, compressions = filled.cache, 0, 0
    assert policy.appends_first
    assert policy.compress_to == 6 * per_frame
    for _ in range(12):
        filled.frame(count=chunk)
        plan = policy.before_append(cache, 0, None)
        assert (plan is None) == (int(cache.lengths[0]) - PREFIX <= budget)
        if plan is None:
            continue
        compressions += 1
        for layer, keep in enumerate(plan.keep):
            assert keep[:, cache.kind(layer)[0] == Kind.PREFIX].all()
            for head, tokens in enumerate(filled.heads(layer)):
                slots = keep[head] & (cache.kind(layer)[head] == Kind.VISION)
                kept = sorted(cache.seq(layer)[head, slots].tolist())
                assert kept == reference(tokens, policy.compress_to, per_frame, grid[1], layer, alpha, recent)
                mixed += any((seq - PREFIX) % per_frame != i % per_frame for i, seq in enumerate(kept))
        cache.evict(plan.keep)
        filled.reindex()
        assert (cache.lengths - PREFIX == policy.compress_to).all()
    assert compressions >= 5
    assert mixed > 4 * HEADS, "pseudo-frames are not frames"


@pytest.mark.usefixtures("kv")
def test_a_budget_of_one_frame_keeps_the_newest():
    filled = Filled(4, 30, (2, 3), np.random.default_rng(0))
    policy = create_policy("infinipot-v:mode=official")
    policy.attach(7, StreamShape(4, 6, PREFIX))
    filled.frame(count=2)
    plan = policy.before_append(filled.cache, 0, None)
    filled.cache.evict(plan.keep)
    assert all((filled.cache.frame(layer)[:, PREFIX:] == 1).all() for layer in range(4))


def test_a_session_in_an_arena_with_a_chunk_more():
    with Session.open(
        "demo", policy="infinipot-v:mode=official", budget=130, chunk=4, text_budget=TextBudget(16, 64, 8)
    ) as session:
        stream = session._stream
        cache, per_frame = stream.cache, stream.model.bundle.vision.tokens_per_frame
        nbytes = cache.nbytes
        assert (cache.capacities == stream.prefix + 130 + 4 * per_frame + stream.positions.text_rows).all()
        for image in frames(33, session.model):
            session.watch(image)
            assert session.stats.tokens <= 130
        assert session.stats.memory.compressions == session.stats.memory.reindexings >= 3
        assert (cache.nbytes, cache.allocations) == (nbytes, 1)
        assert session.basis == "infinipot-v: thresholds of mode=official"
        assert session.ask("how many objects are there now?", max_tokens=2).text
