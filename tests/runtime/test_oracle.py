"""After 30 compressions and several re-indexings: the same greedy tokens as a readable numpy decoder that does the same."""

import numpy as np
import pytest
from pictures import frames
from reference_decoder import ReferenceDecoder

from edgevlm.runtime.session import Session, TextBudget

QUESTION = "what color was the square?"
START = 3  # the first sparse layer


class Shadow:
    """Does to a ReferenceDecoder what a stream does to its cache, and gives it the mask when the stream prefills sparsely."""

    def __init__(self, checkpoint, stream, prefix_ids):
        self.decoder, self.stream = ReferenceDecoder(checkpoint), stream
        self.per_frame = stream.model.bundle.vision.tokens_per_frame
        self.reindexed, self.errors, self.choices, self.sparse_frames, self.dense_rows = 0, [], [], [], []
        self.decoder.append(stream.model.engine.embed(np.array(prefix_ids)), np.arange(len(prefix_ids)))
        self.before_append, stream.policy.before_append = stream.policy.before_append, self._before_append
        for bound in filter(None, (stream.decoder, stream.sparse)):
            bound.step = self._watched(bound.step)

    def _before_append(self, cache, rows, guide):
        plan = self.before_append(cache, rows, guide)
        for layer, mask in enumerate(plan.keep if plan else []):
            for head in range(cache.kv_heads if mask is not None else 0):
                rows_of = self.decoder.cache[layer][head]
                rows_of.keep(np.flatnonzero(np.isin(rows_of.seq, cache.seq(layer)[head][mask[head]])))
        return plan

    def _watched(self, step):
        def watched(embeds, cos, sin, past_len, logit_rows=(-1,), pattern=None):
            if self.stream.stats.reindexings > self.reindexed:
                self.reindexed = self.stream.stats.reindexings
                self.make_dense()
            first = self.stream.positions.next - len(embeds)  # already taken for these rows
            self.decoder.count = self.stream._seq
            sees = None if pattern is None else self.sees
            logits = self.decoder.append(embeds, np.arange(first, first + len(embeds)), sees)
            (self.dense_rows if pattern is None else self.sparse_frames).append(len(embeds))
            result = step(embeds, cos, sin, past_len, logit_rows, pattern)
            if len(result.logits):
                self.choices.append(int(np.argmax(logits[-1])))
                self.errors.append(float(np.abs(logits[-1] - result.logits[-1]).max()))
            return result

        return watched

    def sees(self, layer, new, cached):
        """Vision rows follow the prefix without a gap in ``seq``: a question's rows give theirs back."""
        p, prefix = self.per_frame, self.stream.prefix
        if layer < START:
            return np.ones((1, 1), bool)
        return (cached < prefix + p) | ((new - prefix) // p == (cached - prefix) // p) | (cached == new - p)

    def make_dense(self):
        for head in (head for layer in self.decoder.cache for head in layer):
            moved = head.positions >= self.stream.prefix
            head.positions[moved] = self.stream.prefix + np.argsort(np.argsort(head.positions[moved]))

    def forget(self, rows):
        """The last rows of every head: a question is over."""
        for head in (head for layer in self.decoder.cache for head in layer):
            head.keep(range(len(head) - rows))


LAZY = ("infinipot-v", "sliding-window", "streaming-llm", "simple-stream", "uniform", "random", "snapkv:window=8", "h2o")


@pytest.mark.parametrize(("reindexing", "policy"), [*(("lazy", policy) for policy in LAZY), ("eager", "infinipot-v")])
def test_greedy_tokens_equal_the_numpy_decoder(model, checkpoint, policy, reindexing):
    per_frame = model.bundle.vision.tokens_per_frame
    room = TextBudget(16, 64, 16)
    with Session.open(model, policy=policy, budget=6 * per_frame, chunk=2, reindexing=reindexing, text_budget=room) as session:
        stream = session._stream
        stream.positions.limit = 240
        shadow = Shadow(checkpoint, stream, model.encode(session._chat.prefix))
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
