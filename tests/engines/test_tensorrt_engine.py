"""The TensorRT backend over a TensorRT that is ONNX Runtime: its numbers are those of the CPU's, step by step.

What is the adapter's own is real: addresses, shapes, lengths, pieces, the rows written after a call, probes, recorded calls.
The device's memory is the host's and its streams are late (fake_cuda.py); TensorRT's demands are made (fake_tensorrt.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeDriver
from fake_tensorrt import World
from numpy.typing import NDArray
from runner import Runner
from trt_world import build, device_memory, faked

from edgevlm.errors import CacheError, CacheFull, UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import load_engine

CAPACITY = 96
PROBES = (1, 0)
OLD, NEW = ("tensorrt-10.3", "10.3.0"), ("tensorrt-10.15", "10.16.1.11")
SHAPES: dict[str, dict[str, Any]] = {
    "llava": {"tower": "clip", "backbone": "llama", "biases": True, "layers": 2, "heads": 6, "kv_heads": 6, "hidden": 96},
    "llava_next_video": {"tower": "clip", "backbone": "qwen3", "layers": 2, "heads": 6, "kv_heads": 1, "head_dim": 24},
    "llava_onevision": {"layers": 3, "heads": 6, "kv_heads": 2, "tied": True},
    "smolvlm": {"num_hidden_layers": 3},
    "qwen2_vl": {"num_hidden_layers": 3, "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112, "tied": True},
    "qwen2_5_vl": {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "depth": 3},
    "qwen3_vl": {"num_hidden_layers": 3, "head_dim": 32},  # DeepStack: rows of frames are wider than those of text
}
CASES = [(family, *which, "fp32") for family in SHAPES for which in (OLD, NEW)]
CASES += [("llava", *NEW, "fp16"), ("smolvlm", *OLD, "fp16")]
MOST = {"fp32": 1e-4, "fp16": 2e-2}  # of logits; fp16: products of attention are rounded in another order


@dataclass
class Pair:
    """The same bundle on both backends, with the same rows in both memories."""

    bundle: Bundle
    driver: FakeDriver
    world: World
    engine: Any
    decoder: Any
    memory: list[NDArray]  # keys, then values, of the device
    cpu: Runner
    kv: str

    def step(self, rows: NDArray, logit_rows: Sequence[int] = (-1,), decoder: Any = None) -> Any:
        """Append on both, compare all there is, and return what the device gave."""
        tables = self.cpu.tables(np.arange(self.cpu.position, self.cpu.position + len(rows), dtype=np.int32))
        past = self.cpu.past_len.copy()
        found = (decoder or self.decoder).step(rows, *tables, past, logit_rows)
        expected = self.cpu.step(rows, logit_rows)
        assert found.logits.shape == expected.logits.shape
        assert found.logits.dtype == np.float32
        assert np.abs(found.logits - expected.logits).max(initial=0) < MOST[self.kv]
        assert sorted(found.probes) == sorted(expected.probes)
        for layer, queries in found.probes.items():
            assert queries.shape == expected.probes[layer].shape
            assert np.abs(queries - expected.probes[layer]).max() < MOST[self.kv]
        self.same_memory()
        return found

    def same_memory(self) -> None:
        """The valid rows of every layer are the same numbers."""
        for index, (ours, theirs) in enumerate(zip(self.memory, [*self.cpu.keys, *self.cpu.values], strict=True)):
            held = self.cpu.past_len[index % len(self.cpu.past_len)]
            difference = ours[:, :, :held].astype(np.float32) - theirs[:, :, :held].astype(np.float32)
            assert np.abs(difference).max(initial=0) < MOST[self.kv]

    def evict(self, seed: int) -> None:
        """Other rows go in each layer and head, another number in each layer, and leave NaN, which nothing may read."""
        rng = np.random.default_rng(seed)
        for layer, held in enumerate(self.cpu.past_len.copy()):
            keep = int(rng.integers(1, held + 1))
            self.cpu.past_len[layer] = keep
            for head in range(self.bundle.decoder.kv_heads):
                kept = rng.permutation(held)[:keep]
                for memory in self._of(layer):
                    memory[0, head, :keep] = memory[0, head, kept]
                    memory[0, head, keep:] = np.nan

    def _of(self, layer: int) -> list[NDArray]:
        layers = len(self.cpu.past_len)
        return [self.memory[layer], self.memory[layers + layer], self.cpu.keys[layer], self.cpu.values[layer]]

    def rows(self, count: int, seed: int = 0, wide: bool = False) -> NDArray:
        width = self.bundle.decoder.row_width if wide else self.bundle.decoder.hidden
        return (np.random.default_rng(seed).standard_normal((count, width)) * 0.2).astype(np.float32)


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def pair(request: pytest.FixtureRequest, exported: Any) -> Iterator[Pair]:
    family, profile, version, kv = request.param
    with faked(version) as world:
        yield make(exported, world, family, profile, kv, **SHAPES[family])


@pytest.fixture
def llava(exported: Any) -> Iterator[Pair]:
    with faked(OLD[1]) as world:
        yield make(exported, world, "llava", OLD[0], "fp32")


@pytest.fixture(params=[OLD, NEW], ids=["10.3", "10.15"])
def either(request: pytest.FixtureRequest, exported: Any) -> Iterator[Pair]:
    with faked(request.param[1]) as world:
        yield make(exported, world, "llava", request.param[0], "fp32")


def make(exported: Any, world: World, family: str, profile: str, kv: str, **shape: Any) -> Pair:
    from edgevlm.engines.tensorrt.engine import TensorRT

    bundle, driver = Bundle.load(exported(family, profile=profile, kv=kv, **shape).bundle), FakeDriver()
    build(bundle, driver, CAPACITY)
    engine = TensorRT(bundle, driver=driver)  # type: ignore[arg-type]
    buffers, keys, values = device_memory(bundle, driver, CAPACITY)
    cpu = Runner(exported(family, kv=kv, **shape).bundle, CAPACITY, PROBES)
    return Pair(bundle, driver, world, engine, engine.bind(buffers, PROBES), [*keys, *values], cpu, kv)


def test_every_step_is_that_of_onnx_runtime(pair: Pair) -> None:
    """Prefix, chunks, tokens and a question, with evictions in between: logits, probes and memory after each."""
    pair.step(pair.rows(7, 1))
    pair.step(pair.rows(30, 2, wide=True), ())
    for seed in range(3, 7):
        pair.step(pair.rows(1, seed))
    pair.evict(7)
    pair.step(pair.rows(17, 8, wide=True), ())
    pair.step(pair.rows(1, 9), ())
    pair.evict(10)
    pair.step(pair.rows(9, 11), (0, 4, -1, 4))
    for seed in range(12, 16):
        pair.step(pair.rows(1, seed))
    assert len(set(pair.cpu.past_len)) > 1


def test_long_calls_go_in_by_pieces(either: Pair) -> None:
    """A chunk, and rows whose logits are all wanted, longer than the engine's largest calls."""
    either.decoder._most |= {"chunk": 9, "question": 5}
    either.step(either.rows(31, 1), ())
    either.evict(2)
    either.step(either.rows(14, 3), range(14))
    either.step(either.rows(13, 4), (12, 0, 5, -1))
    either.step(either.rows(20, 5), (3,))
    either.step(either.rows(1, 6), (-1, 0))


