"""`edgevlm doctor` on Jetsons made of files, with packages and probes that are told, and on this machine."""

import json
import subprocess
import sys
import time

import pytest
from jetsons import GPU, Jetson

from edgevlm.apps import doctor
from edgevlm.apps.doctor import Finding, checks
from edgevlm.apps.doctor import cameras as listing
from edgevlm.engines.devices.machine import Machine, run
from edgevlm.packages import install

HERE = "{}.{}".format(*sys.version_info[:2])
PROVIDERS = "TensorrtExecutionProvider CUDAExecutionProvider CPUExecutionProvider\n"
HEALTHY = {"onnxruntime-gpu": "1.23.2", "opencv-python": "4.11"}


@pytest.fixture(autouse=True)
def _no_cameras(monkeypatch):
    monkeypatch.setattr(listing, "look_around", lambda root: [listing.CameraEntry("demo", "demo", "the world", None)])


def machine(root, packages=HEALTHY, said=PROVIDERS, **options):
    return Machine(root, lambda: packages, lambda command: said, **options)


def findings(of):
    found = {}
    for finding in doctor.examine(of):
        found.setdefault(finding.check, []).append(finding)
    return found


def only(check, of):
    (finding,) = findings(of)[check]
    assert "\n" not in finding.found + finding.fix
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
    assert found["jetpack"][0].found == f"Jetson Linux {'.'.join(l4t)}, of JetPack {'6' if l4t[0] == '36' else '7'}"
    is_six = l4t[0] == "36"
    assert (found["cuda"][0].status, found["tensorrt"][0].status) == (("ok", "ok") if is_six else ("warn", "warn"))


def test_an_empty_machine_says_not_found_and_guesses_nothing(tmp_path):
    found = findings(machine(tmp_path, packages={}))
    assert "not found" in found["memory"][0].found
    assert "not found" in found["cpu"][0].found
    assert found["onnxruntime"][0] == Finding(
        "onnxruntime", "fail", "not found", f"{install('cpu')}, or on a Jetson the wheel of its JetPack"
    )
    bare = Jetson(tmp_path)
    for name in ("etc/nvpmodel.conf", f"{GPU}/min_freq", "usr/local/cuda/version.json", "var/lib/dpkg/status", "proc/meminfo"):
        (bare.root / name).unlink()
    found = findings(machine(tmp_path))
    for check in ("power mode", "clocks", "cuda", "tensorrt", "cma"):
        assert (found[check][0].status, "not found" in found[check][0].found) == ("warn", True), check


def test_two_builds_of_onnx_runtime_stop_a_run(tmp_path):
    both = {"onnxruntime": "1.22.0", "onnxruntime-gpu": "1.23.2"}
    finding = only("onnxruntime", machine(tmp_path, both))
    assert finding.status == "fail"
    assert "onnxruntime 1.22.0 and onnxruntime-gpu 1.23.2 are installed over each other" in finding.found
    assert finding.fix == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
    assert only("onnxruntime", machine(tmp_path, {"onnxruntime": "1.22.0"})).status == "ok"


def test_a_gpu_that_onnx_runtime_does_not_see_is_warned_of(tmp_path):
    Jetson(tmp_path)
    silent = only("gpu in use", machine(tmp_path, said="CPUExecutionProvider\n"))
    assert (silent.status, silent.found) == ("warn", "no: ONNX Runtime has only CPUExecutionProvider")
    assert only("gpu in use", machine(tmp_path, said=None)).found == "ONNX Runtime gave no answer"


def test_a_slower_power_mode_is_named_with_the_fastest(tmp_path):
    Jetson(tmp_path / "nano", "nano-super", mode=1)
    finding = only("power mode", machine(tmp_path / "nano"))
    assert finding == Finding("power mode", "warn", "25W (mode 1); MAXN_SUPER is faster", "sudo nvpmodel -m 2")
    Jetson(tmp_path / "old", "nano", mode=1)
    assert only("power mode", machine(tmp_path / "old")).fix == "sudo nvpmodel -m 0"


def test_an_old_jetpack_stops_a_run(tmp_path):
    Jetson(tmp_path, l4t=("35", "4.1"))
    assert only("jetpack", machine(tmp_path)).status == "fail"


def test_versions_that_do_not_belong_together_are_named(tmp_path):
    jetson = Jetson(tmp_path)
    jetson.put("usr/local/cuda/version.json", '{"cuda": {"version": "11.4.315"}}')
    jetson.put("var/lib/dpkg/status", "Package: libnvinfer10\nStatus: install ok installed\nVersion: 10.7.0.23-1\n")
    assert only("cuda", machine(tmp_path)).found == "11.4.315, and 12.6 belongs to this release"
    assert only("tensorrt", machine(tmp_path)).found == "10.7.0.23, and 10.3 belongs to this release"


@pytest.mark.parametrize(("available", "status"), [(300_000, "fail"), (1_500_000, "warn"), (5_000_000, "ok")])
def test_little_memory_is_told(tmp_path, available, status):
    Jetson(tmp_path, "nano").memory(7_802_000, available)
    assert only("memory", machine(tmp_path)).status == status


