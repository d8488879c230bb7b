"""What `edgevlm doctor` says of cuDNN and CUDA's packages, on machines made of files."""

import pytest
from jetsons import Jetson

from edgevlm.apps import doctor
from edgevlm.apps.doctor import Finding
from edgevlm.engines.devices.machine import Machine

DEB = "Package: {}\nStatus: {}\nArchitecture: arm64\nVersion: {}\n\n"
INSTALLED, REMOVED = "install ok installed", "deinstall ok config-files"
CUDA = {"onnxruntime-gpu": "1.23.2", "nvidia-ml-py": "12.575.51"}


@pytest.fixture
def card(tmp_path):
    """A graphics card with its driver, and nothing else."""
    put(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue\n")
    return tmp_path


def put(root, name, text=""):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def only(check, root, packages=CUDA):
    machine = Machine(root, lambda: packages, lambda command: None)
    (finding,) = [finding for finding in doctor.examine(machine) if finding.check == check]
    assert "\n" not in finding.found + finding.fix
    return finding


def test_cudnn_that_is_not_there(card, tmp_path):
    finding = only("cudnn", card)
    assert (finding.status, finding.found) == ("warn", "not found: ONNX Runtime falls back to the CPU without it")
    assert "cudnn9-cuda-12" in finding.fix
    Jetson(tmp_path / "jetson")
    assert only("cudnn", tmp_path / "jetson").fix == "sudo apt install nvidia-jetpack"


def test_cudnn_of_the_systems_packages(card):
    others = DEB.format("libcudnn9-dev-cuda-12", INSTALLED, "9.1.0.70-1") + DEB.format("libcudnn8", REMOVED, "8.9.7.29-1")
    put(card, "var/lib/dpkg/status", others + DEB.format("libcudnn9-cuda-12", INSTALLED, "9.3.0.75-1"))
    assert only("cudnn", card) == Finding("cudnn", "ok", "9.3.0.75 (libcudnn9-cuda-12)")
    put(card, "var/lib/dpkg/status", others)
    assert "not found" in only("cudnn", card).found, "headers, and one that was removed"


def test_cudnn_of_an_archive(card):
    for name in ("libcudnn.so", "libcudnn.so.9", "libcudnn.so.9.3.0", "libcudnn.so.old", "libcudnn_ops.so.9"):
        put(card, f"usr/local/cuda/lib64/{name}")
    assert only("cudnn", card) == Finding("cudnn", "ok", "9.3.0 (/usr/local/cuda/lib64)")


def test_cudas_runtime(card):
    finding = only("cuda runtime", card)
    assert (finding.status, finding.found) == ("warn", "CUDA's libraries: not found")
    put(card, "var/lib/dpkg/status", DEB.format("cuda-cudart-12-6", INSTALLED, "12.6.77-1"))
    put(card, "usr/local/cuda/version.json", '{"cuda": {"version": "12.6.3"}}')
    found = only("cuda runtime", card, {"nvidia-cuda-runtime-cu12": "12.9.79"})
    said = "12.6.3 (/usr/local/cuda), 12.6.77 (cuda-cudart-12-6), 12.9.79 (nvidia-cuda-runtime-cu12)"
    assert (found.status, found.found) == ("ok", said)
    put(card, "usr/local/cuda/version.json", '{"cuda": {"version": 12}}')
    assert "/usr/local/cuda" not in only("cuda runtime", card).found
