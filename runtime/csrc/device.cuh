// What the CUDA kernels share: how a call's rows lie, groups of lanes that read a row together, and exact rotary angles.
//
// A kernel takes one struct by value; its twin in runtime/cuda/calls.py has the same fields in the same order. One call covers
// all layers and heads: blockIdx.y is the head, blockIdx.z the layer, blockIdx.x a tile of rows. What is known of rows is dense
// per call, [H, n_l] of one layer after another; keys and values stay where they are in the arena, [H, C_l, D].
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace edgevlm {

constexpr int kThreads = 256;  // of every block
constexpr unsigned kAll = 0xffffffffu;

// One layer's rows. first: where its rows begin in arrays that are dense per call.
struct LayerRows {
    void *key, *value;    // [H, capacity, D]
    float* norm;          // [H, norm_stride], the values'
    std::int64_t capacity, norm_stride, first;
    std::int32_t rows, known;  // rows [0, known) have their norm
};

// What every call over rows has. lanes: of a group, a power of two; wide: 16 bytes at a time; pairs: D / 2.
struct Rows {
    const LayerRows* layers;
    std::int32_t heads, pairs, lanes, wide;
};

// How keys are turned. turns [pairs]: how far a pair turns with one step, in 2^-64 of a full turn.
struct Turns {
    const std::uint64_t* turns;
    const std::uint8_t* axis;  // [pairs], of the position
    std::int32_t axes, on;     // on 0: keys are taken as they are stored
};

__device__ inline float number(float x) { return x; }
__device__ inline float number(__half x) { return __half2float(x); }
__device__ inline void store(float x, float* to) { *to = x; }
__device__ inline void store(float x, __half* to) { *to = __float2half_rn(x); }

template <typename T, bool kWide>
constexpr int kEach = kWide ? 16 / static_cast<int>(sizeof(T)) : 1;  // numbers of a load

template <typename T, int N>
__device__ inline void load(const T* from, float (&to)[N]) {
    if constexpr (N == 1) {
        to[0] = number(*from);
    } else {
        const int4 raw = *reinterpret_cast<const int4*>(from);
        const T* const part = reinterpret_cast<const T*>(&raw);
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = number(part[i]);
    }
}

template <typename T, int N>
__device__ inline void save(const float (&from)[N], T* to) {
    if constexpr (N == 1) {
        store(from[0], to);
    } else {
        int4 raw;
        T* const part = reinterpret_cast<T*>(&raw);
#pragma unroll
        for (int i = 0; i < N; ++i) store(from[i], part + i);
        *reinterpret_cast<int4*>(to) = raw;
    }
}

// Lanes of a warp that read one row together: `size` of them, side by side.
struct Group {
    int size, lane, index, count;  // index: of this group in its block, of `count`

    __device__ explicit Group(int lanes)
        : size(lanes), lane(static_cast<int>(threadIdx.x) % lanes), index(static_cast<int>(threadIdx.x) / lanes),
          count(kThreads / lanes) {}

    // Over the lanes of each group, the same bits in all of them. The whole warp takes part.
    template <typename X>
    __device__ X sum(X x) const {
        for (int step = size / 2; step; step /= 2) x += __shfl_xor_sync(kAll, x, step);
        return x;
    }
};

// Calls body(first, second, d) for the rotary pairs (d + j, d + j + pairs) of a row that are this lane's, as float32.
template <typename T, bool kWide, typename Body>
__device__ inline void each_pair(const T* row, int pairs, const Group& group, Body&& body) {
    constexpr int N = kEach<T, kWide>;
    for (int d = group.lane * N; d < pairs; d += group.size * N) {
        float first[N], second[N];
        load(row + d, first);
        load(row + pairs + d, second);
        body(first, second, d);
    }
}

// Where a float32 sum of squares can be trusted: no square overflowed, and what underflowed does not matter.
__device__ inline bool trusted(float square) { return square > 1e-24f && square < 1e30f; }

// (cos, sin) of `by` steps. The product wraps around with the circle, so that an angle of a million turns is as exact as a small
// one; what is left of it after whole quarters is small enough for float32.
__device__ inline void angle_of(std::int64_t by, std::uint64_t turn, float& cosine, float& sine) {
    const auto place = static_cast<std::uint32_t>((static_cast<std::uint64_t>(by) * turn) >> 32);  // in 2^-32 of a turn
    const std::uint32_t quarters = (place + (1u << 29)) >> 30;
    float c, s;
    sincospif(static_cast<float>(static_cast<std::int32_t>(place - (quarters << 30))) * 0x1p-31f, &s, &c);
    const float along = quarters & 1 ? s : c, across = quarters & 1 ? c : s;
    cosine = (quarters + 1) & 2 ? -along : along;
    sine = quarters & 2 ? -across : across;
}

// Turns a pair back from `at` to `to`, both [axes].
__device__ inline void turn_back(const Turns& how, const std::int32_t* at, const std::int32_t* to, int d, float& u, float& v) {
    const int axis = how.axes == 1 ? 0 : how.axis[d];
    float cosine, sine;
    angle_of(std::int64_t{at[axis]} - to[axis], how.turns[d], cosine, sine);
    const float turned = u * cosine + v * sine;
    v = v * cosine - u * sine;
    u = turned;
}

// An open table from keys to the rows that have them: a power of two of slots, rows + 1, 0 where there is none. The slot that a
// key gets depends on who comes first; nothing that is computed does.
struct Slots {
    std::int32_t* row;  // [size]
    std::uint32_t size;

    __device__ static std::uint32_t mixed(std::uint64_t key) {
        return static_cast<std::uint32_t>((key * 0x9E3779B97F4A7C15ull) >> 32);
    }

    // The slot of the key that `row` has; claims it if nobody has. same(other): whether another row has the same key.
    template <typename Same>
    __device__ std::uint32_t claim(std::uint64_t key, std::int32_t own, Same&& same) const {
        for (std::uint32_t slot = mixed(key) & (size - 1);; slot = (slot + 1) & (size - 1)) {
            const std::int32_t there = atomicCAS(row + slot, 0, own + 1);
            if (there == 0 || same(there - 1)) return slot;
        }
    }

    // The same without claiming; -1 where nobody has the key.
    template <typename Same>
    __device__ std::int64_t find(std::uint64_t key, Same&& same) const {
        for (std::uint32_t slot = mixed(key) & (size - 1);; slot = (slot + 1) & (size - 1)) {
            const std::int32_t there = row[slot];
            if (there == 0) return -1;
            if (same(there - 1)) return slot;
        }
    }
};

}  // namespace edgevlm

// A kernel as the driver finds it, edgevlm_ before its name: its statement sees the call as `at`.
#ifndef EDGEVLM_KERNEL
#define EDGEVLM_KERNEL(name, Call, ...) \
    extern "C" __global__ void __launch_bounds__(edgevlm::kThreads) edgevlm_##name(const Call at) { __VA_ARGS__; }
#endif

// The same for both element types, and for rows that can be loaded 16 bytes at a time and those that cannot.
#define EDGEVLM_ROW_KERNEL(name, Call, body)                                                              \
    EDGEVLM_KERNEL(name##_fp32, Call, at.rows.wide ? body<float, true>(at) : body<float, false>(at))      \
    EDGEVLM_KERNEL(name##_fp16, Call, at.rows.wide ? body<__half, true>(at) : body<__half, false>(at))