@pytest.mark.parametrize(("free", "status"), [(1e8, "fail"), (1e9, "warn"), (9e9, "ok")])
def test_a_full_disk_is_told(tmp_path, monkeypatch, free, status):
    """The one that bundles are kept on, whatever is free elsewhere."""
    nvme = tmp_path / "mnt/nvme"
    nvme.mkdir(parents=True)
    monkeypatch.setenv("EDGEVLM_CACHE", "/mnt/nvme/edgevlm/bundles")
    usage, elsewhere = type("Usage", (), {"free": free}), type("Usage", (), {"free": 1e12})
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda place: usage if place == nvme else elsewhere)
    finding = only("disk", machine(tmp_path))
    assert finding.status == status
    assert "GB free for bundles in /mnt/nvme/edgevlm/bundles" in finding.found


def test_a_folder_of_bundles_that_may_not_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt/nvme").write_text("a file")
    monkeypatch.setenv("EDGEVLM_CACHE", "/mnt/nvme/bundles")
    assert "bundles cannot be written there" in only("disk", machine(tmp_path)).found
    (tmp_path / "mnt/nvme").unlink()
    access = checks.os.access
    monkeypatch.setattr(checks.os, "access", lambda path, mode: path != tmp_path / "mnt" and access(path, mode))
    finding = only("disk", machine(tmp_path))
    assert (finding.status, finding.found) == ("warn", "/mnt/nvme/bundles: bundles cannot be written there")
    assert "EDGEVLM_CACHE" in finding.fix


@pytest.mark.parametrize(("engine", "status"), [("onnxruntime-cpu", "warn"), ("onnxruntime-cuda", "fail")])
def test_nodes_that_may_not_be_opened_stop_a_run_where_the_engine_needs_them(tmp_path, monkeypatch, engine, status):
    Jetson(tmp_path)
    monkeypatch.setattr(checks, "DEFAULT_ENGINE", engine)
    monkeypatch.setattr(checks.os, "access", lambda path, mode: not str(path).endswith("nvmap"))
    finding = only("permissions", machine(tmp_path))
    assert (finding.status, finding.found) == (status, "/dev/nvmap may not be opened")
    assert "usermod -aG video,render" in finding.fix


def test_a_gpu_without_a_driver_is_seen_on_the_bus(tmp_path):
    card = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x10de\n")
    assert only("gpu", machine(tmp_path)).found == "an NVIDIA GPU without a driver"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue\n")
    assert only("gpu", machine(tmp_path)).found == "NVIDIA's driver 570.86.15"


def test_each_camera_is_told_with_its_reason(tmp_path, monkeypatch):
    entries = [
        listing.CameraEntry("demo", "demo", "the world", None),
        listing.CameraEntry("/dev/video0", "usb", "A webcam", None),
        listing.CameraEntry("/dev/video2", "usb", "Another", "is in use by obs (process 7); end that one"),
    ]
    monkeypatch.setattr(listing, "look_around", lambda root: entries)
    good, bad = findings(machine(tmp_path))["cameras"]
    assert (good.status, good.found) == ("ok", "/dev/video0 (A webcam) gives pictures")
    assert (bad.status, bad.fix) == ("warn", "end that one")


def test_a_camera_that_hangs_does_not_hang_the_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr(listing, "look_around", lambda root: time.sleep(60))
    finding = only("cameras", machine(tmp_path, limit_s=0.05))
    assert "gave no answer in 0.05 s" in finding.found


def test_a_probe_that_hangs_fails_or_is_not_there_says_nothing():
    assert run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5) is None
    assert run([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert run(["/no/such/program"]) is None
    assert run([sys.executable, "-c", "print('here')"]) == "here\n"


def test_a_check_that_breaks_is_a_finding_and_stops_no_other(tmp_path, monkeypatch):
    def broken(machine):
        raise ZeroDivisionError("oh")

    monkeypatch.setitem(doctor.CHECKS, "python", (doctor.anywhere, broken))
    found = findings(machine(tmp_path))
    assert found["python"][0].status == "warn"
    assert "ZeroDivisionError" in found["python"][0].found
    assert "memory" in found


def test_the_report_counts_and_says_whether_a_run_would_stop(tmp_path):
    Jetson(tmp_path)
    lines, healthy = doctor.report(False, machine(tmp_path))
    assert healthy
    assert lines[-1].startswith("ready: ")
    lines, healthy = doctor.report(True, machine(tmp_path, packages={}))
    assert not healthy
    assert all(set(json.loads(line)) == {"event", "schema", "check", "status", "found", "fix"} for line in lines)


def test_this_machine():
    done = subprocess.run(
        [sys.executable, "-m", "edgevlm", "doctor", "--json"], capture_output=True, text=True, timeout=120, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == int(any(each["status"] == "fail" for each in found))
    assert {"python", "extension", "onnxruntime", "cpu", "memory", "disk", "gpu"} <= {each["check"] for each in found}
    assert next(each for each in found if each["check"] == "extension")["status"] == "ok"
