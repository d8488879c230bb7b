"""HERMES against the float64 reference: which tokens each layer keeps, and what its summaries are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import reference_hermes as reference
from policies.filled import DIM, HEADS, INV_FREQ, PREFIX, Filled

from edgevlm.export.families import load_family
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies import Guidance, StreamShape, create_policy

pytestmark = pytest.mark.usefixtures("kv")

QUERY_HEADS, ROWS = 4, (3, 2)  # rows of the global and the local prompt
KINDS = {Kind.PREFIX: "prefix", Kind.VISION: "vision", Kind.SUMMARY: "summary"}


def tokens_of(cache, layer):
    """The layer as the reference wants it; all heads hold the same tokens in the same places."""
    for of in (cache.seq, cache.kind, cache.position):
        assert (of(layer) == of(layer)[:1]).all(), "heads choose alike"
    key, value = (cache.dequantize(part, layer) for part in ("key", "value"))
    return [
        {
            "kind": KINDS[int(cache.kind(layer)[0, i])],
            "seq": int(cache.seq(layer)[0, i]),
            "position": int(cache.position(layer)[0, i, 0]),
            "key": key[:, i],
            "value": value[:, i],
        }
        for i in range(cache.lengths[layer])
    ]


class Hermes:
    """A policy on a filled cache beside the reference, compression by compression."""

    def __init__(self, filled, text, budget, family="", **expected):
        cache, self.filled, self.expected, self.family = filled.cache, filled, expected, family
        self.policy = create_policy(text)
        self.policy.attach(
            budget,
            StreamShape(cache.layers, filled.grid[0] * filled.grid[1], PREFIX, load_family(family or "llava", "").fading),
        )
        middle, deep = reference.bounds(cache.layers)
        self.classes = [int(layer >= middle) + int(layer >= deep) for layer in range(cache.layers)]
        self.budgets = [budget] * cache.layers
        self.evicted = [[] for _ in self.classes]  # by layer, as they were when they went
        self.seen = [0] * cache.layers
        assert self.policy.layer_budgets.tolist() == self.budgets
        assert self.policy.needs.guidance_layers == tuple(range(middle, cache.layers))

    def guide(self):
        random = self.filled.random
        layers = self.policy.needs.guidance_layers
        queries = {layer: random.normal(size=(QUERY_HEADS, sum(ROWS), DIM)).astype(np.float32) for layer in layers}
        keys = {layer: random.normal(size=(HEADS, sum(ROWS), DIM)).astype(np.float32) for layer in layers}
        self.guidance = queries, keys, ROWS
        return Guidance(*self.guidance)

    def compress(self, rows, *, exact=False):
        """One compression; whether there was one."""
        cache = self.filled.cache
        held = cache.lengths - PREFIX
        plan = self.policy.before_append(cache, rows, self.guide)
        if plan is None:
            assert (held + rows <= self.budgets).all()
            return False
        layers = [tokens_of(cache, layer) for layer in range(cache.layers)]
        found = reference.raw_scores(layers, self.guidance, self.family)
        found = reference.smoothed(found, [(0.1, 0.3, 0.4)[c] for c in self.classes])
        for layer, (tokens, scores) in enumerate(found):
            target = max(0, self.budgets[layer] - rows)
            keep = plan.keep[layer]
            assert (keep is None) == (held[layer] <= target)
            if keep is None:
                continue
            assert keep[:, cache.kind(layer)[0] == Kind.PREFIX].all()
            summarised = self.expected.get("summary", True) and self.classes[layer] == 2
            wanted = reference.best(tokens, scores, target - summarised)
            kept = {t["seq"] for t, stays in zip(layers[layer], keep[0], strict=True) if stays and t["kind"] != "prefix"}
            self.check_choice(kept, wanted, dict(zip([t["seq"] for t in tokens], scores, strict=True)), exact)
            gone = [t for t, stays in zip(layers[layer], keep[0], strict=True) if not stays]
            self.evicted[layer] += [t for t in gone if t["kind"] == "vision"]
            assert (layer in plan.add) == (bool(summarised) and target > 0)
            if layer in plan.add:
                self.check_summary(plan.add[layer], layer, gone)
            elif summarised:
                self.evicted[layer] = []  # there was no room for it
        plan.carry_out(cache)
        assert (cache.lengths - PREFIX + rows <= self.budgets).all()
        return True

    def check_choice(self, kept, wanted, scores, exact):
        if kept != wanted:
            assert not exact
            margin = [scores[seq] for seq in kept ^ wanted]
            assert len(kept) == len(wanted)
            assert max(margin) - min(margin) < 2e-6, "only what float32 cannot tell apart may differ"

    def check_summary(self, new, layer, gone):
        content, value = reference.summary(self.evicted[layer], INV_FREQ)
        key = reference.rotated(content, int(new.rows.position[0, 0]), INV_FREQ)
        newest = max(gone, key=lambda t: t["position"])
        assert new.rows.position[0, 0] == newest["position"]
        assert new.rows.seq[0] == max(t["seq"] for t in self.evicted[layer])
        if self.filled.cache.saturated:
            return  # a summary of keys that are longer than codes can say is cut when it is stored and turned
        rounding = 0.25 if self.filled.cache.dtype == np.int8 else 1e-5  # of the summary before, and of turning it
        np.testing.assert_allclose(new.key[:, 0], key, atol=rounding, rtol=1e-5)
        np.testing.assert_allclose(new.value[:, 0], value, atol=rounding, rtol=1e-5)

    def check_memory(self):
        """Positions are unique and follow the stream; a summary stays for ever."""
        cache = self.filled.cache
        for layer in range(cache.layers):
            order = np.argsort(cache.seq(layer)[0])
            assert (np.diff(cache.seq(layer)[0][order]) > 0).all()
            assert (np.diff(cache.position(layer)[0, order, 0]) > 0).all()
            summaries = int((cache.kind(layer)[0] == Kind.SUMMARY).sum())
            assert summaries == bool(self.evicted[layer] and self.classes[layer] == 2 and self.expected.get("summary", True))


CASES = [
    ("hermes", {}),
    ("hermes:summary=off", {"summary": False}),
    ("hermes", {"family": "qwen2_vl"}),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[f"{text} {case.get('family', '')}" for text, case in CASES])
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_keeps_what_the_reference_keeps(text, expected, data):
    grid = data.draw(st.sampled_from([(2, 2), (3, 2), (1, 5)]), label="grid")
    per_frame = grid[0] * grid[1]
    budget = data.draw(st.integers(2 * per_frame, 6 * per_frame), label="budget")  # any remainder
    layers = data.draw(st.sampled_from([1, 2, 5, 10]), label="layers")
    filled = Filled(layers, 2 * budget, grid, np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed")))
    tried = Hermes(filled, text, budget, **expected)
    if min(tried.budgets) < per_frame:
        return
    frames = data.draw(st.integers(1, 2), label="frames a piece") if min(tried.budgets) >= 2 * per_frame else 1
    for step in range(8):
        tried.compress(frames * per_frame)
        filled.frame(count=frames)
        tried.check_memory()
        if step % 3 == 2:
            filled.reindex()
            tried.check_memory()


@pytest.mark.parametrize("content", ["zero", "equal", "huge"])
def test_adversarial_content(content):
    filled = Filled(10, 30, (2, 2), np.random.default_rng(1))
    filled.base = np.broadcast_to({"zero": 0.0, "equal": 1.0, "huge": 1e9}[content], filled.base.shape)
    filled.noise = 0.0
    tried = Hermes(filled, "hermes", 14)
    for step in range(8):
        tried.compress(4, exact=content == "zero")
        filled.frame()
        if step % 3 == 2:
            filled.reindex()


def test_one_frame_and_less():
    """A budget that the coming rows fill keeps nothing, not even a summary; with a row to spare that is the summary."""
    for budget in (3, 4, 5, 6):
        filled = Filled(3, 8, (2, 2), np.random.default_rng(2))
        tried = Hermes(filled, "hermes", budget)
        filled.frame()
        for _ in range(3):
            plan = tried.policy.before_append(filled.cache, 4, tried.guide)
            plan.carry_out(filled.cache)
            assert (filled.cache.lengths - PREFIX == max(0, budget - 4)).all()
            assert bool(plan.add) == (budget > 4)
            filled.frame()
