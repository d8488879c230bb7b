"""After 30 compressions and several re-indexings: the same greedy tokens as a readable numpy decoder that does the same."""

import pytest
from pictures import frames
from reference_decoder import Shadow

from edgevlm.runtime.session import Session, TextBudget

QUESTION = "what color was the square?"


LAZY = ("infinipot-v", "sliding-window", "streaming-llm", "simple-stream", "uniform", "random", "snapkv:window=8", "h2o")


@pytest.mark.parametrize(("reindexing", "policy"), [*(("lazy", policy) for policy in LAZY), ("eager", "infinipot-v")])
def test_greedy_tokens_equal_the_numpy_decoder(model, checkpoint, policy, reindexing):
    per_frame = model.bundle.vision.tokens_per_frame
    room = TextBudget(16, 64, 16)
    with Session.open(
        model, append="all", policy=policy, budget=6 * per_frame, chunk=2, reindexing=reindexing, text_budget=room
    ) as session:
        stream = session._stream
        stream.positions.limit = 240
        shadow = Shadow(checkpoint, stream, session._chat.prefix)
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
