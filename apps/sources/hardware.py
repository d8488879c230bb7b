"""Decoders of the platform for compressed video: whether there is one that can be used, and why not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from edgevlm.apps.sources.base import Decode
from edgevlm.apps.sources.devices import ROOT
from edgevlm.apps.sources.gstreamer import has_element, opencv_problem, pygobject_problem
from edgevlm.apps.sources.opencv import load_cv2

JETSON_DECODERS = ("nvhost-nvdec", "v4l2-nvdec", "nvhost-nvdec-ctl")  # nodes under /dev
JETSON_ELEMENT = "nvv4l2decoder"


def open_file(path: str, decode: Decode, root: Path = ROOT) -> tuple[Any, str]:
    """An OpenCV capture of a file, which may not have opened, and who decodes it; nothing where only the CPU could."""
    cv2 = load_cv2()
    if decode == "cpu" or vaapi_problem(root) is not None:
        return cv2.VideoCapture(path), ""
    asked = [cv2.CAP_PROP_HW_ACCELERATION, cv2.VIDEO_ACCELERATION_ANY]
    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG, asked)
    if not capture.isOpened():
        return cv2.VideoCapture(path), ""
    if int(capture.get(cv2.CAP_PROP_HW_ACCELERATION)) == cv2.VIDEO_ACCELERATION_NONE:
        return capture, "decoded by the CPU: OpenCV's FFmpeg finds no decoder for it on the graphics card"
    return capture, "decoded by the graphics card"


def vaapi_problem(root: Path = ROOT) -> str | None:
    """Why no graphics card decodes for OpenCV's FFmpeg; None where one may."""
    nodes = sorted((root / "dev" / "dri").glob("renderD*"))
    if not nodes:
        return "there is no /dev/dri/renderD*"
    if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return f"{nodes[0]} may not be opened: sudo usermod -aG render $USER, and log in again"
    cv2 = load_cv2()
    return (
        None if hasattr(cv2, "CAP_PROP_HW_ACCELERATION") else "this OpenCV knows no hardware decoding; it takes 4.5.2 or newer"
    )


def jetson_problem(root: Path = ROOT) -> str | None:
    """Why no Jetson decodes through GStreamer; None where one does."""
    if not any((root / "dev" / name).exists() for name in JETSON_DECODERS):
        return "this is no Jetson"
    if opencv_problem() is None or has_element(JETSON_ELEMENT):
        return None
    if pygobject_problem() is None:
        return f"GStreamer has no {JETSON_ELEMENT}: sudo apt install nvidia-l4t-gstreamer"
    return f"{opencv_problem()}, and {pygobject_problem()}"
