"""Bundles that keep keys and values in fp16 and int8: beside transformers, beside fp32, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner import Runner

from edgevlm.apps.bundles.gptq import export_by_gptq
from edgevlm.errors import BundleError, CacheError, UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.kv_scales import ANSWER, QUESTIONS, RANDOM, in_fp32, measured_scales
from edgevlm.runtime.bundle import MANIFEST, Bundle, hash_file, seal_manifest
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.engine import FramePattern, KVBuffer
from edgevlm.runtime.kv import SCALES, KVScales, codes
from edgevlm.runtime.model import Model

SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llava", {"tower": "clip", "backbone": "llama", "layers": 3, "heads": 4, "kv_heads": 1, "feature_layer": -2}),
    ("llava_onevision", {"layers": 3, "heads": 6, "kv_heads": 2, "side": 5}),
    ("llava_onevision", {"backbone": "qwen3", "biases": True, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 16}),
]
LIMIT = {"fp16": 3e-3, "int8": 0.1}  # root mean square of a logit's error over the logits' deviation


@pytest.mark.parametrize("kv", LIMIT)
@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=lambda value: value if isinstance(value, str) else "")
def test_logits_beside_transformers(exported: Callable[..., Any], family: str, shape: dict[str, Any], kv: str) -> None:
    import transformers

    made = exported(family, **shape, kv=kv)
    name = {"llava": "Llava", "llava_onevision": "LlavaOnevision"}[family]
    load = getattr(transformers, f"{name}ForConditionalGeneration").from_pretrained
    model, runner = load(made.checkpoint, dtype=torch.float32, local_files_only=True).eval(), Runner(made.bundle)
    ids = np.random.default_rng(0).integers(0, 200, 60)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids[None])).logits[0].numpy()
    found = np.concatenate([runner.step(runner.embed(part), range(len(part))).logits for part in np.split(ids, [1, 20, 21])])
    error = float(np.sqrt(np.square(found - expected).mean()) / expected.std())
    print(f"{family} {kv}: error {error:.1e} of the logits' deviation")
    assert error < LIMIT[kv]
    assert kv == "fp16" or error > 1e-5, "codes do round"


@pytest.mark.parametrize(("kv", "error"), [("fp16", 5e-3), ("int8", 1e-4)])
def test_sparse_prefill_of_frame_1_is_dense(exported: Callable[..., Any], kv: str, error: float) -> None:
    """It sees the prefix, frame 0 and itself, so that both graphs must say the same and store the same."""
    made = exported("llava_onevision", layers=5, heads=6, kv_heads=2, side=5, kv=kv, st_spattn_from=1)
    dense, sparse = Runner(made.bundle, 64), Runner(made.bundle, 64)
    spec, p = dense.bundle.decoder, dense.bundle.vision.tokens_per_frame
    rows = [np.random.default_rng(n).standard_normal((n, spec.hidden)).astype(np.float32) for n in (5, p, p)]
    for runner in (dense, sparse):
        for part in rows[:2]:
            runner.step(part, ())
    expected = dense.step(rows[2], range(p)).logits
    pattern = FramePattern(5 + p, np.full((spec.layers, spec.kv_heads, p), -1, np.int64))
    found = sparse.step(rows[2], range(p), sparse.engine.bind(sparse.buffers, variant="st-spattn"), pattern).logits
    assert np.abs(found - expected).max() < error * expected.std()
    for mine, theirs in zip([*dense.keys, *dense.values], [*sparse.keys, *sparse.values], strict=True):
        assert mine.any()
        assert (mine != theirs).mean() < (0.1 if kv == "fp16" else 1e-3), "numbers next to a tie alone may differ"


def test_new_rows_are_rounded_as_the_cache_rounds_them(exported: Callable[..., Any]) -> None:
    """Layer 0's new rows do not depend on the cache: their codes are those of the fp32 decoder's rows."""
    made = exported("llava_onevision", layers=2, heads=6, kv_heads=2, side=5, kv="int8", st_spattn_from=0)
    runner, exact = Runner(made.bundle, 64), Runner(made.bundle, 64)
    scales = runner.bundle.kv_scales()
    assert scales is not None
    exact.bundle = in_fp32(exact.bundle)
    memory = [np.zeros((1, 2, 64, exact.bundle.decoder.head_dim), np.float32) for _ in range(4)]
    buffers = [KVBuffer(k.ctypes.data, v.ctypes.data, k.shape, k.dtype, (k, v)) for k, v in (memory[:2], memory[2:])]
    embeds = np.random.default_rng(0).standard_normal((25, exact.bundle.decoder.hidden)).astype(np.float32)
    runner.step(embeds, ())
    tables = exact.tables(np.arange(25, dtype=np.int32))
    exact.engine.bind(buffers, variant="fp32-kv").step(embeds, *tables, np.zeros(2, np.int32), ())
    for part, found, scale in ((memory[0], runner.keys[0], scales.key[0]), (memory[1], runner.values[0], scales.value[0])):
        difference = np.abs(found[0, :, :25].astype(int) - codes(part[0, :, :25], scale))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 1e-3, "ties alone may differ"


def test_scales_hold_what_was_seen_and_are_the_same_each_time(exported: Callable[..., Any]) -> None:
    bundle = Bundle.load(exported("llava_onevision", layers=2, heads=6, kv_heads=2, side=5, kv="int8").bundle)
    kept, again = bundle.kv_scales(), measured_scales(bundle, threads=1)
    assert kept is not None
    np.testing.assert_allclose(kept.key, again.key, rtol=1e-5)
    np.testing.assert_allclose(kept.value, again.value, rtol=1e-5)
    half = kept.key.shape[-1] // 2
    np.testing.assert_array_equal(kept.key[..., :half], kept.key[..., half:])


def _changed(source: Path, folder: Path, change: Callable[[dict[str, Any], Path], None]) -> Path:
    shutil.copytree(source, folder)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    change(manifest, folder)
    if (folder / SCALES).exists() and SCALES in manifest["files"]:
        manifest["files"][SCALES] = asdict(hash_file(folder / SCALES))
    (folder / MANIFEST).write_bytes(seal_manifest(manifest))
    return folder


def _scales(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, Any], Path], None]:
    return lambda _, folder: np.save(folder / SCALES, change(np.load(folder / SCALES)))


def _halves(array: np.ndarray) -> np.ndarray:
    array[0, 0, 0, 0] *= 2
    return array


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda manifest, _: manifest["files"].pop(SCALES), "is not listed in bundle.json"),
        (_scales(lambda x: x[:, :1]), "and not scales, float32"),
        (_scales(lambda x: 0 * x), "scales that are not above 0"),
        (_scales(lambda x: x * np.nan), "scales that are not above 0"),
        (_scales(_halves), "two scales for the halves of one rotary pair"),
        (lambda manifest, _: manifest["decoder"].update(kv="fp8"), "keeps fp8 keys and this edgevlm knows fp32, fp16, int8"),
    ],
)
def test_a_bundle_whose_scales_do_not_fit_is_refused(exported: Any, tmp_path: Path, change: Any, says: str) -> None:
    made = exported("llava_onevision", layers=2, heads=6, kv_heads=2, side=5, kv="int8")
    with pytest.raises(BundleError, match=says) as refused:
        Bundle.load(_changed(made.bundle, tmp_path / "bundle", change))
    assert "\n" not in str(refused.value)


def test_a_bundle_that_does_not_say_is_of_fp32(exported: Any, tmp_path: Path) -> None:
    made = exported("llava_onevision", layers=2, heads=6, kv_heads=2, side=5)
    bundle = Bundle.load(_changed(made.bundle, tmp_path / "old", lambda manifest, _: manifest["decoder"].pop("kv")))
    assert bundle.decoder.kv == "fp32"
    assert bundle.kv_scales() is None


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"\x93NUMPY\x01\x00v\x00"])
def test_scales_that_are_none_are_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "kv-scales.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"^(cannot be read|holds several arrays)"):
        KVScales.load(tmp_path / "kv-scales.npy", (2, 2, 8))
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1099511627776, 2, 8), }"
    np_header = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    (tmp_path / "kv-scales.npy").write_bytes(np_header)
    with pytest.raises(ValueError, match="cannot be read"):
        KVScales.load(tmp_path / "kv-scales.npy", (1 << 40, 2, 8))


def test_memory_of_another_precision_is_refused(exported: Any) -> None:
    shape = {"layers": 2, "heads": 6, "kv_heads": 2, "side": 5}
    codes_runner, plain = (
        Runner(exported("llava_onevision", **shape, kv="int8").bundle),
        Runner(exported("llava_onevision", **shape).bundle),
    )
    with pytest.raises(CacheError, match="keeps int8 keys and values, not float32"):
        codes_runner.engine.bind(plain.buffers)
    with pytest.raises(CacheError, match="keeps float32 keys and values, not int8"):
        plain.engine.bind(codes_runner.buffers)
    with pytest.raises(UserError, match="has no fp32-kv decoder graph"):
        plain.engine.bind(plain.buffers, variant="fp32-kv")


@pytest.mark.parametrize("export", [partial(export_checkpoint, kv="int8"), partial(export_by_gptq, force=False)])
def test_a_missing_engine_is_noticed_before_anything_is_written(
    exported: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Callable[..., Any]
) -> None:
    made, steps = exported("llava", layers=1, heads=4, kv_heads=2), list[str]()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "edgevlm.engines.onnxruntime_cpu", raising=False)
    with pytest.raises(UserError, match="engine onnxruntime-cpu needs the package onnxruntime, which is not installed"):
        export(made.checkpoint, tmp_path / "out", precision="int4", progress=steps.append)
    assert set(steps) <= {"reading the vision tower"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", ["llava_onevision", "smolvlm"])
def test_too_few_positions_for_scales_are_noticed_before_anything_is_written(
    exported: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    """At one position fewer than there must be; with that one, there are scales."""
    checkpoint, steps = Path(shutil.copytree(exported(family, layers=1).checkpoint, tmp_path / "checkpoint")), list[str]()
    config = json.loads((checkpoint / "config.json").read_text())

    def export(positions: int) -> None:
        (checkpoint / "config.json").write_text(json.dumps(config | {"edgevlm_trained_length": positions}))
        export_checkpoint(checkpoint, tmp_path / "out", kv="int8", progress=steps.append, camera=(30, 40))

    fewest = _fewest(exported(family, layers=1).bundle)
    with pytest.raises(UserError, match=rf"the model's {fewest - 1} positions hold no frame and question, .*--kv fp16"):
        export(fewest - 1)
    assert "writing the vision tower" not in steps
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    export(fewest)
    assert Bundle.load(tmp_path / "out").limit == fewest


def _fewest(folder: Path) -> int:
    """Positions of the prefix, a frame, the longest question and its answer, row by row."""
    model = Model.load(folder)
    chat = Chat(model.bundle.chat)
    rows = len(model.encode(chat.prefix)) + model.rows_per_frame + len(model.closing)
    rows += max(RANDOM, *(len(model.encode(chat.suffix([], question))) for question in QUESTIONS)) + ANSWER
    model.close()
    return rows
