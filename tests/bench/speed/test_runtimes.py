"""Runtimes of the benches: they compute the same from the same weights, and take turns."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from edgevlm.bench.seeded import SHAPES, SeededTensors, TextModel, open_text_model
from edgevlm.bench.speed.decoder import Append, Timing, pairs
from edgevlm.bench.speed.runtimes import RUNTIMES
from edgevlm.bench.timing import Job, Took, figures, ratio, take_turns
from edgevlm.errors import UserError
from edgevlm.export.backbones import DecoderShape
from edgevlm.runtime.model import Model

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


def test_the_demo_has_the_shape_that_is_measured():
    model = Model.load("demo")
    spec = model.bundle.decoder
    model.close()
    shape = SHAPES["demo"][1]
    for name in ("layers", "heads", "kv_heads", "head_dim", "hidden", "vocab", "rope_theta", "model_limit"):
        assert getattr(shape, name) == getattr(spec, name)


def test_jobs_take_turns_and_the_first_round_does_not_count():
    order = []
    jobs = {name: Job(lambda name=name: order.append(name), 2, lambda: order.append("after")) for name in "ab"}
    took = take_turns(jobs, 2)
    assert order == ["a", "after", "b", "after"] * 3
    assert [len(times) for times in took.values()] == [2, 2]


def test_medians_quartiles_and_ratios():
    ours, others = [Took(1, 2), Took(2, 2), Took(6, 2)], [Took(2, 1), Took(2, 1), Took(2, 1)]
    assert figures("token", ours) == {"ms_per_token": 2, "low": 1.5, "high": 4, "cpu_ms_per_token": 2}
    assert ratio(ours, others) == {"ratio": 1, "low": 0.75, "high": 2, "cpu_ratio": 2}
    assert ratio(ours[:1], others[:1])["low"] == 0.5


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


def test_a_shape_that_llama_cpp_does_not_take_is_refused():
    if why := RUNTIMES["llama.cpp"].lacks("fp32"):
        pytest.skip(why)
    model = TextModel("tiny", "qwen2", replace(SHAPE, hidden=64), SeededTensors(0))
    with pytest.raises(UserError, match="cannot load tiny; leave it out of --against"):
        RUNTIMES["llama.cpp"].start(model, "fp32", 1, 64)
