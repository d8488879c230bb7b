"""`edgevlm doctor` on simulated Jetsons and graphics cards, with faked packages and probes, and on this machine."""

import json
import subprocess
import sys
import time

import pytest
from jetsons import GPU, Jetson

from edgevlm.apps.doctor import cameras as listing
from edgevlm.apps.doctor import checks
from edgevlm.apps.doctor.checks import Finding
from edgevlm.engines.devices.machine import Machine, run

PROVIDERS = "TensorrtExecutionProvider CUDAExecutionProvider CPUExecutionProvider\n"
HEALTHY = {"onnxruntime-gpu": "1.23.2", "opencv-python": "4.11"}
DRIVER = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue\n"}
TOOLKIT = "usr/local/cuda/version.json"
DPKG = "var/lib/dpkg/status"
DEMO = listing.CameraEntry("demo", "demo", "the world", None)


@pytest.fixture(autouse=True)
def _no_cameras(monkeypatch):
    monkeypatch.setattr(listing, "look_around", lambda root: [DEMO])


def put(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def deb(package, version, status="install ok installed"):
    return f"Package: {package}\nStatus: {status}\nArchitecture: arm64\nVersion: {version}\n\n"


def machine(root, packages=HEALTHY, said=PROVIDERS, **options):
    return Machine(root, lambda: packages, lambda command: said, **options)


def findings(of):
    found = {}
    for finding in checks.examine(of):
        found.setdefault(finding.check, []).append(finding)
        assert "\n" not in finding.found + finding.fix
    return found


def only(check, root, **options):
    (finding,) = findings(machine(root, **options))[check]
    return finding


@pytest.mark.parametrize(
    ("kind", "l4t", "mode", "device"),
    [
        ("agx", ("36", "4.3"), 0, "orin-agx-64"),
        ("nx", ("36", "4.4"), 0, "orin-nx-16"),
        ("nano", ("36", "4.0"), 0, "orin-nano-8"),
        ("nano-super", ("39", "2.1"), 2, "orin-nano-super"),
    ],
)
def test_a_healthy_jetson_is_named_and_nothing_stops_a_run(tmp_path, kind, l4t, mode, device):
    Jetson(tmp_path, kind, l4t, mode)
    found = findings(machine(tmp_path))
    assert found["device"][0].found.endswith(f"--device {device}")
    assert not [each for group in found.values() for each in group if each.status == "fail"]
    for check in ("device", "jetpack", "cma", "swap", "power mode", "clocks", "cpu", "memory", "gpu", "permissions"):
        assert found[check][0].status == "ok", found[check][0]
    assert "NEON" in found["cpu"][0].found
    assert found["jetpack"][0].found == f"Jetson Linux {'.'.join(l4t)} (JetPack {'6' if l4t[0] == '36' else '7'})"
    belongs = "ok" if l4t[0] == "36" else "warn"
    assert (found["cuda"][0].status, found["tensorrt"][0].status) == (belongs, belongs)


def test_an_empty_machine_says_not_found_and_guesses_nothing(tmp_path):
    found = findings(machine(tmp_path, packages={}))
    for check in ("memory", "cpu", "onnxruntime"):
        assert "not found" in found[check][0].found
    jetson = Jetson(tmp_path)
    for name in ("etc/nvpmodel.conf", f"{GPU}/min_freq", TOOLKIT, DPKG, "proc/meminfo"):
        (jetson.root / name).unlink()
    found = findings(machine(tmp_path))
    for check in ("power mode", "clocks", "cuda", "tensorrt", "cma"):
        assert (found[check][0].status, "not found" in found[check][0].found) == ("warn", True), check


@pytest.mark.parametrize(
    ("files", "check", "status", "said", "fix"),
    [
        ({TOOLKIT: '{"cuda": {"version": "11.4.315"}}'}, "cuda", "warn", "11.4.315, but this release requires 12.6", "apt"),
        ({DPKG: deb("libnvinfer10", "10.7.0.23-1")}, "tensorrt", "warn", "10.7.0.23, but this release requires 10.3", "apt"),
        ({"etc/nv_tegra_release": "# R35 (release), REVISION: 4.1,"}, "jetpack", "fail", "Jetson Linux 35.4.1", "JetPack 6.2"),
        ({"var/lib/nvpmodel/status": "pmode:0002"}, "power mode", "warn", "15W (mode 2); MAXN is faster", "nvpmodel -m 0"),
        ({f"{GPU}/min_freq": "306000000"}, "clocks", "warn", "varies from 306 to 1020 MHz", "sudo jetson_clocks"),
        ({}, "cudnn", "warn", "not found: ONNX Runtime falls back to the CPU without it", "apt install nvidia-jetpack"),
        ({DPKG: deb("libcudnn8", "8.9.7.29-1")}, "cudnn", "warn", "8.9.7.29 (libcudnn8), but ONNX", "nvidia-jetpack"),
    ],
)
def test_what_a_jetson_lacks_is_a_finding_with_its_fix(tmp_path, files, check, status, said, fix):
    Jetson(tmp_path)
    put(tmp_path, files)
    finding = only(check, tmp_path)
    assert finding.status == status
    assert said in finding.found
    assert fix in finding.fix


def test_a_gpu_that_onnx_runtime_does_not_see_and_two_builds_of_it_are_findings(tmp_path):
    Jetson(tmp_path)
    silent = only("gpu in use", tmp_path, said="CPUExecutionProvider\n")
    assert (silent.status, silent.found) == ("warn", "no: ONNX Runtime supports only CPUExecutionProvider")
    assert only("gpu in use", tmp_path, said=None).found == "ONNX Runtime did not respond"
    for check, first, second, status in (
        ("onnxruntime", "onnxruntime", "onnxruntime-gpu", "fail"),
        ("opencv", "opencv-contrib-python", "opencv-python", "warn"),
    ):
        assert only(check, tmp_path, packages={first: "1.22.0", "opencv-python-rolling": "4"}).status == "ok"
        twice = only(check, tmp_path, packages={first: "1.22.0", second: "1.23.2"})
        assert twice.status == status
        assert f"{first} 1.22.0 and {second} 1.23.2 are installed over each other" in twice.found
        assert twice.fix.startswith(f"pip uninstall -y {first} {second} && pip install ")


@pytest.mark.parametrize(("available", "status"), [(300_000, "fail"), (1_500_000, "warn"), (5_000_000, "ok")])
def test_little_memory_is_told(tmp_path, available, status):
    Jetson(tmp_path, "nano").memory(7_802_000, available)
    assert only("memory", tmp_path).status == status


@pytest.mark.parametrize(("free", "status"), [(1e8, "fail"), (1e9, "warn"), (9e9, "ok")])
def test_a_full_disk_is_told(tmp_path, monkeypatch, free, status):
    """The one that bundles are kept on, whatever is free elsewhere."""
    nvme = tmp_path / "mnt/nvme"
    nvme.mkdir(parents=True)
    monkeypatch.setenv("EDGEVLM_CACHE", "/mnt/nvme/edgevlm/bundles")
    usage, elsewhere = type("Usage", (), {"free": free}), type("Usage", (), {"free": 1e12})
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda place: usage if place == nvme else elsewhere)
    finding = only("disk", tmp_path)
    assert finding.status == status
    assert "GB free for bundles in /mnt/nvme/edgevlm/bundles" in finding.found


