"""The driver module: what it does without a package or a device, and its adapter of cuda-python over a stand-in."""

import importlib
import sys
from types import ModuleType

import numpy as np
import pytest
from cuda_backend import bound_to, shim_module

from edgevlm.errors import UserError
from edgevlm.runtime.cuda import driver as module


@pytest.fixture
def stand_in():
    return shim_module("another_driver")


def test_without_a_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(module, "cuda_package", lambda: None)
    with pytest.raises(UserError, match=r"pip install pycuda \(or cuda-python\)"):
        module.open_driver(5)


def test_a_package_without_a_device_is_one_line(monkeypatch):
    monkeypatch.setattr(module, "cuda_package", lambda: "pycuda")
    broken = ModuleType("edgevlm.runtime.cuda.through_pycuda")

    def fails(ordinal):
        raise RuntimeError("cuInit failed: no CUDA-capable device is detected\nand more")

    broken.PyCuda = fails
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    with pytest.raises(UserError, match="pycuda: cuInit failed: no CUDA-capable device is detected\\);") as error:
        module.open_driver(6)
    assert "\n" not in str(error.value)


def test_a_device_that_is_not_there_is_named(stand_in):
    stand_in.cuDeviceGetCount = lambda: (stand_in.CUresult.CUDA_SUCCESS, 0)
    with pytest.raises(UserError, match="there is no CUDA device 0: the driver shows 0"):
        bound_to(stand_in)


def test_what_the_driver_says_of_the_device(stand_in):
    device = bound_to(stand_in).device
    assert (device.name, device.cuda, device.integrated) == ("the CPU, as a CUDA device", "13.0", False)
    stand_in.settings.integrated = 1
    assert bound_to(stand_in).device.integrated


@pytest.mark.parametrize("integrated", [0, 1])
def test_memory_is_the_hosts_own_where_the_device_shares_it(stand_in, integrated):
    stand_in.settings.integrated = integrated
    driver = bound_to(stand_in)
    memory = driver.allocate(100)
    assert memory.nbytes == 100
    assert memory.address % 256 == 0
    assert (memory.host is not None) == integrated
    driver.copy_in(memory.address, np.arange(100, dtype=np.uint8))
    if integrated:
        assert memory.host.tolist() == list(range(100))
    driver.free(memory)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        driver.free(memory)


def test_memory_that_is_not_there_is_one_line(stand_in):
    with pytest.raises(UserError, match=r"8\.00 GB of the CPU, as a CUDA device were asked for and 4\.29 are free"):
        bound_to(stand_in).allocate(8 * 10**9)


def test_copies_in_one_piece_and_row_by_row(stand_in):
    driver, rows = bound_to(stand_in), np.arange(24, dtype=np.int32).reshape(3, 8)
    memory = driver.allocate(3 * 64)
    driver.clear(memory.address, 3 * 64, 3 * 64, 1)
    driver.copy_rows_in(memory.address, 64, rows[:, :5])  # rows that lie apart on both sides
    driver.clear(memory.address + 64, 64, 8, 2)
    held, part = np.empty((3, 16), np.int32), np.empty((3, 8), np.int32)[:, :3]
    driver.copy_out(held, memory.address)
    driver.copy_rows_out(part, memory.address, 64)
    expected = np.zeros((3, 16), np.int32)
    expected[:, :5] = rows[:, :5]
    expected[1:, :2] = 0
    np.testing.assert_array_equal(held, expected)
    np.testing.assert_array_equal(part, expected[:, :3])
    driver.copy(memory.address, memory.address + 64, 12)
    driver.copy_out(held, memory.address)
    assert held[0, :5].tolist() == [0, 0, 10, 3, 4]
    with pytest.raises(ValueError, match="only dense arrays"):
        driver.copy_in(memory.address, rows[:, :5])
    with pytest.raises(ValueError, match="each row"):
        driver.copy_rows_in(memory.address, 64, rows[:, ::2])
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        driver.copy_out(held, memory.address + 64)


def test_events_tell_the_time_between_them(stand_in):
    driver = bound_to(stand_in)
    first, last = driver.event(), driver.event()
    first.record(driver.main)
    last.record(driver.stream())
    assert last.ms_since(first) >= 0


@pytest.mark.skipif(module.cuda_package() != "cuda.bindings", reason="cuda-python is not installed")
def test_the_stand_in_has_what_cuda_python_has(stand_in):
    """Each name that the adapter could use is one of the package's own."""
    real = importlib.import_module("cuda.bindings.driver")
    names = [name for name in vars(stand_in) if name.startswith(("cu", "CU")) and name != "ctypes"]
    assert len(names) > 30
    assert [name for name in names if not hasattr(real, name)] == []
    for enum in ("CUresult", "CUmemorytype"):
        for member in getattr(stand_in, enum):
            assert int(getattr(getattr(real, enum), member.name)) == member.value
    for name in vars(stand_in.CUdevice_attribute):
        assert hasattr(real.CUdevice_attribute, name)
    fields = {name for name in dir(real.CUDA_MEMCPY2D()) if name[:3] in ("src", "dst")} | {"WidthInBytes", "Height"}
    assert {"srcMemoryType", "srcHost", "srcDevice", "srcPitch", "dstMemoryType", "dstHost", "dstDevice", "dstPitch"} <= fields
