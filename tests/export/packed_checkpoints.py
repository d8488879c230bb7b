"""AWQ and GPTQ checkpoints made from float ones, in the layouts that AutoAWQ and AutoGPTQ publish, number by number.

Written from the formats' descriptions and shared with nothing that reads them: each int32 is put together in a loop.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # output 8 c + j is at bits 4 AWQ_PLACES[j] of column c


def rounded_groups(weight: NDArray[np.float32], group: int, zero_points: bool) -> tuple[Any, Any, Any]:
    """codes [out, in], zeros and fp16 scales [out, in / group] of a weight [out, in]; zeros from 1 on, which v1 can hold."""
    out, width = weight.shape
    codes = np.zeros((out, width), np.int64)
    zeros, scales = np.full((out, width // group), 8), np.zeros((out, width // group), np.float16)
    for n, g in np.ndindex(out, width // group):
        part = weight[n, g * group : (g + 1) * group].astype(np.float64)
        low, high = min(part.min(), 0.0), max(part.max(), 0.0)
        scales[n, g] = (high - low) / 14 if zero_points else np.abs(part).max() / 7
        if zero_points:
            zeros[n, g] = min(15, max(1, round(-low / float(scales[n, g])) + 1))
        codes[n, g * group : (g + 1) * group] = np.clip(np.rint(part / float(scales[n, g])) + zeros[n, g], 0, 15)
    return codes, zeros, scales


def packed(numbers: NDArray[np.int64], axis: int, places: tuple[int, ...]) -> torch.Tensor:
    """Eight numbers of an axis to an int32, number j of each eight at bits ``4 places[j]``."""
    shape = [size // 8 if at == axis else size for at, size in enumerate(numbers.shape)]
    words = np.zeros(shape, np.uint32)
    for index in np.ndindex(*numbers.shape):
        at = list(index)
        at[axis] //= 8
        words[tuple(at)] |= np.uint32(int(numbers[index]) << (4 * places[index[axis] % 8]))
    return torch.from_numpy(words.view(np.int32))


def make_packed(
    source: Path,
    folder: Path,
    method: str,
    group: int,
    *,
    zero_points: bool = True,
    version: str = "gptq",
    order: bool = False,
    left: tuple[str, ...] = (),
) -> tuple[Path, Path]:
    """(the checkpoint in ``method``'s layout, one of its dequantised numbers as floats) of the float checkpoint ``source``.

    Matrices whose names contain one of ``left`` stay in float.
    """
    tensors = load_file(source / "model.safetensors")
    plain = dict(tensors)
    in_order = tuple(range(8))
    for name in list(tensors):
        if ".layers." not in name or not name.endswith("proj.weight") or "vision" in name or any(part in name for part in left):
            continue
        place = name.removesuffix(".weight")
        codes, zeros, scales = rounded_groups(tensors.pop(name).numpy(), group, zero_points)
        numbers = (codes - np.repeat(zeros, group, 1)) * np.repeat(scales.astype(np.float64), group, 1)
        plain[name] = torch.from_numpy(numbers.astype(np.float32))
        if method == "awq":
            tensors[f"{place}.qweight"] = packed(codes.T, 1, AWQ_PLACES)
            tensors[f"{place}.qzeros"] = packed(zeros.T, 1, AWQ_PLACES)
        else:
            tensors[f"{place}.qweight"] = packed(codes.T, 0, in_order)
            tensors[f"{place}.qzeros"] = packed(zeros.T - (version == "gptq"), 1, in_order)
            groups = np.arange(codes.shape[1], dtype=np.int32) // group
            tensors[f"{place}.g_idx"] = torch.from_numpy(groups[::-1].copy() if order else groups)
        tensors[f"{place}.scales"] = torch.from_numpy(np.ascontiguousarray(scales.T))
    floats = Path(shutil.copytree(source, folder / "floats"))
    save_file(plain, floats / "model.safetensors", metadata={"format": "pt"})
    target = Path(shutil.copytree(source, folder / method))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": group, "zero_point": zero_points}
    config["quantization_config"] |= (
        {"version": "gemm"} if method == "awq" else {"checkpoint_format": version, "desc_act": order}
    )
    (target / "config.json").write_text(json.dumps(config))
    return target, floats
