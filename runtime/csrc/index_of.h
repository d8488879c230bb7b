// Joining tokens of two lists by their place in the stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"

namespace edgevlm {

std::size_t index_of_scratch(std::int64_t known);

// out [n]: where each of seq [n] stands in known [m], the first place of several, -1 where it does not. O(n + m), whatever the
// numbers. memory: index_of_scratch(m).
void index_of(const std::int64_t* seq, std::int64_t n, const std::int64_t* known, std::int64_t m, std::int32_t* out, BumpAllocator memory);

// out [n] takes the score [m] of each of seq [n] that is among known [m]; the others stay. memory: join_scratch(n, m).
std::size_t join_scratch(std::int64_t n, std::int64_t m);
void join(const std::int64_t* seq, std::int64_t n, const std::int64_t* known, std::int64_t m, const float* score, float* out,
          BumpAllocator memory);

}  // namespace edgevlm
