"""`edgevlm cameras` on machines made of files, and on this one."""

import errno
import json
import subprocess
import sys

import pytest
from kernel import META, Camera, Machine

from edgevlm.apps.doctor import cameras
from edgevlm.apps.sources import devices, gstreamer


@pytest.fixture
def machine(tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    ask = devices.probe
    monkeypatch.setattr(cameras, "probe", lambda device, root, see: ask(device, root, machine.ioctl, see))
    monkeypatch.setattr(cameras, "look_through", lambda path: None)
    monkeypatch.setattr(cameras, "opencv_problem", lambda: "this OpenCV has none")
    monkeypatch.setattr(cameras, "has_element", lambda name: False)
    monkeypatch.setattr(cameras, "pygobject_problem", lambda: "PyGObject is not installed")
    return machine


def events(machine):
    return [json.loads(line) for line in cameras.list_cameras(True, machine.root)]


def test_each_camera_has_a_line_with_its_modes_or_a_reason(machine):
    machine.add(0, link="usb-Maker_Webcam")
    machine.add(1, Camera(caps=META))
    machine.add(2, Camera(card="vi-output, imx219 9-0010", driver="tegra-video"), bus="platform/vi")
    machine.add(3, Camera(card="vi-output, imx477 10-001a", driver="tegra-video"), bus="platform/vi2")
    machine.add(4, Camera(fails=errno.EACCES))
    found = [line for line in events(machine) if line["event"] == "camera"]
    assert [(line["camera"].removeprefix(str(machine.root)), line["kind"], line["usable"]) for line in found] == [
        ("demo", "demo", True),
        ("/dev/video0", "usb", True),
        ("/dev/video1", "usb", False),
        ("/dev/video4", "usb", False),
        ("csi://0", "csi", False),
        ("csi://1", "csi", False),
    ]
    assert found[1]["modes"] == ["MJPG 1280x720 at 30", "MJPG 640x480 at 30", "YUYV 640x480 at 30"]
    assert found[1]["links"] == [str(machine.root / "dev/v4l/by-id/usb-Maker_Webcam")]
    assert found[1]["reason"] is None
    assert "metadata" in found[2]["reason"]
    assert "usermod" in found[3]["reason"]
    assert found[5]["name"] == "vi-output, imx477 10-001a"
    assert found[5]["reason"] == "PyGObject is not installed"


def test_this_machine():
    command = [sys.executable, "-m", "edgevlm", "cameras", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert lines[0]["camera"] == "demo"
    assert {line["event"] for line in lines} == {"camera", "ability"}
    assert all((line["reason"] is None) == line["usable"] for line in lines)


def test_a_jetsons_decoder_needs_its_node_and_gstreamer(tmp_path, monkeypatch):
    assert gstreamer.jetson_problem(tmp_path) == "this is no Jetson"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "v4l2-nvdec").touch()
    monkeypatch.setattr(gstreamer, "opencv_problem", lambda: "no OpenCV with it")
    monkeypatch.setattr(gstreamer, "pygobject_problem", lambda: None)
    monkeypatch.setattr(gstreamer, "has_element", lambda name: False)
    assert "nvidia-l4t-gstreamer" in gstreamer.jetson_problem(tmp_path)
    monkeypatch.setattr(gstreamer, "has_element", lambda name: name == "nvv4l2decoder")
    assert gstreamer.jetson_problem(tmp_path) is None
    monkeypatch.setattr(gstreamer, "opencv_problem", lambda: None)
    assert gstreamer.jetson_problem(tmp_path) is None
