"""The compression bench on shapes small enough for a test: what it prints, and that numpy chooses what the policy chooses."""

import copy
import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from edgevlm.bench import compression, numpy_kernels
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.runtime import kernels
from edgevlm.runtime.policies import POLICIES, StreamShape, create_policy
from edgevlm.runtime.policies.retrieval import Retrieval

FIELDS = ["bench", "policy", "dtype", "threads", "layers", "kv_heads", "head_dim", "tokens"]
FIELDS += ["ms", "read_ms", "pass_over_read", "reference_ms", "low", "high", "pass_low", "pass_high", "cold_ms"]
TINY = ["--layers", "4", "--kv-heads", "2", "--head-dim", "8", "--tokens", "130", "--rounds", "2"]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_json_line_for_each_policy_and_dtype(threads):
    command = ["bench", "compression", *TINY, "--policy", "all", "--dtype", "all", "--threads", str(threads), "--json"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    bounded = [name for name, policy in POLICIES.items() if policy.bounded and not issubclass(policy, Retrieval)]
    assert [(line["policy"], line["dtype"]) for line in lines] == [
        (name, d) for name in bounded for d in ("fp32", "fp16", "int8")
    ]
    for line in lines:
        assert list(line) == FIELDS
        assert line["bench"] == "compression"
        assert [line[name] for name in ("threads", "layers", "kv_heads", "head_dim", "tokens")] == [threads, 4, 2, 8, 130]
        assert min(line["ms"], line["read_ms"], line["reference_ms"], line["cold_ms"]) > 0
        assert line["low"] <= line["ms"] <= line["high"]
        assert line["pass_low"] <= line["pass_over_read"] <= line["pass_high"]
    assert kernels.threads() == 1


def test_a_table_for_people():
    command = ["bench", "compression", *TINY, "--policy", "infinipot-v:alpha=1", "--dtype", "fp16"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    head, row = done.stdout.splitlines()
    assert head.split()[:6] == ["policy", "dtype", "ms", "[low,", "high]", "read"]
    assert row.split()[:2] == ["infinipot-v:alpha=1", "fp16"]


def test_what_cannot_be_measured():
    with pytest.raises(UserError, match="there is no policy 'infinipot'"):
        list(compression.compression(["infinipot"]))
    with pytest.raises(UserError, match="--head-dim is even"):
        compression.CacheShape(head_dim=7)
    with pytest.raises(UserError, match="--dtype fp8: there is fp32, fp16, int8"):
        CliRunner().invoke(app, ["bench", "compression", "--dtype", "fp8"], catch_exceptions=False)
    with pytest.raises(UserError, match="--policy auto is chosen for a model"):
        list(compression.compression(["auto"]))
    with pytest.raises(UserError, match="policy rekv retrieves and does not compress; edgevlm bench memory retrieval"):
        list(compression.compression(["rekv"]))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(
    "policy", ["infinipot-v", "infinipot-v:keys=rotated,heads=shared,tau=0.1/0.2/0.3", "sliding-window", "last-seen"]
)
def test_numpy_chooses_what_the_policy_chooses(policy, dtype):
    shape = compression.CacheShape(layers=4, kv_heads=2, head_dim=16, tokens=500)
    memory, policy = compression.FilledCache(shape, dtype), create_policy(policy)
    policy.attach(shape.tokens, StreamShape(shape.layers, shape.side**2, 0))
    for _ in range(4):
        memory.fill()
        assert memory.cache.lengths.tolist() == [500] * 4
        twin = copy.deepcopy(policy)
        with numpy_kernels.in_place():
            slow = twin.before_append(memory.cache, 16, None)
        fast = policy.before_append(memory.cache, 16, None)
        for one, other in zip(slow.keep, fast.keep, strict=True):
            np.testing.assert_array_equal(one, other)
        memory.cache.evict(fast.keep)


def test_numpy_joins_and_attention_beside_the_cache():
    rng = np.random.default_rng(0)
    seq, known = (rng.integers(0, 60, (2, count)) for count in (40, 30))
    np.testing.assert_array_equal(numpy_kernels.index_of(seq, known), kernels.index_of(seq, known))
    np.testing.assert_array_equal(numpy_kernels.index_of(seq, known[:, :0]), np.full((2, 40), -1))
    query, own = rng.standard_normal((4, 9, 8), np.float32), rng.standard_normal((2, 9, 8), np.float32)
    key, places = rng.standard_normal((2, 40, 8), np.float32), 60 + np.arange(9)
    found = numpy_kernels.attention_mass(query, places, key, seq, own, places)
    np.testing.assert_allclose(found, kernels.attention_mass(query, places, key, seq, own, places), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_look_for_kernels_where_numpy_ones_are_put(name):
    module = sys.modules[POLICIES[name].__module__]
    assert not {kernel for kernel in numpy_kernels.KERNELS if hasattr(module, kernel)}
