#include "select.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "simd.h"

namespace edgevlm {

namespace {

constexpr std::int32_t kOut = std::numeric_limits<std::int32_t>::min();  // below every rank
constexpr std::int32_t kHighest = 0x7f800000;                            // infinity's

// The score as an integer of the same order; NaN is the lowest.
std::int32_t rank_of(float score) {
    score += 0.0f;  // -0 becomes +0: they are a tie
    std::int32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    const std::int32_t rank = bits ^ (bits >> 31 & std::numeric_limits<std::int32_t>::max());
    return score != score ? kOut + 1 : rank;
}

}  // namespace

std::size_t top_k_scratch(std::int64_t rows) {
    BumpAllocator sizes;
    for (int list = 0; list < 2; ++list) sizes.take<std::int32_t>(rows);
    return sizes.bytes();
}

// The k-th highest rank is found by halving the range that it lies in: ranks above a middle are counted much faster than they
// could be moved.
void top_k(const float* score, const std::int64_t* seq, const std::uint8_t* candidates, std::int64_t rows, std::int64_t k,
           bool* out, BumpAllocator memory) {
    std::int32_t* const rank = memory.take<std::int32_t>(rows);
    std::int32_t* const index = memory.take<std::int32_t>(rows);
    for (std::int64_t i = 0; i < rows; ++i) {
        const std::int32_t among = -(candidates[i] != 0);
        rank[i] = (rank_of(score[i]) & among) | (kOut & ~among);
    }
    std::int32_t low = kOut + 1, high = kHighest;
    if (k <= 0 || k >= simd().at_least(rank, rows, low)) {
        for (std::int64_t i = 0; i < rows; ++i) out[i] = k > 0 && candidates[i];
        return;
    }
    while (low < high) {  // it lies in [low, high]
        const auto middle = static_cast<std::int32_t>(low + (std::int64_t{high} - low + 1) / 2);
        const std::int64_t from_there = simd().at_least(rank, rows, middle);
        if (from_there >= k) low = middle;
        else high = middle - 1;
        if (from_there == k) break;
    }
    for (std::int64_t i = 0; i < rows; ++i) out[i] = rank[i] > low;
    const std::int64_t left = k - simd().at_least(rank, rows, low + 1);
    std::int64_t equal = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
        if (rank[i] == low) index[equal++] = static_cast<std::int32_t>(i);
    }
    if (left < equal) {
        std::nth_element(index, index + left, index + equal, [seq](std::int32_t a, std::int32_t b) {
            return seq[a] != seq[b] ? seq[a] > seq[b] : a < b;
        });
    }
    std::for_each(index, index + left, [out](std::int32_t i) { out[i] = true; });
}

}  // namespace edgevlm