def test_a_folder_of_bundles_that_may_not_be_written_is_told(tmp_path, monkeypatch):
    put(tmp_path, {"mnt/nvme": "a file"})
    monkeypatch.setenv("EDGEVLM_CACHE", "/mnt/nvme/bundles")
    assert "bundles cannot be written here" in only("disk", tmp_path).found
    (tmp_path / "mnt/nvme").unlink()
    access = checks.os.access
    monkeypatch.setattr(checks.os, "access", lambda path, mode: path != tmp_path / "mnt" and access(path, mode))
    assert only("disk", tmp_path).status == "warn"


@pytest.mark.parametrize(("engine", "status"), [("onnxruntime-cpu", "warn"), ("onnxruntime-cuda", "fail")])
def test_nodes_that_may_not_be_opened_stop_a_run_where_the_engine_needs_them(tmp_path, monkeypatch, engine, status):
    Jetson(tmp_path)
    monkeypatch.setattr(checks, "DEFAULT_ENGINE", engine)
    monkeypatch.setattr(checks.os, "access", lambda path, mode: not str(path).endswith("nvmap"))
    finding = only("permissions", tmp_path)
    assert (finding.status, finding.found) == (status, "/dev/nvmap: permission denied")


def test_a_card_its_cudnn_and_its_cuda_runtime_are_found(tmp_path):
    put(tmp_path, {"sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n"})
    assert only("gpu", tmp_path).found == "an NVIDIA GPU without a driver"
    put(tmp_path, DRIVER)
    assert only("gpu", tmp_path).found == "NVIDIA's driver 570.86.15"
    assert only("cuda runtime", tmp_path).status == "warn"
    assert "cudnn9-cuda-12" in only("cudnn", tmp_path).fix
    others = deb("libcudnn9-dev-cuda-12", "9.1.0.70-1") + deb("libcudnn8", "8.9.7.29-1", "deinstall ok config-files")
    put(tmp_path, {DPKG: others, TOOLKIT: '{"cuda": {"version": 12}}'})
    assert "not found" in only("cudnn", tmp_path).found, "headers, and one that was removed"
    put(tmp_path, {DPKG: others + deb("libcudnn9-cuda-12", "9.3.0.75-1") + deb("cuda-cudart-12-6", "12.6.77-1")})
    assert only("cudnn", tmp_path) == Finding("cudnn", "ok", "9.3.0.75 (libcudnn9-cuda-12)")
    assert only("cuda runtime", tmp_path).found == "12.6.77 (cuda-cudart-12-6)"
    put(tmp_path, {TOOLKIT: '{"cuda": {"version": "12.6.3"}}', DPKG: ""})
    packages = {"nvidia-cuda-runtime-cu12": "12.9.79", "onnxruntime-gpu": "1.23.2", "nvidia-ml-py": "12.575.51"}
    assert only("cuda wheels", tmp_path, packages=packages).status == "ok"
    found = only("cuda runtime", tmp_path, packages=packages)
    assert found.found == "12.6.3 (/usr/local/cuda), 12.9.79 (nvidia-cuda-runtime-cu12)"
    names = ("libcudnn.so", "libcudnn.so.9", "libcudnn.so.9.3.0", "libcudnn.so.old", "libcudnn_ops.so.9")
    put(tmp_path, {f"usr/local/cuda/lib64/{name}": "" for name in names})
    assert only("cudnn", tmp_path) == Finding("cudnn", "ok", "9.3.0 (/usr/local/cuda/lib64)")


