"""The driver, through pycuda, over a stand-in for ``libcuda.so.1``."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda_backend import DEVICES, fake_devices, fake_libcuda, why_no_device

from edgevlm.errors import UserError
from edgevlm.runtime.cuda.driver import Driver, open_driver


def fail(name: bytes) -> None:
    (ctypes.c_char * 64).in_dll(fake_libcuda(), "failing").value = name


def graph_calls() -> list[str]:
    """Those since the last look."""
    buffer = (ctypes.c_char * 4096).in_dll(fake_libcuda(), "calls")
    calls = buffer.value.decode().split(";")[:-1]
    buffer.value = b""
    return calls


@pytest.fixture
def device():
    with fake_devices():
        graph_calls()
        yield Driver(0)
    fail(b"")


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
    with fake_devices(0), pytest.raises(UserError, match="there is no CUDA device 0: the driver shows 0"):
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
    with pytest.raises(RuntimeError, match="cuMemcpyDtoHAsync failed: invalid argument"):
        device.copy_out(held, memory.address + 64)


def test_a_graph_is_recorded_launched_and_dropped(device):
    asked: list[str] = []
    stream = device.stream()
    graph = device.record(lambda: asked.extend(graph_calls()), stream)
    assert asked == [f"begin {stream.handle}"]
    assert graph_calls() == [f"end {stream.handle}", "instantiate 0", "destroy 0"]
    device.replay(graph, stream)
    device.replay(graph, stream)
    graph.close()
    graph.close()
    assert graph_calls() == [f"launch {stream.handle}"] * 2 + ["close 0"]


@pytest.mark.parametrize(
    ("name", "words", "calls"),
    [
        ("begin", "cuStreamBeginCapture_v2 failed: operation not permitted", ["begin"]),
        ("end", "cuStreamEndCapture failed: operation not permitted", ["begin", "end"]),
        (
            "instantiate",
            "cuGraphInstantiateWithFlags failed: operation not permitted",
            ["begin", "end", "instantiate", "destroy"],
        ),
    ],
)
def test_what_cannot_be_recorded_leaves_nothing(device, name, words, calls):
    fail(name.encode())
    with pytest.raises(RuntimeError, match=words):
        device.record(lambda: None, device.main)
    assert [call.split()[0] for call in graph_calls()] == calls


def test_work_that_fails_ends_the_recording(device):
    with pytest.raises(ZeroDivisionError):
        device.record(lambda: 1 / 0, device.main)
    assert [call.split()[0] for call in graph_calls()] == ["begin", "end", "destroy"]
