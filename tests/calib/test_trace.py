"""What is observed of a clip is what transformers computes over the same rows in one forward."""

import numpy as np
import pytest
import torch
from pictures import frames

from edgevlm.calib import Clip
from edgevlm.calib.trace import WINDOW, ClipTracer

QUESTIONS = ("what color was the square?", "how many are there now?")


@pytest.fixture(scope="module")
def oracle(checkpoint):
    import transformers

    loaded = transformers.LlavaOnevisionForConditionalGeneration.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=torch.float32
    )
    return loaded.model.language_model.eval()


def clip(model, count, name="clip", questions=QUESTIONS):
    return Clip(name, frames(count, model), questions)


def test_attention_norms_and_mass_are_those_of_transformers(model, oracle, monkeypatch):
    """Every row that was appended, in one forward without a cache: a question's sees the prefix, the frames and itself."""
    appended = []
    bind = model.engine.bind

    def recording(*of):
        decoder = bind(*of)
        step = decoder.step

        def recorded(embeds, *rest, **others):
            appended.append(np.array(embeds))
            return step(embeds, *rest, **others)

        decoder.step = recorded
        return decoder

    monkeypatch.setattr(model.engine, "bind", recording)
    seen = ClipTracer(model, 10, QUESTIONS)(clip(model, 10))
    *memory, first, second = appended
    prefix, vision = len(memory[0]), sum(map(len, memory[1:]))
    closing, layers, w = len(model.closing), len(seen.norms), min(WINDOW, vision)
    total = np.zeros((layers, vision))
    for question in (first, second):
        rows = torch.from_numpy(np.concatenate([*memory, question]))[None]
        with torch.no_grad():
            out = oracle(inputs_embeds=rows, output_attentions=True, use_cache=True)
        for layer in range(layers):
            attention = out.attentions[layer][0].double().numpy()  # [heads, rows, rows]
            total[layer] += attention[:, prefix + vision + closing :, prefix : prefix + vision].mean((0, 1)) / 2
    for layer in range(layers):
        heads, kv_heads = attention.shape[0], seen.norms[layer].shape[0]
        assert seen.attention[layer] == pytest.approx(total[layer], abs=1e-5)
        value = out.past_key_values.layers[layer].values[0, :, prefix : prefix + vision].double()
        assert seen.norms[layer] == pytest.approx(value.norm(dim=2).numpy(), rel=1e-4)
        attention = out.attentions[layer][0].double().numpy()
        newest = attention[:, prefix + vision - w : prefix + vision, prefix : prefix + vision - w]
        mass = newest.sum(1).reshape(kv_heads, heads // kv_heads, -1).sum(1)
        assert seen.mass[layer] == pytest.approx(mass, abs=1e-4)
