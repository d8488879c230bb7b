// The functions of libcuda.so.1 that we call through pycuda, over the host's own memory: "the device" is this process, and kernels are those that
// g++ compiled; a module's image is the path of their library. What a caller would get wrong on a device fails here too: addresses
// outside an allocation. Fresh memory is full of 0xA5. cuda_backend.py adds what pycuda links and we do not call.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

using Address = unsigned long long;

extern "C" {

int device_count = 0, integrated = 0;

enum { kSuccess, kInvalidValue, kOutOfMemory };

namespace {
constexpr std::size_t kMemory = std::size_t{1} << 32;
std::map<Address, std::size_t> blocks;  // address -> bytes

bool inside(Address address, std::size_t bytes) {
    auto after = blocks.upper_bound(address);
    return after != blocks.begin() && address + bytes <= (--after)->first + after->second;
}
std::size_t free_bytes() {
    std::size_t held = 0;
    for (const auto& block : blocks) held += block.second;
    return kMemory - held;
}
void* pointer(Address address) { return reinterpret_cast<void*>(address); }
}  // namespace

int cuInit(unsigned) { return kSuccess; }
int cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
int cuGetErrorString(int status, const char** words) {
    *words = status == kInvalidValue  ? "invalid argument"
             : status == kOutOfMemory ? "out of memory"
                                      : "operation not supported";
    return kSuccess;
}
int cuDeviceGetCount(int* count) { return *count = device_count, kSuccess; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, kSuccess; }
int cuDeviceGetName(char* name, int bytes, int) { return std::snprintf(name, bytes, "the CPU, as a CUDA device"), kSuccess; }
int cuDeviceTotalMem_v2(std::size_t* bytes, int) { return *bytes = kMemory, kSuccess; }
int cuDeviceGetAttribute(int* found, int attribute, int) { return *found = attribute == 18 ? integrated : 0, kSuccess; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &blocks, kSuccess; }
int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }
int cuDeviceComputeCapability(int* major, int* minor, int) { return *major = *minor = 0, kSuccess; }
int cuCtxPushCurrent_v2(void* context) { return context == &blocks ? kSuccess : kInvalidValue; }
int cuCtxPopCurrent_v2(void** context) { return *context = &blocks, kSuccess; }

int cuMemGetInfo_v2(std::size_t* free, std::size_t* total) { return *free = free_bytes(), *total = kMemory, kSuccess; }
int cuMemAlloc_v2(Address* address, std::size_t bytes) {
    if (!bytes) return kInvalidValue;
    if (bytes > free_bytes()) return kOutOfMemory;
    void* block = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(block, 0xA5, bytes);
    *address = reinterpret_cast<Address>(block);
    blocks[*address] = bytes;
    return kSuccess;
}
int cuMemFree_v2(Address address) {
    if (!blocks.erase(address)) return kInvalidValue;
    std::free(pointer(address));
    return kSuccess;
}
int cuMemHostAlloc(void** start, std::size_t bytes, unsigned flags) {
    return flags == 2 ? cuMemAlloc_v2(reinterpret_cast<Address*>(start), bytes) : kInvalidValue;
}
int cuMemHostGetDevicePointer_v2(Address* address, void* start, unsigned) {
    return *address = reinterpret_cast<Address>(start), kSuccess;
}
int cuMemFreeHost(void* start) { return cuMemFree_v2(reinterpret_cast<Address>(start)); }

int cuMemcpyHtoDAsync_v2(Address to, const void* from, std::size_t bytes, void*) {
    return inside(to, bytes) ? (std::memcpy(pointer(to), from, bytes), kSuccess) : kInvalidValue;
}
int cuMemcpyDtoHAsync_v2(void* to, Address from, std::size_t bytes, void*) {
    return inside(from, bytes) ? (std::memcpy(to, pointer(from), bytes), kSuccess) : kInvalidValue;
}
int cuMemcpyDtoDAsync_v2(Address to, Address from, std::size_t bytes, void* stream) {
    return inside(from, bytes) ? cuMemcpyHtoDAsync_v2(to, pointer(from), bytes, stream) : kInvalidValue;
}

struct Side {
    std::size_t x, y;
    int type;
    void* host;
    Address device;
    void* array;
    std::size_t pitch;

    // Where a row lies; null for one outside an allocation.
    char* row(std::size_t at, std::size_t bytes) const {
        if (type == 1) return static_cast<char*>(host) + at * pitch;
        return type == 2 && inside(device + at * pitch, bytes) ? static_cast<char*>(pointer(device + at * pitch)) : nullptr;
    }
};
struct Copy {
    Side from, to;
    std::size_t width, height;
};
int cuMemcpy2DAsync_v2(const Copy* copy, void*) {
    if (std::min(copy->from.pitch, copy->to.pitch) < copy->width) return kInvalidValue;
    for (std::size_t at = 0; at < copy->height; ++at) {
        char *from = copy->from.row(at, copy->width), *to = copy->to.row(at, copy->width);
        if (!from || !to) return kInvalidValue;
        std::memcpy(to, from, copy->width);
    }
    return kSuccess;
}
int cuMemsetD2D8Async(Address address, std::size_t pitch, unsigned char byte, std::size_t width, std::size_t height, void*) {
    if (pitch < width || !inside(address, (height - 1) * pitch + width)) return kInvalidValue;
    for (std::size_t at = 0; at < height; ++at) std::memset(pointer(address + at * pitch), byte, width);
    return kSuccess;
}

int cuStreamCreate(void** stream, unsigned flags) { return *stream = &blocks, flags == 1 ? kSuccess : kInvalidValue; }
int cuStreamSynchronize(void*) { return kSuccess; }
int cuStreamDestroy_v2(void*) { return kSuccess; }
int cuEventCreate(void** event, unsigned) { return *event = new double(0), kSuccess; }
int cuEventRecord(void* event, void*) {
    const std::chrono::duration<double, std::milli> now = std::chrono::steady_clock::now().time_since_epoch();
    return *static_cast<double*>(event) = now.count(), kSuccess;
}
int cuEventSynchronize(void*) { return kSuccess; }
int cuEventDestroy_v2(void* event) { return delete static_cast<double*>(event), kSuccess; }
int cuEventElapsedTime_v2(float* ms, void* first, void* last) {
    return *ms = static_cast<float>(*static_cast<double*>(last) - *static_cast<double*>(first)), kSuccess;
}

int cuModuleUnload(void*) { return kSuccess; }
int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void** options) {
    options[1] = options[3] = nullptr;  // bytes of its logs
    *module = dlopen(static_cast<const char*>(image), RTLD_NOW);
    return *module ? kSuccess : kInvalidValue;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = dlsym(module, name);
    return *function ? kSuccess : kInvalidValue;
}
int cuFuncSetBlockShape(void*, int, int, int) { return kSuccess; }
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                   unsigned, void*, void**, void** extra) {  // extra: 1, arguments, 2, &bytes, 0
    const bool fits = x && y && z && std::max(y, z) < 65536 && threads && threads <= 1024 && threads_y == 1 && threads_z == 1;
    if (!fits) return kInvalidValue;
    const unsigned grid[3] = {x, y, z};
    reinterpret_cast<void (*)(void*, const unsigned*, unsigned)>(function)(extra[1], grid, threads);
    return kSuccess;
}

}  // extern "C"
