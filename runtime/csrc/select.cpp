#include "select.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace edgevlm {

namespace {

constexpr std::uint32_t kOut = 0;  // below every rank

// The score as a whole number of the same order; NaN is the lowest.
std::uint32_t rank_of(float score) {
    score += 0.0f;  // -0 becomes +0: they are a tie
    std::uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    const std::uint32_t rank = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return score != score ? 1u : rank;
}

constexpr int kBits = 10, kBuckets = 1 << kBits;

int shift_of(std::uint32_t range) {  // that brings it below kBuckets
    int shift = 0;
    while (range >> shift >= kBuckets) ++shift;
    return shift;
}

}  // namespace

std::size_t top_k_scratch(std::int64_t rows) {
    Carver sizes;
    for (int list = 0; list < 2; ++list) sizes.take<std::uint32_t>(rows);
    sizes.take<std::uint32_t>(kBuckets + 1);
    return sizes.bytes();
}

// The ranks that are still open are cut into buckets of equal width: those above the one that the k-th falls in are chosen,
// those below are out, and the next round cuts up that bucket, until it holds equal ranks alone.
void top_k(const float* score, const std::int64_t* seq, const std::uint8_t* candidates, std::int64_t rows, std::int64_t k,
           bool* out, Carver memory) {
    std::uint32_t* const rank = memory.take<std::uint32_t>(rows);
    std::uint32_t* const index = memory.take<std::uint32_t>(rows);
    std::uint32_t* const bucket = memory.take<std::uint32_t>(kBuckets + 1);
    std::int64_t open = 0, count = rows;
    for (std::int64_t i = 0; i < rows; ++i) {
        const std::uint32_t among = 0u - (candidates[i] != 0);
        rank[i] = rank_of(score[i]) & among;
        index[i] = static_cast<std::uint32_t>(i);
        open += candidates[i] != 0;
    }
    std::fill_n(out, rows, false);
    while (k > 0 && k < open) {
        std::uint32_t low = ~0u, high = 0;
        for (std::int64_t c = 0; c < count; ++c) {
            low = std::min(low, rank[c] - 1);  // what is out wraps to the highest
            high = std::max(high, rank[c]);
        }
        if (low + 1 == high) break;
        const int shift = shift_of(high - low - 1);
        const auto place = [=](std::uint32_t r) { return (1 + ((r - 1 - low) >> shift)) & (0u - (r != kOut)); };  // no branch
        std::fill_n(bucket, kBuckets + 1, 0u);
        for (std::int64_t c = 0; c < count; ++c) ++bucket[place(rank[c])];
        std::uint32_t last = kBuckets;
        for (; bucket[last] < k; --last) k -= bucket[last];
        open = bucket[last];
        std::int64_t left = 0;
        for (std::int64_t c = 0; c < count; ++c) {
            const std::uint32_t at = place(rank[c]);
            out[index[c]] = at > last;
            rank[left] = rank[c];
            index[left] = index[c];
            left += at == last;
        }
        count = left;
    }
    if (k <= 0) return;
    std::int64_t left = 0;
    for (std::int64_t c = 0; c < count; ++c) {
        index[left] = index[c];
        left += rank[c] != kOut;
    }
    if (k < open) {  // equal scores
        std::nth_element(index, index + k, index + open, [seq](std::uint32_t a, std::uint32_t b) {
            return seq[a] != seq[b] ? seq[a] > seq[b] : a < b;
        });
    }
    std::for_each(index, index + std::min(k, open), [out](std::uint32_t i) { out[i] = true; });
}

}  // namespace edgevlm
