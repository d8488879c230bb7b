// InfiniPot-V, eq. 4 (TaR), before the negation: how alike a past token is to the recent ones of its own patch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "rotary.h"
#include "strided.h"

namespace edgevlm {

template <typename T>
struct PatchedKeys {
    Volume<T> key;                  // [H, n, D]
    Volume<std::int32_t> position;  // [H, n, axes]
    Plane<std::int16_t> row, col;   // [H, n]
    Mask recent, valid;             // [H, n]
};

std::size_t similarity_scratch(std::int64_t rows, std::int64_t head_dim);

// out [n], of one head: for valid tokens that are not recent the mean cosine with the valid recent tokens of the same
// (row, col), -1 where there is none; 0 for all others. rotary (of D / 2 pairs) un-rotates; null compares keys as stored.
// Reads each key once. memory: similarity_scratch.
template <typename T>
void temporal_similarity(const PatchedKeys<T>& tokens, std::int64_t head, const Rotary* rotary, float* out, BumpAllocator memory);

}  // namespace edgevlm
