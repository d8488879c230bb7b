#include "wicsum.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace edgevlm {

namespace {

constexpr std::int64_t kMostRows = 32;  // lanes of two vectors of the widest instruction set
constexpr int kBuckets = 64;            // of scores as fractions of the row's highest, equally wide

struct Ranked {
    float score;
    std::int32_t at;

    bool operator<(const Ranked& other) const { return score != other.score ? score > other.score : at < other.at; }
};

struct Memory {
    float *key, *query, *scores;  // [live, width], [width, lanes], [live, lanes]
    float *highest, *sum;         // [lanes]
    std::int32_t *slot, *count;   // [live]
    std::uint8_t* bucket;         // [live]
    Ranked* ranked;               // [live]

    Memory(std::int64_t slots, std::int64_t width, BumpAllocator& memory) {
        key = memory.take<float>(slots * width);
        query = memory.take<float>(width * kMostRows);
        scores = memory.take<float>(slots * kMostRows);
        for (float** part : {&highest, &sum}) *part = memory.take<float>(kMostRows);
        for (std::int32_t** part : {&slot, &count}) *part = memory.take<std::int32_t>(slots);
        bucket = memory.take<std::uint8_t>(slots);
        ranked = memory.take<Ranked>(slots);
    }
};

// Keys that are not finite make scores that are not: none of those is chosen, and all can be sorted.
float fraction_of(float score) { return score > 0 ? std::min(score, 1.0f) : 0.0f; }

// One row, whose scores are `lanes` apart and, as fractions of the highest, lie in [0, 1]. From the top bucket down: those that
// do not reach the limit are taken as they are, and only the one that does is sorted.
void choose(const float* scores, std::int64_t lanes, std::int64_t live, double threshold, float total, Memory& at, float* best) {
    double weight[kBuckets] = {};
    for (std::int64_t i = 0; i < live; ++i) {
        const float score = fraction_of(scores[i * lanes]);
        at.bucket[i] = static_cast<std::uint8_t>(std::min(kBuckets - 1, static_cast<int>(score * kBuckets)));
        weight[at.bucket[i]] += static_cast<double>(score) * at.count[i];
    }
    double limit = 0, reached = 0;
    for (int b = kBuckets - 1; b >= 0; --b) limit += weight[b];
    limit *= threshold;
    int full_from = kBuckets;  // buckets from here up are taken whole
    std::int64_t taken = 0, found = 0;  // of `ranked`
    for (bool above = false; !above && full_from > 0;) {
        const int b = full_from - 1;
        if (reached + weight[b] <= limit) {
            reached += weight[b];
            full_from = b;
            continue;
        }
        found = taken = 0;
        for (std::int64_t i = 0; i < live; ++i) {
            if (at.bucket[i] == b) at.ranked[found++] = {fraction_of(scores[i * lanes]), static_cast<std::int32_t>(i)};
        }
        std::sort(at.ranked, at.ranked + found);
        while (!above && taken < found) {
            const Ranked& next = at.ranked[taken++];
            reached += static_cast<double>(next.score) * at.count[next.at];
            above = reached > limit;
        }
        if (!above) full_from = b;  // the sums of its parts and of the whole were rounded otherwise
    }
    const auto take = [&](std::int64_t i, float score) {
        float& most = best[at.slot[i]];
        most = std::max(most, score / total);
    };
    for (std::int64_t i = 0; i < live; ++i) {
        if (at.bucket[i] >= full_from) take(i, fraction_of(scores[i * lanes]));
    }
    for (std::int64_t k = 0; full_from > 0 && k < taken; ++k) take(at.ranked[k].at, at.ranked[k].score);
}

}  // namespace

std::size_t wicsum_scratch(std::int64_t slots, std::int64_t width) {
    BumpAllocator sizes;
    Memory(slots, width, sizes);
    return sizes.bytes();
}

void wicsum(const Scored& of, double threshold, float* best, BumpAllocator memory) {
    Memory at(of.slots, of.width, memory);
    std::fill_n(best, of.slots, -1.0f);
    std::int64_t live = 0;
    for (std::int64_t s = 0; s < of.slots; ++s) {
        if (of.count[s] == 0) continue;
        std::copy_n(of.key + s * of.width, of.width, at.key + live * of.width);
        at.slot[live] = static_cast<std::int32_t>(s);
        at.count[live++] = of.count[s];
    }
    if (live == 0) return;
    const AttentionKernels& kernels = simd().attention;
    const std::int64_t lanes = kernels.rows;
    const float scale = 1 / std::sqrt(static_cast<float>(of.width));
    for (std::int64_t first = 0; first < of.rows; first += lanes) {
        const std::int64_t count = std::min(lanes, of.rows - first);
        std::fill_n(at.query, of.width * lanes, 0.0f);
        for (std::int64_t r = 0; r < count; ++r) {
            for (std::int64_t d = 0; d < of.width; ++d) at.query[d * lanes + r] = of.query[(first + r) * of.width + d] * scale;
        }
        std::fill_n(at.highest, lanes, std::numeric_limits<float>::lowest());
        std::fill_n(at.sum, lanes, 0.0f);
        kernels.scores(at.key, of.width, live, at.query, of.width, at.scores);
        kernels.peak(at.scores, live, at.highest);
        kernels.exponents(at.scores, live, at.highest, at.sum);
        for (std::int64_t r = 0; r < count; ++r) choose(at.scores + r, lanes, live, threshold, at.sum[r], at, best);
    }
}

}  // namespace edgevlm
