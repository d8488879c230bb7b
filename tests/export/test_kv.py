"""Bundles that keep keys and values in fp16 and int8: beside transformers, beside fp32, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner import Runner

from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu
from edgevlm.errors import BundleError
from edgevlm.export.kv_scales import measured_scales
from edgevlm.runtime.bundle import MANIFEST, Bundle, hash_file, seal_manifest
from edgevlm.runtime.engine import KVBuffer
from edgevlm.runtime.kv import SCALES, codes

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


def test_new_rows_are_rounded_as_the_cache_rounds_them(exported: Callable[..., Any]) -> None:
    """Layer 0's new rows do not depend on the cache: their codes are those of the fp32 decoder's rows."""
    made = exported("llava_onevision", layers=2, heads=6, kv_heads=2, side=5, kv="int8", st_spattn_from=0)
    runner, exact = Runner(made.bundle, 64), Runner(made.bundle, 64)
    scales = runner.bundle.kv_scales()
    assert scales is not None
    exact.bundle = exact.bundle.in_fp32()
    memory = [np.zeros((1, 2, 64, exact.bundle.decoder.head_dim), np.float32) for _ in range(4)]
    buffers = [KVBuffer(k.ctypes.data, v.ctypes.data, k.shape, k.dtype, (k, v)) for k, v in (memory[:2], memory[2:])]
    embeds = np.random.default_rng(0).standard_normal((25, exact.bundle.decoder.hidden)).astype(np.float32)
    runner.step(embeds, ())
    tables = exact.tables(np.arange(25, dtype=np.int32))
    OnnxRuntimeCpu(exact.bundle, threads=1).bind(buffers).step(embeds, *tables, np.zeros(2, np.int32), ())
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


def _scales(change: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any], Path], None]:
    return lambda _, folder: np.save(folder / SCALES, change(np.load(folder / SCALES)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda manifest, _: manifest["files"].pop(SCALES), "is not listed in bundle.json"),
        (_scales(lambda x: x[:, :1]), "must be scales, float32"),
        (_scales(lambda x: 0 * x), "scales must be finite and above 0"),
        (_scales(lambda x: x * np.nan), "scales must be finite and above 0"),
        (
            _scales(lambda x: x * (np.arange(x.size) + 1).reshape(x.shape).astype(x.dtype)),
            "halves of a rotary pair must have the same scale",
        ),
        (lambda manifest, _: manifest["decoder"].update(kv="fp8"), "uses fp8 keys, but this edgevlm supports fp32, fp16, int8"),
    ],
)
def test_a_bundle_whose_scales_do_not_fit_is_refused(exported: Any, tmp_path: Path, change: Any, says: str) -> None:
    made = exported("llava_onevision", layers=2, heads=6, kv_heads=2, side=5, kv="int8")
    with pytest.raises(BundleError, match=says) as refused:
        Bundle.load(_changed(made.bundle, tmp_path / "bundle", change))
    assert "\n" not in str(refused.value)
