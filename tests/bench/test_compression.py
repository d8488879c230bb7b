"""The compression bench on shapes small enough for a test: what it prints."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.bench import compression
from edgevlm.cli import app
from edgevlm.errors import UserError
from edgevlm.runtime import kernels
from edgevlm.runtime.policies import POLICIES
from edgevlm.runtime.policies.retrieval import Retrieval

FIELDS = ["bench", "schema", "policy", "dtype", "threads", "layers", "kv_heads", "head_dim", "tokens"]
FIELDS += ["ms", "read_ms", "pass_over_read", "low", "high", "pass_low", "pass_high", "cold_ms"]
TINY = ["--layers", "4", "--tokens", "130", "--rounds", "2"]


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
        assert [line[name] for name in ("threads", "layers", "kv_heads", "head_dim", "tokens")] == [threads, 4, 2, 128, 130]
        assert min(line["ms"], line["read_ms"], line["cold_ms"]) > 0
        assert line["low"] <= line["ms"] <= line["high"]
        assert line["pass_low"] <= line["pass_over_read"] <= line["pass_high"]
    assert kernels.threads() == 1


@pytest.mark.parametrize(("policy", "said"), [("infinipot", "unknown policy"), ("rekv", "does not compress by itself")])
def test_what_cannot_be_measured(policy, said):
    with pytest.raises(UserError, match=said):
        list(compression.compression([policy]))
