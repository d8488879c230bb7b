"""ReSV in sessions: what a numpy decoder says that looks at the rows which were chosen."""

import pytest
from pictures import frames
from retrieval.test_oracle import QUESTION, TEXT_BUDGET, Shadow

from edgevlm.runtime.session import Session


@pytest.mark.parametrize(("limit", "prefetch"), [(2048, "off"), (300, "on")], ids=["original", "contiguous"])
def test_logits_equal_the_numpy_decoder(model, checkpoint, limit, prefetch):
    """Clusters of a head's own, through the store, before and after a re-indexing."""
    per_frame = model.bundle.vision.tokens_per_frame
    policy = f"resv:index=0.3,window=0.3,prefetch={prefetch}"
    with Session.open(model, policy=policy, budget=20 * per_frame, chunk=2, text_budget=TEXT_BUDGET) as session:
        session._stream.positions.limit = limit
        shadow = Shadow(checkpoint, model, session)
        for image in frames(60, model):
            session.watch(image)
        answer = session.ask(QUESTION, max_tokens=8)
        answer.wait()
        stats = session._stream.policy.stats
        assert (session.stats.memory.reindexings > 0) == (limit == 300)
    assert len(shadow.errors) > 3
    assert shadow.ragged > 10, "heads looked at different numbers of rows"
    assert max(shadow.errors) < 1e-3
    for phase in ("prefill", "question", "answer"):
        assert 0 < stats.ratio(phase).mean() < 1
    assert stats.lost == 0
