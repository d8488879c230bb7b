// InfiniPot-V, Alg. 1 of one layer: which of its rows stay.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "norms.h"
#include "rotary.h"
#include "temporal_similarity.h"
#include "strided.h"

namespace edgevlm {

struct Selection {
    std::int64_t recent_frames;  // r
    std::int64_t distinctive;    // past tokens chosen by TaR
    std::int64_t target;         // |C|
    bool keep_recent;
    int window;                // of VaN's pooling
    const double* thresholds;  // [3], of the coefficient of variation, for windows 7, 5, 3, 1 in place of `window`; or null
    const Rotary* rotary;      // what un-rotates keys; or null
};

template <typename T>
struct LayerRows {
    Volume<T> key, value;           // [H, n, D]
    Volume<std::int32_t> position;  // [H, n, axes]
    Plane<std::uint8_t> kind;       // [H, n]
    Plane<std::int64_t> seq;        // [H, n]
    Plane<std::int32_t> frame;      // [H, n]
    Plane<std::int16_t> row, col;   // [H, n]
    Norms norm;                     // [H, n]
};

std::size_t infinipot_scratch(std::int64_t heads, std::int64_t rows, std::int64_t head_dim);

// keep [H, n]: the prefix and, in each head, min(target, held) vision rows: those of the recent frames, `distinctive` past ones
// of the least temporal similarity, and of the rest those of the highest pooled value norm. memory: infinipot_scratch.
template <typename T>
void infinipot_select(const LayerRows<T>& layer, const Selection& how, bool* keep, BumpAllocator memory);

}  // namespace edgevlm
