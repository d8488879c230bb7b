"""``cuda.bindings.driver`` over the host's own memory: "the device" is this process, and kernels are those that g++ compiled.

What an adapter would get wrong on a device fails here too: addresses outside an allocation, memory freed twice, a struct of
another size. Fresh memory is full of 0xA5.
"""

import ctypes
import enum
import time
from types import SimpleNamespace

import numpy as np

CUresult = enum.Enum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1, "CUDA_ERROR_OUT_OF_MEMORY": 2})
CUmemorytype = enum.Enum("CUmemorytype", {"CU_MEMORYTYPE_HOST": 1, "CU_MEMORYTYPE_DEVICE": 2})
CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
CUdevice_attribute = SimpleNamespace(
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
    CU_DEVICE_ATTRIBUTE_INTEGRATED="integrated",
)
CU_MEMHOSTALLOC_DEVICEMAP = 2
OK = (CUresult.CUDA_SUCCESS,)
MEMORY = 1 << 32  # bytes of "the device"

settings = SimpleNamespace(library=None, integrated=0)
blocks: dict[int, np.ndarray] = {}  # address -> its bytes


def inside(address, size):
    """Whether ``size`` bytes from ``address`` on lie in one allocation."""
    return any(start <= address and address + size <= start + len(block) for start, block in blocks.items())


def cuInit(flags):
    return OK


def cuDeviceGetCount():
    return *OK, 1


def cuDeviceGet(ordinal):
    return *OK, ordinal


def cuDevicePrimaryCtxRetain(device):
    return *OK, 1


def cuCtxSetCurrent(context):
    return OK


def cuMemGetInfo():
    return *OK, MEMORY - sum(map(len, blocks.values())), MEMORY


def cuMemAlloc(size):
    if size < 1:
        return CUresult.CUDA_ERROR_INVALID_VALUE, None
    if size > cuMemGetInfo()[1]:
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
    held = np.full(size + 256, 0xA5, np.uint8)
    first = -held.ctypes.data % 256
    block = held[first : first + size]
    blocks[block.ctypes.data] = block
    return *OK, block.ctypes.data


def cuMemHostAlloc(size, flags):
    return cuMemAlloc(size)


def cuMemHostGetDevicePointer(address, flags):
    return *OK, address


def cuMemFree(address):
    return OK if blocks.pop(address, None) is not None else (CUresult.CUDA_ERROR_INVALID_VALUE,)


cuMemFreeHost = cuMemFree


def _move(to, from_, size, device):
    if not inside(device, size):
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)
    ctypes.memmove(to, from_, size)
    return OK


def cuMemcpyHtoDAsync(to, from_, size, stream):
    return _move(to, from_, size, to)


def cuMemcpyDtoHAsync(to, from_, size, stream):
    return _move(to, from_, size, from_)


def cuMemcpyDtoDAsync(to, from_, size, stream):
    return _move(to, from_, size, to) if inside(from_, size) else (CUresult.CUDA_ERROR_INVALID_VALUE,)


class CUDA_MEMCPY2D:
    srcHost = srcDevice = dstHost = dstDevice = 0


def cuMemcpy2DAsync(call, stream):
    host = CUmemorytype.CU_MEMORYTYPE_HOST
    from_ = call.srcHost if call.srcMemoryType is host else call.srcDevice
    to = call.dstHost if call.dstMemoryType is host else call.dstDevice
    if min(call.srcPitch, call.dstPitch) < call.WidthInBytes:
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)
    for row in range(call.Height):
        source, target = from_ + row * call.srcPitch, to + row * call.dstPitch
        status = _move(target, source, call.WidthInBytes, source if call.dstMemoryType is host else target)
        if status != OK:
            return status
    return OK


def cuMemsetD2D8Async(address, pitch, byte, width, height, stream):
    if pitch < width or not inside(address, (height - 1) * pitch + width):
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)
    for row in range(height):
        ctypes.memset(address + row * pitch, byte, width)
    return OK


def cuStreamCreate(flags):
    return *OK, 7


def cuStreamSynchronize(stream):
    return OK


def cuEventCreate(flags):
    return *OK, [0.0]


def cuEventRecord(event, stream):
    event[0] = time.perf_counter()
    return OK


def cuEventSynchronize(event):
    return OK


def cuEventElapsedTime(first, last):
    return *OK, 1e3 * (last[0] - first[0])


def cuModuleLoadData(image):
    return *OK, ctypes.PyDLL(str(settings.library))


def cuModuleGetFunction(module, name):
    return *OK, getattr(module, name.decode())


def cuLaunchKernel(function, x, y, z, threads, threads_y, threads_z, shared, stream, parameters, extra):
    if not (min(x, y, z) >= 1 and max(y, z) < 65536 and 1 <= threads <= 1024 and threads_y == threads_z == 1):
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)
    struct = ctypes.c_void_p.from_address(parameters).value
    function(ctypes.c_void_p(struct), (ctypes.c_uint * 3)(x, y, z), threads)
    return OK


def cuDeviceGetAttribute(attribute, device):
    return *OK, {"major": 0, "minor": 0, "integrated": settings.integrated}[attribute]


def cuDriverGetVersion():
    return *OK, 13000


def cuDeviceGetName(size, device):
    return *OK, b"the CPU, as a CUDA device" + bytes(8)


def cuDeviceTotalMem(device):
    return *OK, MEMORY


def cuGetErrorString(status):
    return *OK, status.name.encode()
