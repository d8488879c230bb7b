// Exact selection with the tie rule of every policy: the newer token wins.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"

namespace edgevlm {

std::size_t top_k_scratch(std::int64_t rows);

// out [n]: the k candidates of the highest score, all of them if there are fewer. Equal scores: the larger seq wins, then the
// lower row. NaN is lower than every number. O(n). memory: top_k_scratch.
void top_k(const float* score, const std::int64_t* seq, const std::uint8_t* candidates, std::int64_t rows, std::int64_t k,
           bool* out, BumpAllocator memory);

}  // namespace edgevlm
