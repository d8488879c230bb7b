"""The dense parts of an int8 decoder for a single row, and of an int4 decoder for any, multiplied by the extension.

ONNX Runtime's product of bytes is made for many rows: of a single one it reads weights at two thirds of the memory's speed. Its
product of 4 bits in blocks takes twice as long for a frame. The extension reads both as they are in the bundle's file.
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
BLOCKS = re.compile(r"rotation\.1\.(\d+)\.inner")  # of what down reads


def row_part(folder: Path, model: bytes, index: int, spec: DecoderSpec) -> Any | None:
    """Part ``index`` of a decoder in ``folder``; None where ONNX Runtime is to compute it.

    Raises ValueError for a damaged graph, OSError where its weights cannot be read.
    """
    if not kernels.multiplies_codes() or not 0 < index < spec.layers:
        return None
    shapes, layers = initializer_shapes(model), (f"layer{index - 1}", f"layer{index}")
    names = [name.format(*layers) for name in MATRICES]
    blocks = [int(found[1]) for name in shapes if (found := BLOCKS.fullmatch(name))]
    codes = [shapes.get(f"{name}.codes", ()) for name in names]
    in_blocks = all(len(shape) == 3 and shape[2] == 16 for shape in codes)  # of 32 with 4 bits
    if len(blocks) + in_blocks != 1 or any(f"{name}.zeros" in shapes or f"{name}.scales" not in shapes for name in names):
        return None
    if spec.rotary != spec.head_dim // 2 or f"{layers[0]}.attended".encode() in model or b".squares" in model:
        return None  # a second rotary base, a norm after attention, or a GELU gate
    if in_blocks and index <= spec.deepstack:  # rows of frames have features, which ONNX Runtime adds
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
    except CacheError:  # sizes that the extension does not multiply
        return None
