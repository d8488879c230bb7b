// InfiniPot-V's VaN: the L2 norm of each value, averaged over the neighbouring patches of its own frame.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "strided.h"

namespace edgevlm {

// out [H, n]: the L2 norm of value [H, n, D], summed in double, so that no square overflows.
void value_norms(const Volume<float>& value, float* out);

struct PatchedNorms {
    Plane<float> norm;             // [H, n]
    Plane<std::int32_t> frame;     // [H, n]
    Plane<std::int16_t> row, col;  // [H, n]
    Mask valid;                    // [H, n]
};

std::size_t pool_scratch(std::int64_t rows);

// out [H, n]: for valid tokens the mean norm over the valid tokens of the same frame and head whose row and column differ by
// at most window / 2 (absent neighbours left out); 0 for all others.
void pool_norms(const PatchedNorms& tokens, int window, float* out, Scratch* scratch);

}  // namespace edgevlm