def test_each_camera_is_told_with_its_reason_and_one_that_hangs_holds_nothing_up(tmp_path, monkeypatch):
    good = listing.CameraEntry("/dev/video0", "usb", "A webcam", None)
    bad = listing.CameraEntry("/dev/video2", "usb", "Another", "is in use by obs (process 7); stop that process")
    monkeypatch.setattr(listing, "look_around", lambda root: [DEMO, good, bad])
    found = findings(machine(tmp_path))["cameras"]
    assert [(each.status, each.fix) for each in found] == [("ok", ""), ("warn", "stop that process")]
    monkeypatch.setattr(listing, "look_around", lambda root: time.sleep(60))
    assert "did not respond within 0.05 s" in only("cameras", tmp_path, limit_s=0.05).found


def test_a_probe_that_hangs_fails_or_is_not_there_says_nothing():
    assert run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) is None
    assert run([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert run(["/no/such/program"]) is None
    assert run([sys.executable, "-c", "print('here')"]) == "here\n"


def test_a_check_that_breaks_is_a_finding_and_the_report_says_whether_a_run_would_stop(tmp_path, monkeypatch):
    Jetson(tmp_path)
    monkeypatch.setitem(checks.CHECKS, "python", (None, lambda machine: 1 / 0))
    lines, healthy = checks.report(False, machine(tmp_path))
    assert healthy
    assert "ZeroDivisionError" in lines[0]
    assert lines[-1].startswith("ready: ")
    lines, healthy = checks.report(True, machine(tmp_path, packages={}))
    assert not healthy
    assert all(set(json.loads(line)) == {"event", "schema", "check", "status", "found", "fix"} for line in lines)


def test_this_machine():
    done = subprocess.run(
        [sys.executable, "-m", "edgevlm", "doctor", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    found = {each["check"]: each["status"] for each in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == int("fail" in found.values())
    assert {"python", "extension", "onnxruntime", "cpu", "memory", "disk", "gpu"} <= set(found)
    assert found["extension"] == "ok"
