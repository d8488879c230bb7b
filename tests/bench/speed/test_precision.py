"""The bench of precisions on a tiny checkpoint: what it says of float32 itself, and of numbers that are rounded."""

import json
import shutil

import checkpoints
import numpy as np
import pytest
from typer.testing import CliRunner

from edgevlm.bench.speed import precision as bench
from edgevlm.calib.accuracy.policy_divergence import divergence
from edgevlm.calib.activations import passages
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.runtime.model import Model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("precision") / "checkpoint"
    return checkpoints.make_checkpoint(folder, layers=2, heads=4, kv_heads=2, side=2, vision_layers=1, scale=4.0)


@pytest.fixture(scope="module")
def lines(checkpoint):
    command = [
        "bench",
        "speed",
        "precision",
        "--model",
        str(checkpoint),
        "--precisions",
        "fp32,fp16,int8,int4,int4+gptq",
        "--tokens",
    ]
    done = CliRunner().invoke(app, [*command, "140", "--threads", "1", "--json"], catch_exceptions=False)
    return {line["precision"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_a_checkpoint_that_is_rounded_already_has_nothing_to_be_compared_with(checkpoint, tmp_path):
    packed = shutil.copytree(checkpoint, tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match="awq has rounded it to 4 bits, and there is no fp32 to compare with; give the"
    ) as error:
        next(bench.weights([packed], ["fp32", "int8"], 140, 1, progress=lambda what: pytest.fail(f"began {what}")))
    assert "--rounding" not in str(error.value)


def test_float32_is_itself_and_the_rest_is_near(lines):
    assert list(lines) == ["fp32", "fp16", "int8", "int4", "int4+gptq"]
    assert (lines["fp32"]["top1"], lines["fp32"]["kl"], lines["fp32"]["size_over_fp32"]) == (1, 0, 1)
    for line in lines.values():
        assert (line["bench"], line["model"], line["tokens"], line["threads"]) == ("precision", "checkpoint", 140, 1)
        assert line["ms_per_token"] > 0 < line["fp32_ms_per_token"]
    assert lines["fp16"]["kl"] <= lines["int8"]["kl"] < lines["int4"]["kl"] < 10
    assert lines["int4"]["top1"] < 1
    assert lines["int4+gptq"]["kl"] != lines["int4"]["kl"]
    sizes = [lines[name]["decoder_mb"] for name in ("int4", "int8", "fp16", "fp32")]
    assert sizes == sorted(sizes)


def test_what_is_compared(checkpoint, tmp_path):
    """Against one pass over each text by itself."""
    from edgevlm.export import export_checkpoint

    models = [
        Model.load(export_checkpoint(checkpoint, tmp_path / name, precision=name), threads=1) for name in ("fp32", "int4")
    ]
    plain, other = (bench.Forced(model, model.bundle, 500) for model in models)
    texts = [list(range(10, 140)), list(range(200, 260))]

    def whole(forced, ids):
        forced.empty()
        return forced.logits(ids)

    wanted, found = ([whole(forced, ids) for ids in texts] for forced in (plain, other))
    result = bench.compare_weights(plain, other, texts, np.concatenate(wanted))
    same = [one.argmax(1) == two.argmax(1) for one, two in zip(wanted, found, strict=True)]
    nats = [divergence(one, two) for one, two in zip(wanted, found, strict=True)]
    assert result["tokens"] == 190
    assert result["top1"] == pytest.approx(np.concatenate(same).mean(), abs=0.02)
    assert result["kl"] == pytest.approx(np.concatenate(nats).mean(), rel=0.1)
    sizes = [bench.weight_bytes(forced.bundle) for forced in (other, plain)]
    assert result["size_over_fp32"] == round(sizes[0] / sizes[1], 3) < 1


def test_a_rotated_checkpoint_computes_the_same(checkpoint, tmp_path):
    from edgevlm.bench.rotation import rotated
    from edgevlm.export import export_checkpoint

    turned = rotated(checkpoint, tmp_path / "turned")
    models = [Model.load(export_checkpoint(each, tmp_path / f"{n}"), threads=1) for n, each in enumerate((checkpoint, turned))]
    ids = list(range(10, 60))
    one, two = (bench.Forced(model, model.bundle, 60).logits(ids) for model in models)
    np.testing.assert_allclose(two, one, atol=2e-4 * np.abs(one).max())
    tables = [np.load(model.bundle.path / "embedding.npy") for model in models]
    assert np.abs(tables[0] - tables[1]).max() > 0.1 * np.abs(tables[0]).max()


def test_llama_cpps_quantizations_of_the_same_weights(checkpoint):
    pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python")
    lines = list(bench.weights([checkpoint], ["int8"], 60, 1, ["llama.cpp"], rotate=True))
    assert [line["precision"] for line in lines] == ["int8", "llama.cpp Q4_K_M", "llama.cpp Q5_K_M"]
    assert all(line["rotated"] and line["tokens"] == 60 for line in lines)
    assert all(0 < line["kl"] < 0.1 for line in lines)
    assert lines[1]["decoder_mb"] <= lines[2]["decoder_mb"]
    with pytest.raises(UserError, match=r"precision compares with llama\.cpp"):
        list(bench.weights([checkpoint], ["int8"], 60, 1, ["openvino"]))


def test_texts_for_measuring_are_not_those_for_calibrating():
    encode = Model.load("demo", threads=1).encode
    measured, calibrated = (passages(1100, 500, encode, held_out=held_out) for held_out in (True, False))
    assert [len(ids) for ids in measured] == [500, 500, 100]
    assert [len(ids) for ids in calibrated] == [500, 500, 100]
    assert not {tuple(ids[:50]) for ids in measured} & {tuple(ids[:50]) for ids in calibrated}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("int3", r"'int3' is not known; did you mean 'int"),
        ("int4+awq", r"the only rounding is gptq; write int4\+gptq"),
        ("fp16+gptq", r"not fp16; give --precision int4"),
    ],
)
def test_a_precision_that_cannot_be(checkpoint, names, says):
    with pytest.raises(UserError, match=says):
        next(bench.weights([checkpoint], names.split(","), 10, 1))
