"""The kernels as nvcc sees them, and as the host calls them."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_backend import SOURCE, compiled_shim

from edgevlm.runtime.cuda import build, calls, kernels

# kernel -> the struct it takes
STRUCTS = {
    "value_norms_fp32": calls.NormsCall,
    "turn_keys_fp16": calls.TurnCall,
    "list_moves": calls.MovesCall,
    "move_rows_fp32": calls.MovesCall,
    "place_patches": calls.PoolCall,
    "pool_norms": calls.PoolCall,
    "find_patches": calls.SimilarityCall,
    "temporal_similarity_fp16": calls.SimilarityCall,
    "choose_window": calls.ChooseCall,
    "choose_rows": calls.ChooseCall,
    "unit_keys_fp32": calls.NewerCall,
    "nearest_newer": calls.NewerCall,
    "attention_scores_fp16": calls.AttentionCall,
    "attention_weights": calls.AttentionCall,
    "attention_mass": calls.AttentionCall,
}


@pytest.mark.skipif(build.nvcc() is None, reason="nvcc is not on this machine")
@pytest.mark.skipif(not SOURCE.exists(), reason="the sources of the kernels are not here")
def test_nvcc_compiles_every_kernel_without_a_warning(tmp_path):
    """For Orin and Hopper, warnings being errors."""
    included = {line.split('"')[1] for line in SOURCE.read_text().splitlines() if line.startswith("#include")}
    assert included == {path.name for path in SOURCE.parent.glob("*.cu")} - {SOURCE.name}
    fatbin, parts = Path(build.__file__).with_name("kernels.fatbin"), [*SOURCE.parent.glob("*.cu*"), Path(build.__file__)]
    if not fatbin.exists() or fatbin.stat().st_mtime < max(part.stat().st_mtime for part in parts):  # else setup.py did it
        fatbin = tmp_path / "kernels.fatbin"
        build.compile_kernels(build.nvcc(), SOURCE, fatbin)
    assert fatbin.stat().st_size > 100_000
    if dump := shutil.which("cuobjdump", path=f"{Path(build.nvcc()).resolve().parent}:{os.environ['PATH']}"):
        listed = subprocess.run([dump, "-lelf", str(fatbin)], capture_output=True, text=True, check=True).stdout
        assert "sm_87" in listed
        assert "sm_90" in listed


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_those_of_the_kernels(name):
    """As large as the C++ has them; what each field means, the tests of the kernels show."""
    library = ctypes.CDLL(str(compiled_shim()))
    size = getattr(library, f"edgevlm_{name}_size")
    size.restype = ctypes.c_size_t
    assert size() == ctypes.sizeof(STRUCTS[name])


def test_without_the_compiled_kernels_one_line_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "files", lambda package: tmp_path)
    with pytest.raises(kernels.UserError, match="without its CUDA kernels"):
        kernels.load_fatbin()
    (tmp_path / kernels.FATBIN).write_bytes(b"fatbin")
    assert kernels.load_fatbin() == b"fatbin"


def test_edgevlm_cuda_0_builds_without_nvcc(monkeypatch, tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("EDGEVLM_CUDA", raising=False)
    assert build.nvcc() == str(compiler)
    monkeypatch.setenv("EDGEVLM_CUDA", "0")
    assert build.nvcc() is None
