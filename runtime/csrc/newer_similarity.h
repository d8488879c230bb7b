// How alike each token is to the newest of its kind: what last-seen ranks by.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "rotary.h"
#include "strided.h"

namespace edgevlm {

template <typename T>
struct DatedKeys {
    Volume<T> key;                  // [H, n, D]
    Volume<std::int32_t> position;  // [H, n, axes]
    Plane<std::int64_t> seq;        // [H, n]
    Mask valid;                     // [H, n]
    std::int64_t since;             // tokens of a smaller seq are compared, and not compared with
};

std::size_t newer_similarity_scratch(std::int64_t rows, std::int64_t head_dim);

// out [n], of one head: for valid tokens the highest cosine with a valid token of larger seq, `since` or later, -1 where there is
// none; 0 for all others. A zero vector has cosine 0 with everything. rotary (of D / 2 pairs) un-rotates; null compares keys as stored.
// O(n m D) for m tokens since then. memory: newer_similarity_scratch.
template <typename T>
void newer_similarity(const DatedKeys<T>& tokens, std::int64_t head, const Rotary* rotary, float* out, BumpAllocator memory);

}  // namespace edgevlm
