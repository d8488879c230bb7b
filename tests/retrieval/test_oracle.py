"""Sessions over a store: what a numpy decoder says that has all rows and looks at those that were chosen."""

import numpy as np
import pytest
from pictures import frames
from reference_decoder import ReferenceDecoder
from retrieval.anything import Anything

from edgevlm.runtime.session import Session, TextBudget
from edgevlm.runtime.store import joined

TEXT_BUDGET = TextBudget(16, 64, 16)
QUESTION = "what color was the square?"


class Chosen(ReferenceDecoder):
    """Every head keeps all that ever came; a call looks at ``views[layer][head]``: seqs, and where each is rotated to."""

    def _attention(self, layer, hidden, positions, seq, sees=None):
        kept = list(self.cache[layer])
        for head, (wanted, places) in enumerate(self.views[layer]):
            whole = kept[head]
            at = np.searchsorted(whole.seq, wanted)
            self.cache[layer][head] = type(whole)(whole.keys[at], whole.values[at], places, wanted)
        try:
            return super()._attention(layer, hidden, positions, seq, sees)
        finally:
            for head, whole in enumerate(kept):
                new = self.cache[layer][head]
                rows = slice(len(new) - len(hidden), None)
                whole.append(new.keys[rows], new.values[rows], new.positions[rows], new.seq[rows])
                self.cache[layer][head] = whole


class Shadow:
    """After each step of a stream the reference makes the same one, over the rows that the stream's heads looked at."""

    def __init__(self, checkpoint, model, session):
        self.stream, self.decoder, self.errors = session._stream, Chosen(checkpoint), []
        self.policy, self.step, self.load = self.stream.policy, self.stream.decoder.step, self.stream.policy.working.load
        self.stream.decoder.step, self.policy.working.load = self._step, self._load
        ids = session._chat.prefix
        nothing = np.zeros(0, np.int64)
        self.decoder.views = [[(nothing, nothing)] * self.decoder.kv_heads] * self.decoder.layers
        self.decoder.append(model.engine.embed(np.array(ids)), np.arange(len(ids)))
        self.ragged = 0

    def _load(self, layer, chosen, always=None):
        """Note what each head is about to look at: its valid rows, and the chosen ones, in places of our own account."""
        counts, cache = self.load(layer, chosen, always), self.stream.cache
        for head, numbers in enumerate(chosen):
            seq, place = cache.seq(layer)[head], cache.position(layer)[head, :, 0]
            blocks = self.policy.store.get(numbers)
            if blocks:
                rows = joined(blocks)[: self.policy.working.rows]
                fetched, places = rows.seq[0], rows.position[0, :, 0]
                if self.stream.stats.reindexings:
                    places = self.stream.prefix + np.argsort(np.argsort(fetched))
                seq, place = np.concatenate([seq, fetched]), np.concatenate([place, places])
            self.views[layer][head] = (seq, place)
        self.ragged += len({len(seq) for seq, _ in self.views[layer]}) > 1
        return counts

    def _step(self, embeds, *rest, **others):
        self.views = [[None] * self.decoder.kv_heads for _ in range(self.decoder.layers)]
        result = self.step(embeds, *rest, **others)
        self.decoder.views = self.views
        last = self.stream.positions.next
        logits = self.decoder.append(embeds, np.arange(last - len(embeds), last))
        if len(result.logits):
            self.errors.append(float(np.abs(logits[-1] - result.logits[-1]).max()))
        return result

    def forget(self, seq):
        """A question is over: its rows go."""
        for head in (head for layer in self.decoder.cache for head in layer):
            head.keep(np.flatnonzero(head.seq < seq))
        self.decoder.count = seq


@pytest.mark.parametrize("reindexed", [False, True], ids=["original", "contiguous"])
def test_logits_equal_the_numpy_decoder(model, checkpoint, reindexed):
    """Before the first re-indexing in the positions that rows had, after it in contiguous ones."""
    per_frame = model.bundle.vision.tokens_per_frame
    with Session.open(
        model, append="all", policy=Anything(share=0.4), budget=12 * per_frame, chunk=2, text_budget=TEXT_BUDGET
    ) as session:
        session._stream.positions.limit = 16 * per_frame + 120 if reindexed else 2048
        shadow = Shadow(checkpoint, model, session)
        for image in frames(40, model):
            session.watch(image)
        for _ in range(2):
            answer = session.ask(QUESTION, max_tokens=12)
            answer.wait()
            shadow.forget(session._stream._seq)
        assert (session.stats.memory.reindexings > 0) == reindexed
        assert session._stream.policy.working.truncated > 0, "some choice was larger than the working set"
    assert len(shadow.errors) > 8
    assert shadow.ragged > 10, "heads looked at different numbers of rows"
    assert max(shadow.errors) < 1e-3


def test_all_of_it_is_full_kv(model):
    """With everything fetched the logits are those of the uncompressed cache."""
    per_frame, found = model.bundle.vision.tokens_per_frame, []
    pictures = list(frames(20, model))
    for policy in (Anything(window=0.2, share=1), "full"):
        with Session.open(
            model, append="all", policy=policy, budget=30 * per_frame, chunk=4, text_budget=TEXT_BUDGET
        ) as session:
            for image in pictures:
                session.watch(image)
            session.flush()
            stream = session._stream
            embeds = model.engine.embed(np.array(model.encode(QUESTION)))
            with stream.question():
                found.append([stream.append_question(embeds), stream.append_text(embeds[:1]), stream.append_text(embeds[1:2])])
            if policy != "full":
                assert stream.policy.offloaded.min() > 10 * per_frame
                assert stream.policy.working.truncated == 0
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


@pytest.mark.parametrize("limit", [2048, 300], ids=["original", "contiguous"])
def test_logits_of_resv_equal_the_numpy_decoder(model, checkpoint, limit):
    """Clusters of a head's own, through the store, before and after a re-indexing."""
    per_frame = model.bundle.vision.tokens_per_frame
    policy = "resv:index=0.3,window=0.3"
    with Session.open(model, append="all", policy=policy, budget=20 * per_frame, chunk=2, text_budget=TEXT_BUDGET) as session:
        session._stream.positions.limit = limit
        shadow = Shadow(checkpoint, model, session)
        for image in frames(60, model):
            session.watch(image)
        answer = session.ask(QUESTION, max_tokens=8)
        answer.wait()
        lost = session._stream.policy.lost
        assert (session.stats.memory.reindexings > 0) == (limit == 300)
    assert len(shadow.errors) > 3
    assert shadow.ragged > 10, "heads looked at different numbers of rows"
    assert max(shadow.errors) < 1e-3
    assert lost == 0
