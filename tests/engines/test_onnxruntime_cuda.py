"""ONNX Runtime's CUDA engine, without a device: its own code on the CPU provider, over a cache whose memory the shim gives."""

import numpy as np
import onnxruntime as ort
import pytest
from cuda_backend import shim_driver
from runner import WholeGraph

from edgevlm import Session
from edgevlm.calib.demo.world import World
from edgevlm.engines.onnxruntime_cuda import PROVIDER
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.cache import CudaCache
from edgevlm.runtime.engine import load_engine
from edgevlm.runtime.model import Model, demo_bundle

BUDGET, FRAMES = 256, 40


@pytest.fixture(scope="module")
def models():
    host = Model.load("demo", threads=1).in_fp32()  # as its graphs keep keys
    yield host, Model(host.bundle, WholeGraph(host.bundle, threads=1), host.tokenizer, host.closing, host.is_demo)
    host.close()


def watched(model, policy):
    """A stream with several compressions and a question in its middle and at its end: answers, and what is then held."""
    with Session.open(model, policy=policy, budget=BUDGET, append="all") as session:
        answers, world = [], World(5)
        for number in range(FRAMES):
            session.watch(world.step())
            if number in (FRAMES // 2, FRAMES - 1):
                answers.append(session.ask("how many objects are there now?").text)
        cache = session.cache
        kept = [np.sort(cache.seq(layer), 1) for layer in range(cache.layers)]
        return type(cache), answers, kept, session.stats.memory.compressions


@pytest.mark.parametrize("policy", ["infinipot-v", "last-seen", "hermes"])
def test_a_session_answers_and_keeps_what_it_does_on_the_cpu(models, monkeypatch, policy):
    monkeypatch.setattr("edgevlm.runtime.cuda.cache.open_driver", shim_driver)
    host, device = (watched(model, policy) for model in models)
    assert issubclass(device[0], CudaCache)
    assert host[0] is not device[0]
    assert device[3] == host[3] >= 2
    assert device[1] == host[1]
    for mine, theirs in zip(device[2], host[2], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_session_goes_on_from_a_snapshot(models, monkeypatch, tmp_path):
    """To the bit, where it was: keys and values go out of the device's memory and back into it."""
    monkeypatch.setattr("edgevlm.runtime.cuda.cache.open_driver", shim_driver)
    world, model = World(6), models[1]
    images = [world.step() for _ in range(FRAMES)]
    held = []
    for state, part in ((None, images), (tmp_path, images[: FRAMES // 2]), (tmp_path, images[FRAMES // 2 :])):
        with Session.open(model, policy="infinipot-v", budget=BUDGET, state=state) as session:
            for image in part:
                session.watch(image)
            held.append([session.cache.held(layer) for layer in range(session.cache.layers)])
            held[-1] = [{name: array.copy() for name, array in of_layer.items()} for of_layer in held[-1]]
    for whole, resumed in zip(held[0], held[2], strict=True):
        for name, array in whole.items():
            np.testing.assert_array_equal(resumed[name], array)


def test_policies_that_fetch_rows_are_refused(models, monkeypatch):
    monkeypatch.setattr("edgevlm.runtime.cuda.cache.open_driver", shim_driver)
    with pytest.raises(UserError, match="layer by layer require --engine onnxruntime-cpu"):
        Session.open(models[1], policy="rekv", budget=BUDGET)


def test_encoding_what_changed_is_refused_before_a_stream_begins(models, monkeypatch):
    monkeypatch.setattr("edgevlm.runtime.cuda.cache.open_driver", shim_driver)
    with pytest.raises(UserError, match="--encode changed requires --engine onnxruntime-cpu; use that engine or --encode all"):
        Session.open(models[1], policy="full", budget=BUDGET, encode="changed")


def test_falling_back_to_the_cpu_is_an_error(monkeypatch):
    """A provider that is there but does not start: ONNX Runtime only logs that, and goes on with the CPU's."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [PROVIDER, "CPUExecutionProvider"])
    with pytest.raises(UserError, match="fell back to the CPU"):
        load_engine("onnxruntime-cuda", Bundle.load(demo_bundle()))


def test_graphs_of_other_keys_than_the_bundle_says_are_refused():
    with pytest.raises(UserError, match=r"decoder\.onnx requires fp32 keys; .* or use --engine onnxruntime-cpu"):
        WholeGraph(Bundle.load(demo_bundle())).session("full")
