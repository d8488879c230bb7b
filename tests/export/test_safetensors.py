"""Our reader of safetensors beside the format's own, and headers that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgevlm.errors import UserError
from edgevlm.export.safetensors import read_safetensors

KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def test_numbers_are_the_library_s(tmp_path: Path) -> None:
    torch.manual_seed(0)
    numbers = torch.cat([torch.randn(9), torch.tensor([0.0, -0.0, 1e-40, 3e38, torch.inf, -torch.inf])]).reshape(5, 3)
    tensors = {str(kind): numbers.to(kind) for kind in KINDS}
    tensors |= {"codes": torch.arange(-6, 6, dtype=torch.int32).reshape(3, 4), "odd": torch.ones(3, dtype=torch.int8)}
    tensors |= {"empty": torch.zeros(0, 4), "one": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    ours, theirs = read_safetensors(tmp_path / "a"), load_file(tmp_path / "a")
    assert {name: each.shape for name, each in ours.items()} == {name: tuple(each.shape) for name, each in theirs.items()}
    for kind in KINDS:
        rows = ours[str(kind)].rows(1, 4)
        assert rows.dtype == np.float32
        assert rows.tobytes() == theirs[str(kind)][1:4].float().numpy().tobytes(), kind
    assert np.array_equal(ours["codes"].integers(), theirs["codes"].numpy())
    assert ours["empty"].rows(0, 1).shape == (0, 4)
    for name, read in (("odd", lambda: ours["odd"].rows(0, 1)), ("odd", ours["odd"].integers)):
        with pytest.raises(UserError, match=f"'{name}' is I8"):
            read()


def file(path: Path, header: Any, numbers: bytes = bytes(64), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + numbers)
    return path


def tensor(shape: Any, begin: int = 0, end: int = 64, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = [
    (b"", 0, "a header of 0 bytes"),
    ({"a": tensor([16])}, 1 << 62, "a header of 4,611,686,018,427,387,904 bytes"),
    (b"{not JSON", None, "Expecting property name"),
    (b"\xff\xff", None, "utf-8"),
    (b"[" * 100_000, None, "recursion"),
    ([1], None, "no JSON object"),
    ({"a": 3}, None, "no usable dtype"),
    ({"a": tensor([16], dtype="F31")}, None, "no usable dtype"),
    ({"a": tensor([16], dtype=["F32"])}, None, "no usable dtype"),
    ({"a": tensor([-16])}, None, "no usable dtype"),
    ({"a": tensor([True] * 16)}, None, "no usable dtype"),
    ({"a": tensor([16.0])}, None, "no usable dtype"),
    ({"a": tensor([1 << 60, 0])}, None, "no usable dtype"),
    ({"a": tensor([1] * 9)}, None, "no usable dtype"),
    ({"a": tensor([1 << 40, 1 << 40])}, None, "is said to take 64 bytes"),
    ({"a": tensor([16], end=32)}, None, "is said to take 32 bytes"),
    ({"a": tensor([16], begin=64, end=128)}, None, "begins at byte 64 and the one before ends at 0"),
    ({"a": tensor([16]), "b": tensor([8], begin=32)}, None, "'b' begins at byte 32 and the one before ends at 64"),
    ({"a": tensor([8], end=32), "b": tensor([4], begin=48)}, None, "'b' begins at byte 48"),
    ({"a": tensor([8], end=32)}, None, "its tensors take 32 bytes and the file has 64"),
    ({"a": tensor([32], end=128)}, None, "its tensors take 128 bytes and the file has 64"),
]


@pytest.mark.parametrize(("header", "length", "says"), HOSTILE, ids=[says for _, _, says in HOSTILE])
def test_a_header_that_lies_is_one_line(tmp_path: Path, header: Any, length: int | None, says: str) -> None:
    with pytest.raises(UserError) as error:
        read_safetensors(file(tmp_path / "a", header, length=length))
    line = str(error.value)
    assert line.startswith(f"{tmp_path / 'a'}: is damaged or truncated (")
    assert says in line
    assert "\n" not in line
    assert len(line) < 400


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = file(tmp_path / "a", {"a": tensor([16]), "__metadata__": {"format": "pt"}}).read_bytes()
    assert read_safetensors(tmp_path / "a")["a"].rows(0, 16).shape == (16,)
    for length in range(len(whole)):
        (tmp_path / "a").write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged or truncated"):
            read_safetensors(tmp_path / "a")
