"""Device profiles: every file has every figure, every figure a source, and figures that depend on each other agree."""

import json
from pathlib import Path

import pytest

from edgevlm.engines import devices
from edgevlm.engines.devices import device_names, load_device

NAMES = device_names()
JETSONS = [name for name in NAMES if name.startswith("orin")]
VERSIONS = {"jetpack", "l4t", "ubuntu", "python", "cuda", "tensorrt", "onnxruntime"}

KINDS = ("jetson", "cuda", "cpu")
FIGURES = [
    "memory_gib", "usable_mib", "system_mib", "bandwidth_gb_s", "cuda_cores", "gpu_mhz", "fp32_tflops", "fp16_tflops",
    "fp16_sparse_tflops", "int8_tops", "int8_sparse_tops", "max_watts", "power_modes", "compute_capability", "releases",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_every_figure_and_a_source_for_each(name):
    device = load_device(name)
    assert device.kind in KINDS
    assert list(device.figures) == FIGURES
    assert {figure.source for figure in device.figures.values()} == set(device.sources)
    assert all(figure.checked in (True, False) for figure in device.figures.values())
    for source in device.sources.values():
        assert len(source.document) > 10
        assert source.address is None or source.address.startswith("https://")
    numbers = ("memory_gib", "usable_mib", "system_mib", "bandwidth_gb_s", "fp32_tflops", "int8_tops", "max_watts")
    assert all(device[figure] > 0 for figure in numbers)
    assert device["releases"]
    assert all(set(release) == VERSIONS for release in device["releases"])


@pytest.mark.parametrize("name", JETSONS)
def test_an_orins_rates_are_those_of_its_cores_clock_and_sparsity(name):
    device = load_device(name)
    assert device["fp32_tflops"] == pytest.approx(2 * device["cuda_cores"] * device["gpu_mhz"] / 1e6, rel=0.01)
    tensor_cores = device["cuda_cores"] // 32
    assert device["int8_sparse_tops"] == pytest.approx(tensor_cores * 2048 * device["gpu_mhz"] / 1e6, rel=0.03)
    assert device["int8_tops"] == device["fp16_sparse_tflops"] == device["int8_sparse_tops"] / 2
    assert device["fp16_tflops"] == pytest.approx(device["int8_tops"] / 2, rel=0.02)


def test_a_new_device_is_one_file(tmp_path, monkeypatch):
    there = Path(devices.__file__).parent
    (tmp_path / "shelf.json").write_text(json.dumps(json.loads((there / "orin-nx-8.json").read_text()) | {"title": "A shelf"}))
    monkeypatch.setattr(devices, "files", lambda package: tmp_path)
    assert device_names() == ["shelf"]
    assert load_device("shelf").title == "A shelf"
    load_device.cache_clear()
