"""YUV4MPEG2 streams for the tests, and what a slow reader makes of them."""

import io

import av
import numpy as np


def noise_stream(width, height, frames):
    """A 4:2:0 stream of noise that is nowhere blacker than black."""
    size = width * height + 2 * -(-width // 2) * -(-height // 2)
    random = np.random.default_rng(0)
    planes = (random.integers(16, 256, size, np.uint8).tobytes() for _ in range(frames))
    return f"YUV4MPEG2 W{width} H{height} F25:1 Ip A1:1 C420jpeg\n".encode() + b"".join(b"FRAME\n" + data for data in planes)


def encode(images, pix_fmt, container="yuv4mpegpipe", codec="wrapped_avframe", rate=10):
    """What ffmpeg's libraries write of RGB images, and the images as they decode them again."""
    written = io.BytesIO()
    with av.open(written, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = pix_fmt
        for image in images:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        out.mux(stream.encode())
    with av.open(io.BytesIO(written.getvalue()), format=container) as again:
        decoded = [frame.to_ndarray(format="rgb24") for frame in again.decode(video=0)]
    return written.getvalue(), decoded
