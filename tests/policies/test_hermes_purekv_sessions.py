"""HERMES and PureKV in sessions on a tiny random model: the cap, guidance and questions without a trace, positions."""

import checkpoints
import numpy as np
import pytest
from memory import arena
from pictures import frames

from edgevlm.calib.demo.world import World
from edgevlm.export import export_checkpoint
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies.layer import Compression, Layer
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


@pytest.mark.parametrize("present", [1, 2])
def test_a_question_within_a_chunk_leaves_no_trace_where_only_changes_enter(present):
    def kept(asks):
        world, append = World(3), f"changed:tau=0.9999,present={present}"
        with Session.open("demo", policy="hermes", budget=128, chunk=4, append=append) as session:
            for number in range(60):
                session.watch(world.step())
                if asks and number % 3 == 1:
                    session.ask("how many objects are there now?").wait()
            session.flush()
            return arena(session._stream)

    assert kept(asks=True) == kept(asks=False)


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


def test_attention_of_texts_is_what_transformers_computes(model):
    """Of all guidance texts, and of the first alone, it equals the attention weights of one forward over everything."""
    import torch
    from transformers import AutoModelForImageTextToText

    per_frame, given = model.bundle.vision.tokens_per_frame, []
    with Session.open(model, append="all", policy="hermes", budget=12 * per_frame, chunk=3, text_budget=TEXT_BUDGET) as session:
        stream = session._stream
        append = stream.append
        stream.append = lambda rows, *rest: given.append(rows) or append(rows, *rest)
        for image in frames(9, model):
            session.watch(image)
        guidance, needs = stream._guide(), stream.policy.needs
        shared = Compression(texts=needs.guidance, guide=lambda: guidance)
        layers = [Layer(stream.cache, index, shared=shared) for index in needs.guidance_layers]
        order, rows = np.argsort(layers[0].seq[0]), sum(guidance.rows)
        found = [
            (layer.index, texts, layer.attention_of(*texts))
            for layer in layers
            for texts in (needs.guidance, needs.guidance[:1])
        ]
        embeds = [model.engine.embed(np.asarray(session._chat.prefix, np.int64))]
    path = model.bundle.path.parent / "checkpoint"
    hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        everything = torch.from_numpy(np.concatenate(embeds + given))[None]
        weights = hf.model.language_model(inputs_embeds=everything, output_attentions=True).attentions
    for layer, texts, mine in found:
        asked = weights[layer][0, :, -rows:, :-rows][:, : sum(guidance.rows[: len(texts)])].sum(1)
        theirs = asked.reshape(len(mine), -1, asked.shape[1]).sum(1).numpy()
        np.testing.assert_allclose(mine[:, order], theirs, atol=2e-5, rtol=1e-3)
