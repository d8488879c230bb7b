#include "select.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace edgevlm {

namespace {

struct Candidate {
    std::int64_t seq;
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

bool better(const Candidate& a, const Candidate& b) {
    if (a.rank != b.rank) return a.rank > b.rank;
    if (a.seq != b.seq) return a.seq > b.seq;
    return a.index < b.index;
}

}  // namespace

std::size_t top_k_scratch(std::int64_t rows) {
    Carver sizes;
    sizes.take<Candidate>(rows);
    return sizes.bytes();
}

void top_k(const Plane<float>& score, const Plane<std::int64_t>& seq, const Mask& candidates, std::int64_t k, bool* out,
           Scratch* scratch) {
    const std::int64_t heads = score.heads, rows = score.rows;
    Lease memory(scratch, top_k_scratch(rows));
    Candidate* list = memory.take<Candidate>(rows);
    for (std::int64_t head = 0; head < heads; ++head, out += rows) {
        std::fill_n(out, rows, false);
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < rows; ++i) {
            if (!candidates.at(head, i)) continue;
            list[count++] = {seq.at(head, i), rank_of(score.at(head, i)), static_cast<std::uint32_t>(i)};
        }
        const std::int64_t chosen = std::min(k, count);
        if (chosen < count) std::nth_element(list, list + chosen, list + count, better);
        for (std::int64_t c = 0; c < chosen; ++c) out[list[c].index] = true;
    }
}

}  // namespace edgevlm
