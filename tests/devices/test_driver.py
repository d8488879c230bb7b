"""The driver, through pycuda, over a stand-in for ``libcuda.so.1``."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_backend import DEVICES, fake_devices, why_no_device

from edgevlm.errors import UserError
from edgevlm.runtime.cuda.driver import Driver, open_driver


@pytest.fixture
def device():
    with fake_devices():
        yield Driver(0)


@pytest.mark.skipif("cuda" in DEVICES, reason="there is a device")
def test_without_a_device_one_line_says_what_to_do():
    with pytest.raises(UserError, match="CUDA device") as error:
        open_driver(5)
    assert "\n" not in str(error.value)


@pytest.mark.skipif("cuda" not in DEVICES, reason=why_no_device())
def test_caches_and_kernels_are_tested_on_this_device():
    """Without one, those tests are not collected, and this skip says so."""
    assert open_driver().device.memory_bytes > 0


def test_a_device_that_is_not_there_is_named():
    with fake_devices(0), pytest.raises(UserError, match="CUDA device 0 not found among 0"):
        Driver(0)


@pytest.mark.parametrize("integrated", [0, 1])
def test_memory_is_the_hosts_own_where_the_device_shares_it(integrated):
    with fake_devices(1, integrated):
        device = Driver(0)
    memory = device.allocate(100)
    assert memory.nbytes == 100
    assert memory.address % 256 == 0
    assert (memory.host is not None) == integrated
    device.copy_in(memory.address, np.arange(100, dtype=np.uint8))
    if memory.host is not None:
        assert memory.host.tolist() == list(range(100))
    device.free(memory)
    with pytest.raises(RuntimeError, match="free"):
        device.free(memory)


def test_memory_that_is_not_there_is_one_line(device):
    with pytest.raises(UserError, match=r"the CPU, as a CUDA device: 8\.00 GB requested, but 4\.\d\d GB free"):
        device.allocate(8 * 10**9)


def test_copies_in_one_piece_and_row_by_row(device):
    rows = np.arange(24, dtype=np.int32).reshape(3, 8)
    memory = device.allocate(3 * 64)
    device.clear(memory.address, 3 * 64, 3 * 64, 1)
    device.copy_rows(memory.address, 64, rows, 32, 20, 3)
    device.clear(memory.address + 64, 64, 8, 2)
    held, part = np.empty((3, 16), np.int32), np.empty((3, 3), np.int32)
    device.copy_out(held, memory.address)
    device.copy_rows(part, 12, memory.address, 64, 12, 3)
    expected = np.zeros((3, 16), np.int32)
    expected[:, :5] = rows[:, :5]
    expected[1:, :2] = 0
    np.testing.assert_array_equal(held, expected)
    np.testing.assert_array_equal(part, expected[:, :3])
    device.copy_rows(memory.address, 64, memory.address + 72, 64, 4, 2)
    device.copy_out(held, memory.address)
    assert held[:2, 0].tolist() == [10, 18]
    with pytest.raises(ValueError, match="contiguous"):
        device.copy_in(memory.address, rows[:, :5])
    with pytest.raises(RuntimeError, match="cuMemcpyDtoHAsync failed: invalid argument"):
        device.copy_out(held, memory.address + 64)
