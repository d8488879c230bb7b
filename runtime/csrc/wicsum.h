// WiCSum (V-Rex, sec. IV-C, eqs. 1 to 3): the fewest clusters that hold more than a fraction of a row's attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"

namespace edgevlm {

// Of one KV head. A cluster whose count is 0 is none.
struct Scored {
    const float* key;           // [slots, width]
    const std::int32_t* count;  // [slots]
    const float* query;         // [rows, width], of all query heads of the group
    std::int64_t slots, width, rows;
};

std::size_t wicsum_scratch(std::int64_t slots, std::int64_t width);

// best [slots]: the highest score, over rows, of a cluster that some row chooses; -1 of the others. Scores of a row are the
// softmax of q k / sqrt(width). It chooses in descending order, of equal scores the lower slot first, until the sum of score
// times count is above `threshold` of that over all. memory: wicsum_scratch.
void wicsum(const Scored& clusters, double threshold, float* best, BumpAllocator memory);

}  // namespace edgevlm
