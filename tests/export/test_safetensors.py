"""Tensors as floats beside the format's own reader, and headers that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint, read_safetensors

KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def test_numbers_are_the_library_s(tmp_path: Path) -> None:
    torch.manual_seed(0)
    numbers = torch.cat([torch.randn(9), torch.tensor([0.0, -0.0, 1e-40, 6e4, -6e4, 1.0])]).reshape(5, 3)
    tensors = {str(kind): numbers.to(kind) for kind in KINDS}
    tensors |= {"codes": torch.arange(-6, 6, dtype=torch.int32).reshape(3, 4), "odd": torch.ones(3, dtype=torch.int8)}
    tensors |= {"empty": torch.zeros(0, 4), "one": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    ours, theirs = read_safetensors(tmp_path / "a"), load_file(tmp_path / "a")
    checkpoint = object.__new__(Checkpoint)
    checkpoint.folder, checkpoint.tensors = tmp_path, ours
    assert {name: each.shape for name, each in ours.items()} == {name: tuple(each.shape) for name, each in theirs.items()}
    for kind in KINDS:
        rows = next(checkpoint.rows(str(kind), (5, 3)))
        assert rows.dtype == np.float32
        assert rows.tobytes() == theirs[str(kind)].float().numpy().tobytes(), kind
        assert np.array_equal(ours[str(kind)].rows(1, 4), rows[1:4])
    assert np.array_equal(checkpoint.integers("codes", (3, 4)), theirs["codes"].numpy())
    for read in (lambda: next(checkpoint.rows("odd", (3,))), lambda: checkpoint.integers("odd", (3,))):
        with pytest.raises(UserError, match="'odd' is I8"):
            read()


def file(path: Path, header: Any, numbers: bytes = bytes(64), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + numbers)
    return path


def tensor(shape: Any, begin: int = 0, end: int = 64) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


HOSTILE: list[tuple[Any, int | None]] = [
    ({"a": tensor([16])}, 1 << 62),
    (b"{not JSON", None),
    (b"[" * 100_000, None),
    ({"a": tensor([1 << 40, 1 << 40])}, None),
    ({"a": tensor([16], begin=64, end=128)}, None),
    ({"a": tensor([16]), "b": tensor([8], begin=32)}, None),
]


@pytest.mark.parametrize(("header", "length"), HOSTILE)
def test_a_header_that_lies_is_one_line(tmp_path: Path, header: Any, length: int | None) -> None:
    with pytest.raises(UserError, match=r"a: is damaged or truncated \(") as error:
        read_safetensors(file(tmp_path / "a", header, length=length))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = file(tmp_path / "a", {"a": tensor([16]), "__metadata__": {"format": "pt"}}).read_bytes()
    assert read_safetensors(tmp_path / "a")["a"].rows(0, 16).shape == (16,)
    for length in range(len(whole)):
        (tmp_path / "a").write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged or truncated"):
            read_safetensors(tmp_path / "a")


def test_a_file_system_that_maps_no_files_is_named() -> None:
    with pytest.raises(UserError, match="status: its file system cannot map files"):
        read_safetensors(Path("/proc/self/status"))
