#include "select.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace edgevlm {

namespace {

struct Candidate {
    std::uint32_t rank;  // the score as a whole number of the same order
    std::uint32_t index;
};

std::uint32_t rank_of(float score) {
    if (std::isnan(score)) return 0;
    score += 0.0f;  // -0 becomes +0: they are a tie
    std::uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int kBits = 11, kBuckets = 1 << kBits;  // three digits of a rank

}  // namespace

std::size_t top_k_scratch(std::int64_t rows) {
    Carver sizes;
    sizes.take<Candidate>(rows);
    sizes.take<std::uint32_t>(kBuckets);
    return sizes.bytes();
}

// From the highest digit down: buckets above the one that the k-th falls in are chosen, those below are out, and the next
// digit decides within it. What is left after the last digit are equal scores.
void top_k(const Plane<float>& score, const Plane<std::int64_t>& seq, const Mask& candidates, std::int64_t head,
           std::int64_t k, bool* out, Carver memory) {
    const std::int64_t rows = score.rows;
    Candidate* const list = memory.take<Candidate>(rows);
    std::uint32_t* const buckets = memory.take<std::uint32_t>(kBuckets);
    std::fill_n(out, rows, false);
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
        list[count] = {rank_of(score.at(head, i)), static_cast<std::uint32_t>(i)};
        count += candidates.at(head, i) != 0;
    }
    const auto choose = [out](const Candidate& c) { out[c.index] = true; };
    for (int shift = 32 - kBits; k > 0 && k < count; shift = std::max(shift - kBits, 0)) {
        const auto digit = [shift](const Candidate& c) { return c.rank >> shift & (kBuckets - 1); };
        std::fill_n(buckets, kBuckets, 0u);
        for (std::int64_t c = 0; c < count; ++c) ++buckets[digit(list[c])];
        std::uint32_t bucket = kBuckets - 1;
        for (; buckets[bucket] < k; --bucket) k -= buckets[bucket];
        std::int64_t left = 0;
        for (std::int64_t c = 0; c < count; ++c) {
            const std::uint32_t d = digit(list[c]);
            if (d > bucket) choose(list[c]);
            list[left] = list[c];
            left += d == bucket;
        }
        count = left;
        if (shift == 0) break;
    }
    if (k <= 0) return;
    if (k < count) {  // equal scores
        std::nth_element(list, list + k, list + count, [&](const Candidate& a, const Candidate& b) {
            const std::int64_t first = seq.at(head, a.index), second = seq.at(head, b.index);
            return first != second ? first > second : a.index < b.index;
        });
    }
    std::for_each(list, list + std::min(k, count), choose);
}

}  // namespace edgevlm