def test_two_streams_on_one_engine_do_not_meet(either: Pair) -> None:
    buffers, *_ = device_memory(either.bundle, either.driver, CAPACITY)
    other, past = either.engine.bind(buffers), np.zeros(either.bundle.decoder.layers, np.int32)
    for count in (5, 1, 1, 3, 1):
        either.step(either.rows(count, count))
        other.step(either.rows(count + 1, 99), *either.cpu.tables(np.arange(count + 1, dtype=np.int32)), past)
        past += count + 1


def test_frames_become_the_same_features(pair: Pair) -> None:
    vision = pair.bundle.vision
    pair.engine._vision.most = lambda name: (2,)
    for frames in (0, 1, 3, 5):
        pixels = np.random.default_rng(frames).standard_normal((frames, 3, *vision.size)).astype(np.float32)
        found, expected = pair.engine.encode(pixels), pair.cpu.engine.encode(pixels)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max(initial=0) < 1e-4
    with pytest.raises(ValueError, match="pixels must be float32"):
        pair.engine.encode(np.zeros((1, 3, 5, 5), np.float32))


def test_a_step_that_does_not_fit_changes_nothing(llava: Pair) -> None:
    llava.step(llava.rows(5))
    before = [array.copy() for array in llava.memory]
    tables = llava.cpu.tables(np.arange(4, dtype=np.int32))
    with pytest.raises(CacheFull, match=f"layer 1 holds {CAPACITY - 3} of {CAPACITY} rows; 4 more do not fit"):
        llava.decoder.step(llava.rows(4), *tables, np.array([0, CAPACITY - 3, 0], np.int32))
    with pytest.raises(CacheError, match="embeds must be"):
        llava.decoder.step(llava.rows(4)[:, :7], *tables, np.zeros(3, np.int32))
    with pytest.raises(CacheError, match="does not support patterns"):
        llava.decoder.step(llava.rows(4), *tables, np.zeros(3, np.int32), (), object())
    assert all((old == array).all() for old, array in zip(before, llava.memory, strict=True))


def test_engines_that_are_not_there_or_damaged(exported: Any, tmp_path: Path) -> None:
    from_ = exported("llava", profile=OLD[0], kv="fp32").bundle
    folder = Path(shutil.copytree(from_, tmp_path / "bundle", ignore=shutil.ignore_patterns("engines")))
    bundle, driver = Bundle.load(folder), FakeDriver()

    def load() -> Any:
        return load_engine("tensorrt", bundle, driver=driver, threads=2)

    with faked(OLD[1]) as world:
        with pytest.raises(
            UserError, match=rf"has no engines for Orin and TensorRT 10\.3\.0; build them \(edgevlm build {folder}\)"
        ):
            load()
        made = build(bundle, driver, CAPACITY)
        load().close()
        plan = Path(made[1].path)
        content = plan.read_bytes()
        plan.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match=r"is damaged .*build it again"):
            load()
        plan.write_bytes(content)
        world.errors = ["the engine plan file is not compatible"]
        world.version = "10.3.1"  # which the plan was not made by, though it lies where it should
        with pytest.raises(UserError, match=r"TensorRT 10\.3\.0 cannot load it \(.*not compatible.*build it again"):
            load()
        world.version, world.errors = OLD[1], []
        Path(made[0].path).unlink()
        with pytest.raises(UserError, match=r"vision-.*is missing or was built from another graph; build it"):
            load()
    with faked("10.7.0"), pytest.raises(UserError, match=r"has no engines for Orin and TensorRT 10\.7\.0"):
        load()
    with faked(OLD[1]), pytest.raises(UserError, match="has graphs for ONNX Runtime"):
        load_engine("tensorrt", Bundle.load(exported("llava", kv="fp32").bundle), driver=driver)
