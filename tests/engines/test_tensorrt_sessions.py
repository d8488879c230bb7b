"""Whole sessions on the TensorRT backend, over a TensorRT that is ONNX Runtime: the same memory and answers as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeDriver
from tokenizers import Tokenizer
from trt_world import build, faked

from edgevlm.apps.bundles.build import capacity_for
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

BUDGET = 96
CASES = [
    ("llava", "tensorrt-10.3", "10.3.0", "infinipot-v"),
    ("qwen3_vl", "tensorrt-10.15", "10.16.1.11", "hermes"),  # probes, guidance, positions of three axes
]


def on_tensorrt(path: Any, driver: FakeDriver) -> Model:
    from edgevlm.engines.tensorrt.engine import TensorRT

    bundle = Bundle.load(path)
    build(bundle, driver, capacity_for(str(path), BUDGET))
    engine: Any = TensorRT(bundle, driver=driver)  # type: ignore[arg-type]
    engine.kv_device = "host"  # which is the fake device's memory
    tokenizer = Tokenizer.from_file(str(bundle.file(bundle.chat.tokenizer)))
    return Model(bundle, engine, tokenizer, bundle.closing_rows())


@pytest.mark.parametrize(("family", "profile", "version", "policy"), CASES, ids=[case[0] for case in CASES])
def test_a_session_is_the_same_on_both(exported: Any, family: str, profile: str, version: str, policy: str) -> None:
    """Frames until memory is compressed several times, and questions in between, each answered token by token."""
    rng = np.random.default_rng(0)
    with faked(version) as world:
        model = on_tensorrt(exported(family, profile=profile, kv="fp32").bundle, FakeDriver())
        settings: dict[str, Any] = {"policy": policy, "budget": BUDGET, "chunk": 4}
        with (
            Session.open(model, append="all", **settings) as ours,
            Session.open(exported(family, kv="fp32").bundle, append="all", encode="all", **settings) as cpu,
        ):
            assert ours.cache.capacities.tolist() == [model.engine.capacity(1)] * model.bundle.decoder.layers
            for number in range(28):
                frame = rng.integers(0, 255, (48, 64, 3), np.uint8)
                for session in (ours, cpu):
                    session.watch(frame, number / 2)
                if number % 8 == 5:
                    answers = [session.ask("what color was the square", max_tokens=6) for session in (ours, cpu)]
                    texts = ["".join(answer) for answer in answers]
                    assert texts[0] == texts[1]
                    assert answers[0].token_ids == answers[1].token_ids
                same_memory(ours, cpu)
            assert ours.stats.memory.compressions == cpu.stats.memory.compressions > 1
        assert {"run 0", "run 2"} <= set(world.calls)  # a token alone, and chunks this small as text


def same_memory(ours: Session, cpu: Session) -> None:
    assert (ours.cache.lengths == cpu.cache.lengths).all()
    for layer in range(ours.cache.layers):
        assert (ours.cache.seq(layer) == cpu.cache.seq(layer)).all()
        assert np.abs(ours.cache.key(layer) - cpu.cache.key(layer)).max(initial=0) < 1e-4
        assert np.abs(ours.cache.value(layer) - cpu.cache.value(layer)).max(initial=0) < 1e-4
