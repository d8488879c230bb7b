"""YUV4MPEG2 streams for the tests, and what a slow reader makes of them."""

import io

import av
import numpy as np

STEPS = {"420jpeg": (2, 2), "420mpeg2": (2, 2), "411": (4, 1), "422": (2, 1), "444": (1, 1), "mono": None}


def noise_stream(colour, width, height, frames, rate="25:1", extra="", seed=0):
    """A stream of noise that is nowhere blacker than black, and the bytes of each frame."""
    steps = STEPS[colour]
    chroma = 2 * -(-width // steps[0]) * -(-height // steps[1]) if steps else 0
    random = np.random.default_rng(seed)
    planes = [random.integers(0 if extra else 16, 256, width * height + chroma, np.uint8).tobytes() for _ in range(frames)]
    header = f"YUV4MPEG2 W{width} H{height} F{rate} Ip A1:1 C{colour}{extra}\n".encode()
    return header + b"".join(b"FRAME\n" + data for data in planes), planes


def to_rgb(data, colour, width, height, full_range=False):
    """A frame's bytes as float64 RGB ``[H, W, 3]``: pixel by pixel, the equations of BT.601-7, 2.5, solved for them."""
    pixels, steps = np.frombuffer(data, np.uint8).astype(float), STEPS[colour]
    if steps is None:
        return pixels.reshape(height, width, 1).repeat(3, 2)
    out = np.empty((height, width, 3))
    columns, rows = -(-width // steps[0]), -(-height // steps[1])
    for y in range(height):
        for x in range(width):
            at = width * height + y // steps[1] * columns + x // steps[0]
            luma, blue, red = pixels[y * width + x], pixels[at], pixels[at + rows * columns]
            luma = luma / 255 if full_range else (luma - 16) / 219
            blue, red = (blue - 128) / (255 if full_range else 224), (red - 128) / (255 if full_range else 224)
            r, b = luma + 1.402 * red, luma + 1.772 * blue
            out[y, x] = r, (luma - 0.299 * r - 0.114 * b) / 0.587, b
    return np.clip(255 * out, 0, 255)


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
