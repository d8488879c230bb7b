"""After 30 compressions and several re-indexings: the same greedy tokens as a readable numpy decoder that does the same."""

import numpy as np
import pytest
from pictures import frames
from reference_decoder import ReferenceDecoder

from edgevlm.runtime.session import Session, TextBudget

QUESTION = "what color was the square?"


class Shadow:
    """Does to a ReferenceDecoder what a stream does to its cache: the same appends, evictions and shifts."""

    def __init__(self, checkpoint, stream):
        self.decoder = ReferenceDecoder(checkpoint)
        self.stream, self.reindexed = stream, 0
        self.choices, self.errors = [], []
        self.step, self.before_append = stream.decoder.step, stream.policy.before_append
        stream.decoder.step, stream.policy.before_append = self._step, self._before_append

    def _before_append(self, cache, rows, guide):
        plan = self.before_append(cache, rows, guide)
        self.keep(cache, plan.keep if plan else [])
        return plan

    def keep(self, cache, masks):
        for layer, mask in enumerate(masks):
            for head in range(cache.kv_heads if mask is not None else 0):
                kept = cache.seq(layer)[head][mask[head]]
                rows_of = self.decoder.cache[layer][head]
                rows_of.keep(np.flatnonzero(np.isin(rows_of.seq, kept)))

    def _step(self, embeds, cos, sin, past_len, logit_rows=(-1,)):
        if self.stream.stats.reindexings > self.reindexed:
            self.reindexed = self.stream.stats.reindexings
            self.make_dense()
        last = self.stream.positions.next  # already taken for these rows
        logits = self.decoder.append(embeds, np.arange(last - len(embeds), last))
        result = self.step(embeds, cos, sin, past_len, logit_rows)
        if len(result.logits):
            self.choices.append(int(np.argmax(logits[-1])))
            self.errors.append(float(np.abs(logits[-1] - result.logits[-1]).max()))
        return result

    def make_dense(self):
        """Per layer and head: the kept positions after the prefix become their rank."""
        for layer in self.decoder.cache:
            for head in layer:
                moved = head.positions >= self.stream.prefix
                ranks = np.argsort(np.argsort(head.positions[moved]))
                head.positions[moved] = self.stream.prefix + ranks


LAZY = ("infinipot-v", "sliding-window", "streaming-llm", "simple-stream", "uniform", "random", "snapkv:window=8", "h2o")


@pytest.mark.parametrize(("reindexing", "policy"), [*(("lazy", policy) for policy in LAZY), ("eager", "infinipot-v")])
def test_greedy_tokens_equal_the_numpy_decoder(model, checkpoint, policy, reindexing):
    per_frame = model.bundle.vision.tokens_per_frame
    room = TextBudget(16, 64, 16)
    with Session.open(model, policy=policy, budget=6 * per_frame, chunk=2, reindexing=reindexing, text_budget=room) as session:
        stream = session._stream
        stream.positions.limit = 240
        shadow = Shadow(checkpoint, stream)
        ids = model.encode(session._chat.prefix)
        shadow.decoder.append(model.engine.embed(np.array(ids)), np.arange(len(ids)))
        for image in frames(70, model):
            session.watch(image)
        memory = session.stats.memory
        assert memory.compressions >= 30
        assert memory.reindexings >= 2
        for layer, heads in enumerate(shadow.decoder.cache):
            for head, rows in enumerate(heads):
                assert sorted(rows.seq) == sorted(stream.cache.seq(layer)[head])
        answer = session.ask(QUESTION, max_tokens=16)
        answer.wait()
    assert len(answer.token_ids) > 3
    stop = [] if answer.finish_reason == "length" else [shadow.choices[-1]]
    assert shadow.choices == answer.token_ids + stop, "the numpy decoder chose the same token at every step"
    assert not stop or stop[0] in model.bundle.chat.stop_ids
    assert max(shadow.errors) < 1e-2
