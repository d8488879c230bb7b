"""The TensorRT backend over a TensorRT that is ONNX Runtime: its numbers are those of the CPU's, step by step.

What is the adapter's own is real: addresses, shapes, lengths, pieces, the rows written after a call, probes, recorded calls.
The device's memory is the host's and its streams are late (fake_cuda.py); TensorRT's demands are made (fake_tensorrt.py).
"""

from __future__ import annotations

import gc
import shutil
import threading
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
from edgevlm.runtime.engine import TowerBuffer, load_engine

CAPACITY = 96
PROBES = (1, 0)
OLD, NEW = ("tensorrt-10.3", "10.3.0"), ("tensorrt-10.15", "10.16.1.11")
CASES = [
    ("llava", *OLD, "fp32"),
    ("llava", *NEW, "fp16"),
    ("smolvlm", *OLD, "fp16"),
    ("smolvlm", *NEW, "fp32"),
    ("qwen3_vl", *OLD, "fp32"),  # DeepStack: rows of frames are wider than those of text
    ("qwen3_vl", *NEW, "fp32"),
]
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

    def evict(self, seed: int, left: float = 0.0) -> None:
        """Other rows go in each layer and head, another number in each layer, and leave garbage, or ``left`` if that is NaN."""
        rng = np.random.default_rng(seed)
        for layer, held in enumerate(self.cpu.past_len.copy()):
            keep = int(rng.integers(1, held + 1))
            self.cpu.past_len[layer] = keep
            for head in range(self.bundle.decoder.kv_heads):
                kept = rng.permutation(held)[:keep]
                for memory in self._of(layer):
                    memory[0, head, :keep] = memory[0, head, kept]
                    memory[0, head, keep:] = left if np.isnan(left) else rng.standard_normal(memory[0, head, keep:].shape)

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
        yield make(exported, world, family, profile, kv)


@pytest.fixture
def llava(exported: Any) -> Iterator[Pair]:
    with faked(OLD[1]) as world:
        yield make(exported, world, "llava", OLD[0], "fp32")


@pytest.fixture(params=[OLD, NEW], ids=["10.3", "10.15"])
def either(request: pytest.FixtureRequest, exported: Any) -> Iterator[Pair]:
    with faked(request.param[1]) as world:
        yield make(exported, world, "llava", request.param[0], "fp32")


def make(exported: Any, world: World, family: str, profile: str, kv: str) -> Pair:
    from edgevlm.engines.tensorrt.engine import TensorRT

    bundle, driver = Bundle.load(exported(family, profile=profile, kv=kv).bundle), FakeDriver()
    build(bundle, driver, CAPACITY)
    engine = TensorRT(bundle, driver=driver)  # type: ignore[arg-type]
    buffers, keys, values = device_memory(bundle, driver, CAPACITY)
    cpu = Runner(exported(family, kv=kv).bundle, CAPACITY, PROBES)
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


def test_chunks_read_nothing_behind_the_valid_rows(pair: Pair) -> None:
    """Not even to give it a weight of 0: NaN there changes nothing."""
    pair.step(pair.rows(20, 1, wide=True), ())
    pair.evict(2, left=np.nan)
    pair.step(pair.rows(12, 3, wide=True), ())
    pair.step(pair.rows(3, 4), (0, 1, 2))


