"""HERMES and PureKV in sessions on a tiny random model: the cap, guidance and questions without a trace, positions."""

import checkpoints
import numpy as np
import pytest
from memory import arena
from pictures import frames

from edgevlm.export import export_checkpoint
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies.hermes import guidance_attention
from edgevlm.runtime.session import Session, TextBudget

TEXT_BUDGET = TextBudget(16, 64, 8)
POLICIES = [
    "hermes",
    "hermes:target=0.6,summary=off",
    "purekv:window=6",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Ten layers: one shallow, six middle, three deep."""
    folder = tmp_path_factory.mktemp("ten") / "checkpoint"
    checkpoints.make_deep(folder)
    loaded = Model.load(export_checkpoint(folder, folder.parent / "bundle", kv="fp32"), threads=1)
    yield loaded
    loaded.close()


def test_guidance_leaves_no_trace(model):
    per_frame = model.bundle.vision.tokens_per_frame
    with Session.open(model, append="all", policy="hermes", budget=6 * per_frame, chunk=2, text_budget=TEXT_BUDGET) as session:
        for image in frames(20, model):
            session.watch(image)
        stream = session._stream
        before, held = arena(stream), stream.cache.lengths
        guidance = stream._guide()
        assert arena(stream) == before
        assert guidance.rows == tuple(len(model.encode(text)) for text in stream.policy.needs.guidance)
        with stream.question():
            stream.append_text(np.concatenate(stream._guidance))
            for layer, keys in guidance.keys.items():
                np.testing.assert_array_equal(keys, stream.cache.key(layer)[:, held[layer] :])
                assert guidance.queries[layer].shape == (6, sum(guidance.rows), 8)
        assert arena(stream) == before
        assert stream.cache.capacities.max() >= stream.prefix + 6 * per_frame + sum(guidance.rows)


def test_guidance_attention_is_what_transformers_computes(model):
    """Eq. 2 on the memory of a stream equals the attention weights of one forward over everything."""
    import torch
    from transformers import AutoModelForImageTextToText

    per_frame, given = model.bundle.vision.tokens_per_frame, []
    with Session.open(model, append="all", policy="hermes", budget=12 * per_frame, chunk=3, text_budget=TEXT_BUDGET) as session:
        stream = session._stream
        append = stream.append
        stream.append = lambda rows, *rest: given.append(rows) or append(rows, *rest)
        for image in frames(9, model):
            session.watch(image)
        guidance, cache = stream._guide(), stream.cache
        found = {
            layer: guidance_attention(guidance.queries[layer], guidance.keys[layer], cache.key(layer), cache.seq(layer))
            for layer in stream.policy.needs.guidance_layers
        }
        order, rows = np.argsort(cache.seq(0)[0]), sum(guidance.rows)
        embeds = [model.engine.embed(np.asarray(session._chat.prefix, np.int64))]
    path = model.bundle.path.parent / "checkpoint"
    hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        everything = torch.from_numpy(np.concatenate(embeds + given))[None]
        weights = hf.model.language_model(inputs_embeds=everything, output_attentions=True).attentions
    for layer, mine in found.items():
        theirs = weights[layer][0, :, -rows:, :-rows].mean((0, 1)).numpy()
        np.testing.assert_allclose(mine[order], theirs, atol=2e-6, rtol=1e-3)
