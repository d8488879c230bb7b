"""Cameras of a machine made of files: what is found, what it says of itself, and why it cannot be used."""

import errno
import shutil
import subprocess

import pytest
from kernel import META, Camera, Machine

from edgevlm.apps.sources import devices as v4l2
from edgevlm.apps.sources.base import SourceOptions
from edgevlm.apps.sources.devices import UsbConnection, device_path, devices, probe
from edgevlm.errors import SourceError

HEADER = """
#include <linux/videodev2.h>
#include <stddef.h>
#include <stdio.h>
int main(void) {
    printf("%zu %zu %zu %zu\\n", VIDIOC_QUERYCAP, VIDIOC_ENUM_FMT, VIDIOC_ENUM_FRAMESIZES, VIDIOC_ENUM_FRAMEINTERVALS);
    printf("%zu %zu %zu %zu\\n", sizeof(struct v4l2_capability), sizeof(struct v4l2_fmtdesc),
           sizeof(struct v4l2_frmsizeenum), sizeof(struct v4l2_frmivalenum));
    printf("%zu %zu %zu %zu\\n", offsetof(struct v4l2_capability, device_caps), offsetof(struct v4l2_fmtdesc, pixelformat),
           offsetof(struct v4l2_frmsizeenum, discrete), offsetof(struct v4l2_frmivalenum, discrete));
}
"""


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_requests_and_structures_are_the_kernels(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to ask linux/videodev2.h with")
    (tmp_path / "ask.c").write_text(HEADER)
    built = subprocess.run([compiler, "-w", "-o", tmp_path / "ask", tmp_path / "ask.c"], capture_output=True, check=False)
    if built.returncode:
        pytest.skip("linux/videodev2.h is not installed")
    said = subprocess.run([tmp_path / "ask"], capture_output=True, text=True, check=True).stdout.splitlines()
    requests, sizes, offsets = ([int(number) for number in line.split()] for line in said)
    assert requests == [v4l2.QUERYCAP, v4l2.ENUM_FMT, v4l2.ENUM_FRAMESIZES, v4l2.ENUM_FRAMEINTERVALS]
    layouts = (v4l2.CAPABILITY, v4l2.FORMAT, v4l2.FRAME_SIZE, v4l2.FRAME_INTERVAL)
    assert sizes == [layout.size for layout in layouts]
    for layout, offset, field in zip(layouts, offsets, (5, 4, 3, 5), strict=True):
        fields = [b"" if code.endswith("s") else 0 for code in ("16s", "32s", "32s")] if layout is v4l2.CAPABILITY else []
        if layout is v4l2.FORMAT:
            fields = [0, 0, 0, b""]
        count = len(layout.unpack(bytes(layout.size)))
        fields += [0] * (count - len(fields))
        fields[field] = 0x01020304
        assert layout.pack(*fields)[offset : offset + 4] == b"\x04\x03\x02\x01"


def test_devices_come_by_number_with_their_names(machine):
    for number in (10, 2):
        machine.add(number, Camera(card=f"Webcam {number}"), link=f"usb-Maker_Webcam-{number}" if number == 2 else None)
    machine.add(3, Camera(card="vi-output, imx219 9-0010", driver="tegra-video"), bus="platform/vi")
    (machine.root / "dev" / "video-dec0").touch()
    found = devices(machine.root)
    assert [(device.path.name, device.name, device.bus) for device in found] == [
        ("video2", "Webcam 2", "usb"),
        ("video3", "vi-output, imx219 9-0010", "platform"),
        ("video10", "Webcam 10", "usb"),
    ]
    assert [link.name for link in found[0].links] == ["usb-Maker_Webcam-2"]


@pytest.mark.parametrize("ranges", [False, True])
def test_a_camera_says_its_modes(machine, ranges):
    machine.add(0, Camera(ranges=ranges))
    (device,) = devices(machine.root)
    probed = probe(device, machine.root, machine.ioctl)
    assert probed.problem is None
    assert (probed.described.driver, probed.described.card) == ("uvcvideo", "HD Webcam")
    assert [str(mode) for mode in probed.described.modes] == [
        "MJPG 1280x720 at 30", "MJPG 640x480 at 30", "YUYV 640x480 at 30",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("camera", "says"),
    [
        (Camera(caps=META), "captures no pictures"),
        (Camera(fails=errno.ENOTTY), "is no Video4Linux device"),
        (Camera(fails=errno.EBUSY), "in use by another program"),
        (Camera(fails=errno.ENODEV), "was unplugged"),
        (Camera(fails=errno.EACCES), "usermod -aG video"),
        (Camera(fails=errno.EIO), "cannot be opened (Input/output error)"),
    ],
)
def test_each_failure_has_a_reason(machine, camera, says):
    machine.add(0, camera)
    problem = probe(devices(machine.root)[0], machine.root, machine.ioctl).problem
    assert says in problem
    assert "\n" not in problem


def test_a_camera_is_looked_through_when_it_captures(machine):
    node = machine.add(0)
    machine.add(1, Camera(caps=META))
    machine.add(2, Camera(driver="tegra-video"))
    seen = []
    see = lambda path: seen.append(path.name) or "gives no picture"  # noqa: E731
    problems = [probe(device, machine.root, machine.ioctl, see).problem for device in devices(machine.root)]
    assert seen == ["video0"], "and no node for metadata, nor a sensor of the platform"
    assert problems[0] == "gives no picture"
    machine.hold(node, 77, "zoom")
    assert "in use by zoom" in probe(devices(machine.root)[0], machine.root, machine.ioctl, see).problem


def test_an_index_a_path_and_a_link_name_the_node(machine):
    node = machine.add(4, link="usb-Maker_Webcam")
    link = machine.root / "dev" / "v4l" / "by-id" / "usb-Maker_Webcam"
    assert device_path("4", machine.root) == node
    assert device_path(str(link), machine.root).samefile(node)
    with pytest.raises(SourceError, match=r"there is no .*/dev/video7 \(cameras here: .*/dev/video4\)"):
        device_path("7", machine.root)


class FakeCapture:
    """A driver that takes what is nearest to what it is asked."""

    opened = True

    def __init__(self, cv2, took):
        self.cv2, self.took, self.asked = cv2, took, None

    def __call__(self, path, api, properties):
        self.path, self.api, self.asked = path, api, list(zip(properties[::2], properties[1::2], strict=True))
        return self

    def isOpened(self):
        return self.opened

    def get(self, name):
        return self.took.get(name, 0.0)

    def grab(self):
        return True

    def release(self):
        pass


@pytest.fixture
def capture(monkeypatch):
    cv2 = pytest.importorskip("cv2")
    took = {
        cv2.CAP_PROP_FRAME_WIDTH: 1280.0, cv2.CAP_PROP_FRAME_HEIGHT: 720.0, cv2.CAP_PROP_FPS: 30.0,
        cv2.CAP_PROP_FOURCC: float(cv2.VideoWriter.fourcc(*"MJPG")), cv2.CAP_PROP_POS_MSEC: 1500.0,
    }  # fmt: skip
    fake = FakeCapture(cv2, took)
    monkeypatch.setattr(cv2, "VideoCapture", fake)
    return fake


def test_what_is_asked_for_is_set_while_it_opens_and_what_was_taken_is_said(machine, capture):
    cv2, node = capture.cv2, machine.add(0)
    wanted = SourceOptions(size=(1920, 1080), camera_fps=30, pixel_format="MJPG")
    connection = UsbConnection("0", wanted, machine.root)
    assert (capture.path, capture.api) == (str(node), cv2.CAP_V4L2)
    assert [name for name, _ in capture.asked][:2] == [cv2.CAP_PROP_FOURCC, cv2.CAP_PROP_FRAME_WIDTH], "the format goes first"
    assert dict(capture.asked)[cv2.CAP_PROP_FRAME_HEIGHT] == 1080
    assert dict(capture.asked)[cv2.CAP_PROP_FPS] == 30
    assert dict(capture.asked)[cv2.CAP_PROP_BUFFERSIZE] == 1
    assert connection.mode == "1280x720 at 30 fps, MJPG (asked for 1920x1080)"
    assert connection.grab().stamp_s == 1.5
    assert UsbConnection("0", SourceOptions(), machine.root).mode == "1280x720 at 30 fps, MJPG"
    assert [name for name, _ in capture.asked] == [cv2.CAP_PROP_BUFFERSIZE]
