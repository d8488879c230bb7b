"""Runtimes of the benches: they compute the same from the same weights, and take turns."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from edgevlm.bench.seeded import SeededTensors, TextModel, open_text_model
from edgevlm.bench.speed.decoder import Append, Timing, pairs
from edgevlm.bench.speed.runtimes import RUNTIMES
from edgevlm.bench.timing import Took
from edgevlm.export.backbones import DecoderShape

SHAPE = DecoderShape(
    layers=2, heads=4, kv_heads=2, head_dim=32, hidden=128, intermediate=96, vocab=96, norm_eps=1e-6, rope_theta=1e4,
    model_limit=256, tied=True,
)  # fmt: skip
IDS = [5, 9, 9, 31, 2, 77]
OTHERS = [name for name in RUNTIMES if name != "edgevlm"]


def logits(name, model, precision, kv="fp32"):
    """Of IDS in two appends; what was forgotten in between leaves nothing behind."""
    runtime = RUNTIMES[name].start(model, precision, 1, 64, kv)
    runtime.hold(0)
    whole = runtime.append(IDS)
    runtime.forget()
    assert np.array_equal(whole, runtime.append(IDS)), name
    runtime.close()
    return whole


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("backbone", ["llama", "qwen2", "qwen3"])
def test_others_decode_the_same_weights(name, backbone):
    if why := RUNTIMES[name].lacks("fp32"):
        pytest.skip(why)
    shape = replace(SHAPE, head_norms=backbone == "qwen3", tied=backbone != "llama")
    model = TextModel("tiny", backbone, shape, SeededTensors(0))
    for precision, kv in product(set(RUNTIMES[name].precisions) & {"fp32", "int8", "int4"}, RUNTIMES[name].kv):
        ours, theirs = (logits(runtime, model, precision, kv) for runtime in ("edgevlm", name))
        cosine = float(ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs))
        is_exact = precision == "fp32" and kv != "int8"
        rounds_otherwise = name.startswith("openvino") and precision == "int4"  # with zero points; each is .96 from float32
        assert cosine > (0.999999 if is_exact else 0.9 if rounds_otherwise else 0.995), (precision, cosine)
        if is_exact:
            close = 1e-4 if name == "transformers" else 1e-2  # llama.cpp computes parts of attention in float16
            np.testing.assert_allclose(ours, theirs, atol=close)


def test_a_checkpoint_of_text_alone_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, tie_word_embeddings=False,
    )  # fmt: skip
    saved = transformers.LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path)
    model = open_text_model(str(tmp_path))
    assert (model.backbone, model.shape.heads, model.shape.kv_heads, model.shape.tied) == ("llama", 4, 2, False)
    import torch

    with torch.no_grad():
        wanted = saved.eval()(torch.tensor([IDS])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits("edgevlm", model, "fp32"), wanted, atol=1e-4)


def test_results_are_compared_by_memory_and_then_at_their_fastest():
    def result(runtime, kv, took, work):
        return Timing(runtime, "fp32", kv, work, [Took(took, took)])

    near, far = Append(1), Append(9)
    ours = [result("edgevlm", "fp32", 2, near), result("edgevlm", "fp16", 3, near), result("edgevlm", "fp32", 2, far)]
    other = [
        result("b", "fp32", 4, near),
        result("b", "fp16", 1, near),
        result("b", "fp32", 4, far),
        result("c", "fp32", 9, near),
    ]
    assert list(pairs([*ours, *other])) == [
        (ours[0], other[0]), (ours[1], other[1]), (ours[0], other[1]), (ours[0], other[3]), (ours[2], other[2]),
    ]  # fmt: skip
