"""The driver over a stand-in for ``libcuda.so.1``, and what it takes for granted of the real one."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_backend import DEVICES, fake_libcuda, why_no_device

from edgevlm.errors import UserError
from edgevlm.runtime.cuda import build, driver
from edgevlm.runtime.cuda.driver import CONSTANTS, FUNCTIONS, Driver, Memcpy2D, open_driver


class Library:
    """Variables of the stand-in."""

    def __init__(self) -> None:
        self.own = fake_libcuda()

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.own, name).value = value

    def fail(self, name: bytes) -> None:
        (ctypes.c_char * 64).in_dll(self.own, "failing").value = name

    def calls(self) -> list[str]:
        """Those of graphs since the last look."""
        buffer = (ctypes.c_char * 4096).in_dll(self.own, "calls")
        calls = buffer.value.decode().split(";")[:-1]
        buffer.value = b""
        return calls


@pytest.fixture
def library() -> Iterator[Library]:
    library = Library()
    library.calls()
    yield library
    library.set("device_count", 1)
    library.set("integrated", 0)
    library.fail(b"")


@pytest.fixture
def device(library: Library) -> Driver:
    return Driver(0, library.own)


def test_without_a_driver_one_line_says_what_to_do(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    with pytest.raises(UserError, match=r"no CUDA device can be used \(libcuda\.so\.1: cannot open.*edgevlm doctor") as error:
        open_driver(5)
    assert "\n" not in str(error.value)


@pytest.mark.skipif("cuda" not in DEVICES, reason=why_no_device())
def test_caches_and_kernels_are_tested_on_this_device():
    """Without one, those tests are not collected, and this skip says so."""
    assert open_driver().device.memory_bytes > 0


def test_a_device_that_is_not_there_is_named(library):
    library.set("device_count", 0)
    with pytest.raises(UserError, match="there is no CUDA device 0: the driver shows 0"):
        Driver(0, library.own)


def test_what_the_driver_says_of_the_device(library, device):
    said = device.device
    assert (said.name, said.cuda, said.integrated, said.memory_bytes) == ("the CPU, as a CUDA device", "13.0", False, 1 << 32)
    library.set("integrated", 1)
    assert Driver(0, library.own).device.integrated


@pytest.mark.parametrize("integrated", [0, 1])
def test_memory_is_the_hosts_own_where_the_device_shares_it(library, integrated):
    library.set("integrated", integrated)
    device = Driver(0, library.own)
    memory = device.allocate(100)
    assert memory.nbytes == 100
    assert memory.address % 256 == 0
    assert (memory.host is not None) == integrated
    device.copy_in(memory.address, np.arange(100, dtype=np.uint8))
    if memory.host is not None:
        assert memory.host.tolist() == list(range(100))
    device.free(memory)
    with pytest.raises(RuntimeError, match=r"cuMem.*: invalid argument"):
        device.free(memory)


def test_memory_that_is_not_there_is_one_line(device):
    with pytest.raises(UserError, match=r"8\.00 GB of the CPU, as a CUDA device were asked for and 4\.\d\d are free"):
        device.allocate(8 * 10**9)


def test_copies_in_one_piece_and_row_by_row(device):
    rows = np.arange(24, dtype=np.int32).reshape(3, 8)
    memory = device.allocate(3 * 64)
    device.clear(memory.address, 3 * 64, 3 * 64, 1)
    device.copy_rows_in(memory.address, 64, rows[:, :5])  # rows that lie apart on both sides
    device.clear(memory.address + 64, 64, 8, 2)
    held, part = np.empty((3, 16), np.int32), np.empty((3, 8), np.int32)[:, :3]
    device.copy_out(held, memory.address)
    device.copy_rows_out(part, memory.address, 64)
    expected = np.zeros((3, 16), np.int32)
    expected[:, :5] = rows[:, :5]
    expected[1:, :2] = 0
    np.testing.assert_array_equal(held, expected)
    np.testing.assert_array_equal(part, expected[:, :3])
    device.copy(memory.address, memory.address + 64, 12)
    device.copy_rows(memory.address, 64, memory.address + 128, 64, 4, 1)
    device.copy_out(held, memory.address)
    assert held[0, :5].tolist() == [0, 0, 10, 3, 4]
    with pytest.raises(ValueError, match="only dense arrays"):
        device.copy_in(memory.address, rows[:, :5])
    with pytest.raises(ValueError, match="each row"):
        device.copy_rows_in(memory.address, 64, rows[:, ::2])
    with pytest.raises(RuntimeError, match="cuMemcpyDtoHAsync_v2: invalid argument"):
        device.copy_out(held, memory.address + 64)


def test_events_tell_the_time_between_them(device):
    first, last = device.event(), device.event()
    first.record(device.main)
    last.record(device.stream())
    assert last.ms_since(first) >= 0


def test_a_graph_is_recorded_launched_and_dropped(library, device):
    asked: list[str] = []
    stream = device.stream()
    graph = device.record(lambda: asked.extend(library.calls()), stream)
    assert asked == [f"begin {stream.handle}"]
    assert library.calls() == [f"end {stream.handle}", "instantiate 0", "destroy 0"]
    device.replay(graph, stream)
    device.replay(graph, stream)
    graph.close()
    graph.close()
    assert library.calls() == [f"launch {stream.handle}"] * 2 + ["close 0"]


@pytest.mark.parametrize(
    ("name", "words", "calls"),
    [
        ("begin", "cuStreamBeginCapture_v2: operation not permitted", ["begin"]),
        ("end", "cuStreamEndCapture: operation not permitted", ["begin", "end"]),
        ("instantiate", "cuGraphInstantiateWithFlags: operation not permitted", ["begin", "end", "instantiate", "destroy"]),
    ],
)
def test_what_cannot_be_recorded_leaves_nothing(library, device, name, words, calls):
    library.fail(name.encode())
    with pytest.raises(RuntimeError, match=words):
        device.record(lambda: None, device.main)
    assert [call.split()[0] for call in library.calls()] == calls


def test_work_that_fails_ends_the_recording(library, device):
    with pytest.raises(ZeroDivisionError):
        device.record(lambda: 1 / 0, device.main)
    assert [call.split()[0] for call in library.calls()] == ["begin", "end", "destroy"]


def cuda_header() -> Path:
    compiler = build.nvcc()
    found = [Path(compiler).resolve().parents[1]] if compiler else []
    for home in (*found, Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"))):
        if (home / "include" / "cuda.h").is_file():
            return home / "include" / "cuda.h"
    pytest.skip("cuda.h is not on this machine")


C_TYPES = {"int": ctypes.c_int, "unsigned int": ctypes.c_uint, "size_t": ctypes.c_size_t, "unsigned char": ctypes.c_ubyte}
C_TYPES |= {"unsigned long long": ctypes.c_ulonglong, "CUdeviceptr": ctypes.c_uint64, "CUdevice": ctypes.c_int}
C_TYPES |= dict.fromkeys(("CUresult", "CUdevice_attribute", "CUstreamCaptureMode"), ctypes.c_int)  # enums
C_TYPES |= dict.fromkeys(
    ("CUcontext", "CUstream", "CUevent", "CUmodule", "CUfunction", "CUgraph", "CUgraphExec"), ctypes.c_void_p
)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_what_cudas_header_says(name):
    called = name.removesuffix("_v2").replace("InstantiateWithFlags", "Instantiate")  # cuda.h calls the exported names so
    declared = re.search(rf"CUresult CUDAAPI {called}\(([^)]*)\)", cuda_header().read_text())
    assert declared is not None
    kinds = [re.sub(r"\bconst\b", "", argument).strip().rpartition(" ") for argument in declared[1].split(",")]
    wanted = [ctypes.c_void_p if "*" in name else C_TYPES[kind.strip()] for kind, _, name in kinds]
    assert [ctypes.c_void_p if kind is ctypes.c_char_p else kind for kind in FUNCTIONS[name]] == wanted


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_numbers_and_the_copys_struct_are_those_of_cudas_header(tmp_path):
    fields = [f"offsetof(CUDA_MEMCPY2D, {name}) == {getattr(Memcpy2D, name).offset}" for name, _ in Memcpy2D._fields_]
    facts = [f"{name} == {number}" for name, number in CONSTANTS.items()]
    facts += [*fields, f"sizeof(CUDA_MEMCPY2D) == {ctypes.sizeof(Memcpy2D)}"]
    source = tmp_path / "facts.c"
    asserted = "".join(f'_Static_assert({fact}, "{fact}");\n' for fact in facts)
    source.write_text(f"#include <cuda.h>\n#include <stddef.h>\n{asserted}")
    subprocess.run(["cc", "-fsyntax-only", f"-I{cuda_header().parent}", str(source)], check=True)
