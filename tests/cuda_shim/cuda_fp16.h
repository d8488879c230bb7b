// CUDA as g++ understands it, so that the very same .cu files run on the CPU: found in place of the toolkit's header of this name.
// One block runs after another; its threads are fibers that switch where they wait for each other. It proves what the kernels
// compute, not how fast, nor how real threads would meet in memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
inline dim3 blockIdx, gridDim, blockDim, threadIdx;  // threadIdx: of the fiber that runs

struct alignas(16) int4 {
    int x, y, z, w;
};

struct __half {
    _Float16 value;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }

namespace shim {

constexpr int kWarp = 32;

void run(dim3 grid, unsigned threads, const std::function<void()>& kernel);
void wait_for_block();
const std::uint64_t* exchange(std::uint64_t own);  // every thread of the warp gives a number; afterwards each sees all

template <typename X>
std::uint64_t bits(X x) {
    static_assert(sizeof(X) <= 8);
    std::uint64_t out = 0;
    std::memcpy(&out, &x, sizeof x);
    return out;
}
template <typename X>
X from_bits(std::uint64_t bits) {
    X x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <typename X, typename F>
X update(X* at, F&& f) {
    const X before = *at;
    *at = f(before);
    return before;
}

}  // namespace shim

inline void __syncthreads() { shim::wait_for_block(); }
template <typename X>
X __shfl_xor_sync(unsigned, X x, int step) {
    return shim::from_bits<X>(shim::exchange(shim::bits(x))[(threadIdx.x % shim::kWarp) ^ static_cast<unsigned>(step)]);
}
inline unsigned __ballot_sync(unsigned, bool yes) {
    const std::uint64_t* const given = shim::exchange(yes);
    unsigned votes = 0;
    for (int lane = 0; lane < shim::kWarp; ++lane) votes |= static_cast<unsigned>(given[lane]) << lane;
    return votes;
}
inline bool __any_sync(unsigned all, bool yes) { return __ballot_sync(all, yes) != 0; }

template <typename X>
X atomicAdd(X* at, X more) {
    static_assert(std::is_integral_v<X>, "sums in floating point would depend on who comes first");
    return shim::update(at, [=](X x) { return x + more; });
}
template <typename X>
X atomicMax(X* at, X other) {
    return shim::update(at, [=](X x) { return x > other ? x : other; });
}
template <typename X>
X atomicCAS(X* at, X expected, X wanted) {
    return shim::update(at, [=](X x) { return x == expected ? wanted : x; });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(shim::bits(x)); }
inline long long __float2ll_rn(float x) { return std::llrint(x); }
inline float rsqrtf(float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); }
inline void sincospif(float x, float* sine, float* cosine) {
    const double angle = 3.14159265358979323846 * x;
    *sine = static_cast<float>(std::sin(angle));
    *cosine = static_cast<float>(std::cos(angle));
}
template <typename X, typename Y>
auto min(X x, Y y) {
    return x < y ? x : y;
}
template <typename X, typename Y>
auto max(X x, Y y) {
    return x < y ? y : x;
}

// Called by name with the address of the struct, as the driver does; its size is there for a test to compare.
#define EDGEVLM_KERNEL(name, Call, ...)                                                         \
    static void kernel_##name(const Call at) { __VA_ARGS__; }                                   \
    extern "C" std::size_t edgevlm_##name##_size() { return sizeof(Call); }                     \
    extern "C" void edgevlm_##name(const void* call, const unsigned* grid, unsigned threads) {  \
        Call at;                                                                                \
        std::memcpy(&at, call, sizeof at);                                                      \
        shim::run({grid[0], grid[1], grid[2]}, threads, [&at] { kernel_##name(at); });          \
    }
