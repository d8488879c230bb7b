"""``bench compression --device cuda``, over the shim: what it counts, and that it is skipped without a device."""

import pytest
from cuda_backend import shim_driver
from typer.testing import CliRunner

from edgevlm.bench import compression_cuda
from edgevlm.bench.noise import CacheShape
from edgevlm.cli import app
from edgevlm.errors import UserError

OPTIONS = ["bench", "compression", "--device", "cuda", "--layers", "2", "--tokens", "96", "--rounds", "2"]


@pytest.fixture
def shim(monkeypatch):
    for name in ("edgevlm.runtime.cuda.cache.open_driver", "edgevlm.runtime.cuda.driver.open_driver"):
        monkeypatch.setattr(name, shim_driver)


@pytest.mark.usefixtures("shim")
def test_every_part_is_timed_and_its_bytes_are_those_of_the_rows():
    shape = CacheShape(layers=2, kv_heads=2, head_dim=16, tokens=96)
    lines = {line["part"]: line for line in compression_cuda.measure(shape, "fp16", 2)}
    assert list(lines) == list(compression_cuda.PARTS)
    rows, row = 2 * 2 * 96, 16 * 2
    assert lines["value norms"]["bytes"] == lines["similarity"]["bytes"] == rows * row
    assert lines["probe mass"]["bytes"] == rows * row * 3 // 4
    assert 0 < lines["eviction"]["bytes"] <= 4 * rows * row // 4
    assert lines["eviction"]["bytes"] % (4 * row) == lines["re-rotation"]["bytes"] % (2 * row) == 0
    assert all(line["ms"] > 0 and line["copy_gb_s"] > 0 for part, line in lines.items() if part != "selection")


def test_without_a_device_it_says_so(monkeypatch):
    def none(ordinal=0):
        raise UserError("no CUDA device can be used")

    monkeypatch.setattr("edgevlm.runtime.cuda.cache.open_driver", none)
    with pytest.raises(UserError, match="no CUDA device can be used"):
        CliRunner().invoke(app, OPTIONS, catch_exceptions=False)
