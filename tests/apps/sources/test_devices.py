"""Cameras of a machine made of files: what is found, what it is opened with, and why it cannot be used."""

import errno
import json
from unittest.mock import Mock

import pytest
from kernel import BUSY, DENIED, GONE, Machine

from edgevlm.apps.doctor import cameras
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.apps.sources.devices import UsbConnection, devices, lasting_links
from edgevlm.errors import SourceError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


@pytest.fixture
def capture(monkeypatch):
    """A driver that takes what is nearest to what it is asked, and gives no pictures."""
    cv2 = pytest.importorskip("cv2")
    took = {
        cv2.CAP_PROP_FRAME_WIDTH: 1280.0, cv2.CAP_PROP_FRAME_HEIGHT: 720.0, cv2.CAP_PROP_FPS: 30.0,
        cv2.CAP_PROP_FOURCC: float(cv2.VideoWriter.fourcc(*"MJPG")), cv2.CAP_PROP_POS_MSEC: 1500.0,
    }  # fmt: skip
    fake = Mock(retrieve=Mock(return_value=(False, None)), get=lambda name: took.get(name, 0.0))
    monkeypatch.setattr(cv2, "VideoCapture", Mock(return_value=fake))
    return fake


def test_devices_come_by_number_with_their_names(machine):
    for number in (10, 2):
        machine.add(number, f"Webcam {number}", link=f"usb-Maker_Webcam-{number}" if number == 2 else None)
    machine.add(3, "vi-output, imx219 9-0010", bus="platform/vi")
    (machine.root / "dev" / "video-dec0").touch()
    found = devices(machine.root)
    assert [(device.path.name, device.name, device.bus) for device in found] == [
        ("video2", "Webcam 2", "usb"),
        ("video3", "vi-output, imx219 9-0010", "platform"),
        ("video10", "Webcam 10", "usb"),
    ]
    assert [link.name for link in found[0].links] == ["usb-Maker_Webcam-2"]


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (None, "captures no pictures"),
        (BUSY, "in use by another program"),
        (GONE, "was unplugged"),
        (DENIED, "usermod -aG video"),
        (errno.EIO, "cannot be opened (Input/output error)"),
    ],
)
def test_each_failure_has_a_reason(machine, capture, fails, says):
    capture.isOpened.return_value = False
    machine.add(0, fails=fails)
    with pytest.raises(SourceError) as caught:
        UsbConnection("0", SourceOptions(), machine.root)
    assert says in str(caught.value)


def test_what_is_asked_for_is_set_while_it_opens_and_what_was_taken_is_said(machine, capture):
    import cv2

    node = machine.add(0)
    wanted = SourceOptions(size=(1920, 1080), camera_fps=30, pixel_format="MJPG")
    connection = UsbConnection("0", wanted, machine.root)
    cv2.VideoCapture.assert_called_once_with(str(node), cv2.CAP_V4L2, [
        cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*"MJPG"),  # first: the sizes and rates there are depend on it
        cv2.CAP_PROP_FRAME_WIDTH, 1920, cv2.CAP_PROP_FRAME_HEIGHT, 1080, cv2.CAP_PROP_FPS, 30, cv2.CAP_PROP_BUFFERSIZE, 1,
    ])  # fmt: skip
    assert connection.mode == "1280x720 at 30 fps, MJPG"
    assert connection.grab().stamp_s == 1.5


def test_the_list_has_a_line_for_each_with_its_reason(machine, capture):
    machine.hold(machine.add(0, link="usb-Maker_Webcam"), 77, "zoom")
    machine.add(1, "vi-output, imx219 9-0010", bus="platform/vi")
    machine.add(2, "vi-output, imx477 10-001a", bus="platform/vi2")
    lines = [json.loads(line) for line in cameras.list_cameras(True, machine.root)]
    found = [(line["camera"].removeprefix(str(machine.root)), line["kind"], line["usable"]) for line in lines]
    assert found == [
        ("demo", "demo", True), ("/dev/video0", "usb", False), ("csi://0", "csi", False), ("csi://1", "csi", False),
    ]  # fmt: skip
    assert lines[1]["links"] == [str(machine.root / "dev/v4l/by-id/usb-Maker_Webcam")]
    assert "in use by zoom" in lines[1]["reason"]
    assert lines[3]["name"] == "vi-output, imx477 10-001a"


def test_a_camera_that_is_plugged_in_again_is_found_under_its_new_number(machine, capture):
    import cv2

    machine.add(0)
    ports = machine.root / "dev" / "v4l" / "by-path"
    ports.mkdir(parents=True)
    (ports / "pci-usb-0:2-video-index0").symlink_to("../../video0")
    links = lasting_links("0", machine.root)
    connection = UsbConnection("0", SourceOptions(), machine.root, links)
    assert connection.grab() is not None
    (machine.root / "dev" / "video0").unlink()
    assert connection.grab() is None, "also where the driver goes on with the last picture"
    assert "stopped sending pictures" in connection.problem
    (ports / "pci-usb-0:2-video-index0").unlink()
    (ports / "pci-usb-0:2-video-index0").symlink_to("../../video1")
    (machine.root / "dev" / "video1").touch()
    again = UsbConnection("0", SourceOptions(), machine.root, links)
    assert again.grab() is not None
    assert cv2.VideoCapture.call_args[0][0] == str(ports / "pci-usb-0:2-video-index0")
