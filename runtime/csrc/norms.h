// InfiniPot-V's VaN: the L2 norm of each value, averaged over the neighbouring patches of its own frame.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "strided.h"

namespace edgevlm {

// Where a float32 sum of squares can be trusted: no square overflowed, and what underflowed does not matter.
inline bool trusted(float square) { return square > 1e-24f && square < 1e30f; }

// out [n], of one head: the L2 norm of value [H, n, D]; no square overflows.
template <typename T>
void value_norms(const Volume<T>& value, std::int64_t head, float* out);

// Nothing that eviction or new positions do to a row changes its value's norm, so that a cache keeps it.
constexpr float kUnknownNorm = -1;

// Those that a cache holds.
struct Norms {
    float* first = nullptr;
    std::int64_t head_stride = 0;  // in floats

    float* of(std::int64_t head) const { return first + head * head_stride; }
    Plane<float> plane(std::int64_t heads, std::int64_t rows) const {
        return {reinterpret_cast<const std::byte*>(first), head_stride * static_cast<std::ptrdiff_t>(sizeof(float)), heads, rows};
    }
};

// The same where norm [n] is not known: reads no value twice in its life.
template <typename T>
void complete_norms(const Volume<T>& value, std::int64_t head, float* norm);

struct PatchedNorms {
    Plane<float> norm;             // [H, n]
    Plane<std::int32_t> frame;     // [H, n]
    Plane<std::int16_t> row, col;  // [H, n]
    Mask valid;                    // [H, n]
};

std::size_t pool_scratch(std::int64_t rows);

// out [n], of one head: for valid tokens the mean norm over the valid tokens of the same frame and head whose row and column
// differ by at most window / 2 (absent neighbours left out); 0 for all others. memory: pool_scratch.
void pool_norms(const PatchedNorms& tokens, std::int64_t head, int window, float* out, BumpAllocator memory);

// out [H, n]: the tokens of `among` that lie in one of the `count` newest frames of all heads.
std::size_t newest_scratch(std::int64_t count);
void newest_frames(const Plane<std::int32_t>& frame, const Mask& among, std::int64_t count, bool* out, BumpAllocator memory);

}  // namespace edgevlm
