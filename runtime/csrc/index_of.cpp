#include "index_of.h"

#include <algorithm>

namespace edgevlm {

namespace {

constexpr std::int32_t kNone = -1;

int bits_of(std::int64_t known) {  // of a table at least twice as long
    int bits = 1;
    while ((std::int64_t{1} << bits) < 2 * known) ++bits;
    return bits;
}

}  // namespace

std::size_t index_of_scratch(std::int64_t known) {
    BumpAllocator sizes;
    sizes.take<std::int32_t>(std::size_t{1} << bits_of(known));
    return sizes.bytes();
}

// A hash table of places, open addressing. Multiplying spreads runs of neighbours evenly, and strided runs nearly so.
void index_of(const std::int64_t* seq, std::int64_t n, const std::int64_t* known, std::int64_t m, std::int32_t* out, BumpAllocator memory) {
    const int bits = bits_of(m);
    const std::size_t mask = (std::size_t{1} << bits) - 1;
    std::int32_t* const table = memory.take<std::int32_t>(mask + 1);
    std::fill_n(table, mask + 1, kNone);
    const auto slot_of = [=](std::int64_t wanted) {
        std::size_t slot = (static_cast<std::uint64_t>(wanted) * 0x9E3779B97F4A7C15u) >> (64 - bits);
        while (table[slot] != kNone && known[table[slot]] != wanted) slot = (slot + 1) & mask;
        return slot;
    };
    for (std::int64_t i = 0; i < m; ++i) {
        std::int32_t& place = table[slot_of(known[i])];
        if (place == kNone) place = static_cast<std::int32_t>(i);
    }
    for (std::int64_t i = 0; i < n; ++i) out[i] = table[slot_of(seq[i])];
}

void join(const std::int64_t* seq, std::int64_t n, const std::int64_t* known, std::int64_t m, const float* score, float* out,
          BumpAllocator memory) {
    std::int32_t* const place = memory.take<std::int32_t>(n);
    index_of(seq, n, known, m, place, memory);
    for (std::int64_t i = 0; i < n; ++i) {
        if (place[i] != kNone) out[i] = score[place[i]];
    }
}

std::size_t join_scratch(std::int64_t n, std::int64_t m) {
    BumpAllocator sizes;
    sizes.take<std::int32_t>(n);
    return sizes.bytes() + index_of_scratch(m);
}

}  // namespace edgevlm