def test_tokens_are_recorded_once_and_replayed(either: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a layer outgrows the rows that the recorded call reads, or falls far below them."""
    from edgevlm.engines.tensorrt import decoder

    monkeypatch.setattr(decoder, "READ_STEP", 16)
    monkeypatch.setattr(decoder, "READ_SLACK", 32)
    either.step(either.rows(8), ())
    seen = []
    for seed in range(20):
        either.step(either.rows(1, seed))
        seen.append((either.decoder.replayed.recorded, either.decoder.replayed.replayed))
    grown = 9 if either.bundle.profile == OLD[0] else 8  # tokens until more than 16 rows are read
    assert seen[:3] == [(0, 0), (1, 1), (1, 2)]
    assert seen[grown - 1 : grown + 2] == [(1, grown - 1), (1, grown - 1), (2, grown)]
    either.evict(3)
    either.cpu.past_len[:] = 3
    recorded = either.decoder.replayed.recorded
    either.step(either.rows(1))
    either.step(either.rows(1))
    assert either.decoder.replayed.recorded == recorded  # 3 rows: what reads 32 is within the slack
    monkeypatch.setattr(decoder, "READ_SLACK", 16)
    either.step(either.rows(1))
    either.step(either.rows(1))
    assert either.decoder.replayed.recorded == recorded + 1


def test_a_recorded_call_sets_nothing_again(either: Pair) -> None:
    either.step(either.rows(4))
    for seed in range(2):
        either.step(either.rows(1, seed))
    either.world.calls.clear()
    for seed in range(3):
        either.step(either.rows(1, seed))
    assert either.world.calls == []


def test_where_calls_cannot_be_recorded_they_are_made(llava: Pair) -> None:
    llava.driver.refuses_graphs = True
    for seed in range(5):
        llava.step(llava.rows(1, seed))
    assert llava.driver.calls == ["record"]  # tried once
    assert llava.decoder.replayed.replayed == 0


def test_a_graph_is_dropped_when_the_working_memory_moves(llava: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        llava.step(llava.rows(1, seed))
    assert llava.decoder.replayed.recorded == 1
    llava.engine._workspace.scratch(1 << 20)
    for seed in range(3):
        llava.step(llava.rows(1, seed))
    assert llava.decoder.replayed.recorded == 2


def test_long_calls_go_in_by_pieces(either: Pair) -> None:
    """A chunk, and rows whose logits are all wanted, longer than the engine's largest calls."""
    either.decoder._most |= {"chunk": 9, "question": 5}
    either.step(either.rows(31, 1), ())
    either.evict(2)
    either.step(either.rows(14, 3), range(14))
    either.step(either.rows(13, 4), (12, 0, 5, -1))
    either.step(either.rows(20, 5), (3,))
    either.step(either.rows(1, 6), (-1, 0))


def test_a_step_writes_exactly_its_rows(pair: Pair) -> None:
    rng = np.random.default_rng(1)
    for array in pair.memory:
        array[:] = rng.standard_normal(array.shape)
    before = [array.copy() for array in pair.memory]
    layers = pair.bundle.decoder.layers
    for count in (1, 2, 17):
        past = np.linspace(0, CAPACITY - count, layers).astype(np.int32)
        pair.decoder.step(pair.rows(count, count, wide=True), *pair.cpu.tables(np.arange(count, dtype=np.int32)), past)
        for index, (old, array) in enumerate(zip(before, pair.memory, strict=True)):
            start = past[index % layers]
            changed = (old != array).any(axis=(0, 1, 3))
            assert (changed == np.isin(np.arange(CAPACITY), np.arange(start, start + count))).all()
            old[:] = array


def test_decoders_of_one_memory_go_on_where_the_other_stopped(either: Pair) -> None:
    buffers = either.decoder._buffers
    other = either.engine.bind(buffers, PROBES)
    either.step(either.rows(10))
    either.step(either.rows(1, 1), decoder=other)
    either.step(either.rows(6, 2), decoder=other)
    for seed in range(6):
        either.step(either.rows(1, seed), decoder=(either.decoder, other)[seed % 2])
    bare = either.engine.bind(buffers)
    tables = either.cpu.tables(np.array([40], np.int32))
    assert bare.step(either.rows(1), *tables, either.cpu.past_len).probes == {}


def test_two_streams_on_one_engine_do_not_meet(either: Pair) -> None:
    buffers, *_ = device_memory(either.bundle, either.driver, CAPACITY)
    other, past = either.engine.bind(buffers), np.zeros(either.bundle.decoder.layers, np.int32)
    for count in (5, 1, 1, 3, 1):
        either.step(either.rows(count, count))
        other.step(either.rows(count + 1, 99), *either.cpu.tables(np.arange(count + 1, dtype=np.int32)), past)
        past += count + 1


def test_calls_of_several_threads_wait_for_each_other(either: Pair) -> None:
    spec = either.bundle.decoder
    streams = [either.engine.bind(device_memory(either.bundle, either.driver, CAPACITY)[0]) for _ in range(3)]
    found: dict[int, list[NDArray]] = {index: [] for index in range(3)}

    def follow(index: int) -> None:
        past = np.zeros(spec.layers, np.int32)
        for count in (4, 1, 1, 7, 1, 1):
            tables = either.cpu.tables(np.arange(past[0], past[0] + count, dtype=np.int32))
            found[index].append(streams[index].step(either.rows(count, count), *tables, past).logits)
            past += count

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [either.cpu.step(either.rows(count, count)).logits for count in (4, 1, 1, 7, 1, 1)]
    for logits in found.values():
        assert [np.abs(a - b).max() < MOST["fp32"] for a, b in zip(logits, expected, strict=True)] == [True] * 6


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


def test_projections_and_embeddings_are_the_same(pair: Pair) -> None:
    tables = pair.cpu.tables(np.arange(11, dtype=np.int32))
    expected = pair.cpu.engine.project(pair.rows(11), *tables)
    for most in (512, 4):
        pair.engine._projections = None
        pair.engine.project(pair.rows(1), *pair.cpu.tables(np.zeros(1, np.int32)))
        pair.engine._projections.most = lambda name, most=most: (1, most)
        for ours, theirs in zip(pair.engine.project(pair.rows(11), *tables), expected, strict=True):
            assert [part.shape for part in ours] == [part.shape for part in theirs]
            assert all(np.abs(a - b).max() < 1e-4 for a, b in zip(ours, theirs, strict=True))
    ids = np.array([0, 5, 3])
    assert (pair.engine.embed(ids) == pair.cpu.engine.embed(ids)).all()


def test_memory_goes_back_while_it_is_short(llava: Pair) -> None:
    llava.step(llava.rows(20))
    held = sum(block.nbytes for block in llava.driver.held.values())
    assert llava.engine._workspace.blocks.nbytes > 0
    llava.engine.release_memory(True)
    for count in (10, 1, 1, 1):
        llava.step(llava.rows(count))
        assert llava.engine._workspace.blocks.nbytes == 0
    assert sum(block.nbytes for block in llava.driver.held.values()) < held
    assert llava.decoder.replayed.replayed > 0
    llava.engine.release_memory(False)
    llava.step(llava.rows(10))
    assert llava.engine._workspace.blocks.nbytes > 0


def test_a_decoder_outlives_its_engine_and_then_lets_go(llava: Pair) -> None:
    llava.step(llava.rows(5))
    llava.engine.close()
    llava.step(llava.rows(1))
    arena = 2 * llava.bundle.decoder.layers
    llava.decoder = llava.engine = None
    gc.collect()
    assert len(llava.driver.held) == arena


def test_a_step_that_does_not_fit_changes_nothing(llava: Pair) -> None:
    llava.step(llava.rows(5))
    before = [array.copy() for array in llava.memory]
    tables = llava.cpu.tables(np.arange(4, dtype=np.int32))
    with pytest.raises(CacheFull, match=f"layer 1 holds {CAPACITY - 3} rows of {CAPACITY}: 4 more do not fit"):
        llava.decoder.step(llava.rows(4), *tables, np.array([0, CAPACITY - 3, 0], np.int32))
    with pytest.raises(CacheError, match="embeds must be"):
        llava.decoder.step(llava.rows(4)[:, :7], *tables, np.zeros(3, np.int32))
    with pytest.raises(CacheError, match="takes no pattern"):
        llava.decoder.step(llava.rows(4), *tables, np.zeros(3, np.int32), (), object())
    assert all((old == array).all() for old, array in zip(before, llava.memory, strict=True))


def test_what_tensorrt_says_is_part_of_the_error(llava: Pair) -> None:
    llava.step(llava.rows(5))
    llava.world.runs = False
    with pytest.raises(RuntimeError, match=r"2 rows after 5 to 5: .*decoder.*TensorRT did not run \(illegal memory access\)"):
        llava.step(llava.rows(2))


def test_buffers_and_probes_must_be_those_it_was_built_for(llava: Pair) -> None:
    small, *_ = device_memory(llava.bundle, llava.driver, CAPACITY // 2)
    with pytest.raises(UserError, match="layer 0 has 48 rows and the engines were built for 96; build them for this session"):
        llava.engine.bind(small)
    assert llava.engine.capacity(50) == CAPACITY
    with pytest.raises(UserError, match="this session takes 97 rows a layer and the engines were built for 96"):
        llava.engine.capacity(CAPACITY + 1)
    with pytest.raises(ValueError, match="probes must be layers"):
        llava.engine.bind(llava.decoder._buffers, (9,))
    with pytest.raises(UserError, match="has no st-spattn decoder graph"):
        llava.engine.bind(llava.decoder._buffers, variant="st-spattn")
    with pytest.raises(UserError, match="keeps no memory"):
        llava.engine.bind(llava.decoder._buffers, variant="projections")
    with pytest.raises(UserError, match="run on --engine onnxruntime-cpu alone"):
        llava.engine.bind_layers(llava.decoder._buffers)
    with pytest.raises(UserError, match="--encode changed runs on --engine onnxruntime-cpu alone"):
        llava.engine.bind_tower(TowerBuffer.of(np.zeros(0, np.uint8)))


def test_engines_without_probes(exported: Any, tmp_path: Path) -> None:
    from_ = exported("llava", profile=OLD[0], kv="fp32").bundle
    folder = shutil.copytree(from_, tmp_path / "bundle", ignore=shutil.ignore_patterns("engines"))
    with faked(OLD[1]):
        from edgevlm.engines.tensorrt.engine import TensorRT

        bundle, driver = Bundle.load(folder), FakeDriver()
        build(bundle, driver, CAPACITY, probes=False)
        engine = TensorRT(bundle, driver=driver)  # type: ignore[arg-type]
        buffers, *_ = device_memory(bundle, driver, CAPACITY)
        with pytest.raises(UserError, match="built with --no-probes; choose infinipot-v"):
            engine.bind(buffers, (0,))
        cpu = Runner(exported("llava", kv="fp32").bundle, CAPACITY)
        rows = np.ones((3, bundle.decoder.hidden), np.float32)
        found = engine.bind(buffers).step(rows, *cpu.tables(np.arange(3, dtype=np.int32)), cpu.past_len)
        assert np.abs(found.logits - cpu.step(rows).logits).max() < MOST["fp32"]


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
        with pytest.raises(UserError, match=r"vision-.*is missing, or was built of another graph; build it"):
            load()
    with faked("10.7.0"), pytest.raises(UserError, match=r"has no engines for Orin and TensorRT 10\.7\.0"):
        load()
    with faked(OLD[1]), pytest.raises(UserError, match="has graphs for ONNX Runtime"):
        load_engine("tensorrt", Bundle.load(exported("llava", kv="fp32").bundle), driver=driver)
