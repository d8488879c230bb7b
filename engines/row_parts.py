"""Load decoder parts that the C++ extension computes: int8 parts for a single row, and int4 parts for any number of rows.

For a single row, ONNX Runtime reads int8 weights at only two thirds of the memory bandwidth. For a frame's rows, ONNX Runtime
multiplies by int4 weights half as fast as the extension. The extension reads the weights in place from the bundle's file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from edgevlm.engines.onnx_file import external_tensors, initializer_shapes, largest_attribute
from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.bundle import DecoderSpec

MATRICES = ("{0}.output", "{0}.mlp", "{0}.down", "{1}.qkv")
GAINS = ("{0}.mlp_norm", "{1}.input_norm", "{1}.q_norm", "{1}.k_norm")
BLOCKS = re.compile(r"rotation\.1\.(\d+)\.inner")  # the block-wise rotation of ``down``'s input


def row_part(folder: Path, model: bytes, index: int, spec: DecoderSpec) -> Any | None:
    """Return one part of a decoder for the C++ extension, or None if only ONNX Runtime can compute it.

    Raises ValueError for a damaged graph, and OSError if the weights cannot be read.
    """
    if not kernels.multiplies_codes() or not 0 < index < spec.layers:
        return None
    shapes, layers = initializer_shapes(model), (f"layer{index - 1}", f"layer{index}")
    names = [name.format(*layers) for name in MATRICES]
    blocks = [int(found[1]) for name in shapes if (found := BLOCKS.fullmatch(name))]
    codes = [shapes.get(f"{name}.codes", ()) for name in names]
    in_blocks = all(len(shape) == 3 and shape[2] == 16 for shape in codes)  # blocks of 32 weights, 4 bits each
    if len(blocks) + in_blocks != 1 or any(f"{name}.zeros" in shapes or f"{name}.scales" not in shapes for name in names):
        return None
    if spec.rotary != spec.head_dim // 2 or f"{layers[0]}.attended".encode() in model or b".squares" in model:
        return None  # the extension supports no second rotary base, no norm after attention and no GELU gate
    if in_blocks and index <= spec.deepstack:
        return None
    stored = {tensor.name: tensor for tensor in external_tensors(model)}
    mapped = {file: np.memmap(folder / file, np.uint8, "r") for file in {tensor.file for tensor in stored.values()}}

    def array(name: str, dtype: type[np.generic] = np.float32) -> np.ndarray | None:
        if (tensor := stored.get(name)) is None:
            return None
        found: np.ndarray = mapped[tensor.file][tensor.offset : tensor.offset + tensor.length].view(dtype)
        return found.reshape(shapes[name])

    try:
        return kernels.RowPart(
            [array(f"{name}.codes", np.uint8 if in_blocks else np.int8) for name in names],
            [array(f"{name}.scales") for name in names],
            [array(f"{name}.bias") for name in names],
            [array(f"{name.format(*layers)}.weight") for name in GAINS],
            largest_attribute(model, "epsilon"),
            spec.kv_heads,
            spec.head_dim,
            blocks[0] if blocks else 1,
        )
    except CacheError:  # the extension does not support these sizes
        return None
