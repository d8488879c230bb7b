"""Slow readings of a bundle's stored matrices in float64, from the bytes that its ONNX graph points to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.external_data_helper import load_external_data_for_tensor

from edgevlm.runtime.bundle import MANIFEST, hash_file, seal_manifest

Float64 = NDArray[np.float64]


def code(packed: NDArray[np.uint8], bits: int, index: int) -> int:
    """The ``index``-th number of ``bits`` bits in a row of bytes, lowest bits first."""
    if bits == 8:
        return int(packed[index])
    byte = int(packed[index // 2])
    return byte >> 4 if index % 2 else byte & 15


def dequantised(node: Any, tensors: dict[str, NDArray]) -> Float64:
    """The matrix ``[N, K]`` of a MatMulNBits node, number by number: (code - zero) * scale."""
    settings = {a.name: a.i for a in node.attribute}
    rows, columns, bits, size = (settings[name] for name in ("N", "K", "bits", "block_size"))
    codes, scales = (tensors[name] for name in node.input[1:3])
    zeros = tensors[node.input[3]] if len(node.input) > 3 and node.input[3] else None
    found = np.zeros((rows, columns))
    for n, k in np.ndindex(rows, columns):
        block, place = divmod(k, size)
        zero = 1 << (bits - 1) if zeros is None else code(zeros[n], bits, block)
        found[n, k] = (code(codes[n, block], bits, place) - zero) * float(scales[n, block])
    return found


def scaled(node: Any, tensors: dict[str, NDArray]) -> Float64:
    """The matrix ``[K, N]`` of a DequantizeLinear node, number by number: code * scale."""
    settings = {a.name: a.i for a in node.attribute}
    codes, scales = (tensors[name] for name in node.input)
    found = np.zeros(codes.shape)
    for k, n in np.ndindex(codes.shape):
        scale = scales[n] if settings["axis"] == 1 else scales[k // settings["block_size"], n]
        found[k, n] = int(codes[k, n]) * float(scale)
    return found


def rounded_rows(x: NDArray[np.float32], size: int) -> Float64:
    """``x [S, K]`` as ``accuracy_level`` 4 sees it: each block rounded to 127ths of its largest magnitude."""
    rows, columns = x.shape
    padded = np.zeros((rows, -(-columns // size) * size))
    padded[:, :columns] = x
    blocks = padded.reshape(rows, -1, size)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    rounded: Float64 = np.rint(blocks / np.where(step == 0, 1, step)) * step
    return rounded.reshape(rows, -1)[:, :columns]


def matrices(bundle: Path, graph: str) -> dict[str, Float64]:
    """Every matrix of a graph that a linear layer multiplies by, ``[out, in]``, by the name of its product."""
    model = onnx.load(bundle / graph, load_external_data=False).graph
    for tensor in model.initializer:
        if tensor.external_data:
            load_external_data_for_tensor(tensor, str(bundle))
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.initializer}
    casts = {node.output[0]: node.input[0] for node in model.node if node.op_type == "Cast"}
    tensors |= {node.output[0]: scaled(node, tensors) for node in model.node if node.op_type == "DequantizeLinear"}
    found = {}
    for node in model.node:
        if node.op_type == "MatMulNBits":
            found[node.output[0]] = dequantised(node, tensors)
        elif node.op_type in ("MatMul", "Gemm") and (name := casts.get(node.input[1], node.input[1])) in tensors:
            weight = tensors[name].astype(np.float64)
            found[node.output[0].removesuffix(".half")] = weight.T if node.op_type == "MatMul" else weight
    return found


def with_stored_numbers(plain: Path, rounded: Path, out: Path) -> Path:
    """A copy of the float32 bundle ``plain`` whose matrices are those that ``rounded`` stores."""
    shutil.copytree(plain, out)
    manifest = json.loads((out / MANIFEST).read_bytes())
    for graph in manifest["decoder"]["graphs"].values():
        if not (rounded / graph).exists():
            continue
        model = onnx.load(out / graph, load_external_data=False).graph
        places = {t.name: {e.key: e.value for e in t.external_data} for t in model.initializer}
        for name, matrix in matrices(rounded, graph).items():
            node = next(node for node in model.node if node.output[0] == name)
            if not (place := places[node.input[1]]):  # of a rotation, in the graph itself
                continue
            with (out / place["location"]).open("r+b") as stream:
                stream.seek(int(place["offset"]))
                stream.write(np.ascontiguousarray(matrix.T if node.op_type == "MatMul" else matrix, np.float32).data)
    for name in manifest["files"]:
        record = hash_file(out / name)
        manifest["files"][name] = {"bytes": record.bytes, "sha256": record.sha256}
    (out / MANIFEST).write_bytes(seal_manifest(manifest))
    return out
