#include "infinipot.h"

#include <algorithm>
#include <cmath>

#include "kinds.h"
#include "norms.h"
#include "select.h"
#include "simd.h"

namespace edgevlm {

namespace {

constexpr int kWindows[] = {7, 5, 3, 1};

template <typename T>
Plane<T> plane_of(const void* first, std::int64_t heads, std::int64_t rows) {
    return {static_cast<const std::byte*>(first), static_cast<std::ptrdiff_t>(rows * sizeof(T)), heads, rows};
}

// sigma / mu of the norms of valid rows, all heads together (Alg. 2, line 18).
double variation(const PatchedNorms& tokens) {
    double sum = 0, squares = 0, there = 0;
    const auto each = [&](auto&& visit) {
        for (std::int64_t head = 0; head < tokens.norm.heads; ++head) {
            const float* const norm = tokens.norm.of(head);
            const std::uint8_t* const valid = tokens.valid.of(head);
            for (std::int64_t i = 0; i < tokens.norm.rows; ++i) valid[i] ? visit(norm[i]) : void();
        }
    };
    each([&](float norm) { sum += norm, ++there; });
    const double mean = sum / std::max(there, 1.0);
    each([&](float norm) { squares += (norm - mean) * (norm - mean); });
    return std::sqrt(squares / std::max(there, 1.0)) / std::max(mean, 1e-30);
}

int window_of(const Selection& how, const PatchedNorms& tokens) {
    if (!how.thresholds) return how.window;
    const double spread = variation(tokens);
    return kWindows[std::upper_bound(how.thresholds, how.thresholds + 3, spread) - how.thresholds];
}

// What of the kernels' working memory is used by turns, and what lasts for a layer.
struct Memory {
    float *similarity, *pooled;          // [n]
    std::uint8_t *vision, *open;         // [H, n], [n]
    bool *recent, *chosen;               // [H, n], [n]

    Memory(BumpAllocator& carver, std::int64_t heads, std::int64_t rows) {
        for (float** list : {&similarity, &pooled}) *list = carver.take<float>(rows);
        vision = carver.take<std::uint8_t>(heads * rows);
        open = carver.take<std::uint8_t>(rows);
        recent = carver.take<bool>(heads * rows);
        chosen = carver.take<bool>(rows);
    }
};

// Fills `keep` of one head up to `target` rows: first those of the best TaR, then those of the best pooled norm.
template <typename T>
void choose(const LayerRows<T>& layer, std::int64_t head, const Selection& how, const Memory& at, bool* keep, BumpAllocator memory) {
    const std::int64_t rows = layer.key.rows;
    const std::int64_t* const seq = layer.seq.of(head);
    const std::uint8_t* const vision = at.vision + head * rows;
    const bool* const recent = at.recent + head * rows;
    std::transform(at.similarity, at.similarity + rows, at.similarity, [](float x) { return -x; });
    std::transform(vision, vision + rows, recent, at.open, [](std::uint8_t v, bool r) { return v & !r; });
    top_k(at.similarity, seq, at.open, rows, how.distinctive, keep, memory);
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
        keep[i] |= recent[i] & how.keep_recent;
        at.open[i] = vision[i] & !keep[i];
        count += keep[i];
    }
    if (count <= how.target) {
        top_k(at.pooled, seq, at.open, rows, how.target - count, at.chosen, memory);
    } else {  // frames of more tokens than was said: the newest of what was chosen
        std::transform(keep, keep + rows, at.open, [](bool k) { return k; });
        std::fill_n(at.similarity, rows, 0.0f);
        std::fill_n(keep, rows, false);
        top_k(at.similarity, seq, at.open, rows, how.target, at.chosen, memory);
    }
    const std::uint8_t* const kind = layer.kind.of(head);
    for (std::int64_t i = 0; i < rows; ++i) keep[i] |= at.chosen[i] | (kind[i] == kPrefix);
}

}  // namespace

std::size_t infinipot_scratch(std::int64_t heads, std::int64_t rows, std::int64_t head_dim) {
    BumpAllocator sizes;
    Memory(sizes, heads, rows);
    return sizes.bytes() + std::max({similarity_scratch(rows, head_dim), pool_scratch(rows), top_k_scratch(rows),
                                     newest_scratch(heads * rows)});
}

template <typename T>
void infinipot_select(const LayerRows<T>& layer, const Selection& how, bool* keep, BumpAllocator memory) {
    const std::int64_t heads = layer.key.heads, rows = layer.key.rows;
    const Memory at(memory, heads, rows);
    for (std::int64_t head = 0; head < heads; ++head) {
        const std::uint8_t* const kind = layer.kind.of(head);
        std::transform(kind, kind + rows, at.vision + head * rows, [](std::uint8_t k) { return k == kVision; });
    }
    const Mask vision = plane_of<std::uint8_t>(at.vision, heads, rows);
    newest_frames(layer.frame, vision, std::min(how.recent_frames, heads * rows), at.recent, memory);

    const Mask recent = plane_of<std::uint8_t>(at.recent, heads, rows);
    const PatchedKeys<T> keys{layer.key, layer.position, layer.row, layer.col, recent, vision};
    const PatchedNorms norms{layer.norm.plane(heads, rows), layer.frame, layer.row, layer.col, vision};
    for (std::int64_t head = 0; head < heads; ++head) complete_norms(layer.value, head, layer.norm.of(head));
    const int window = window_of(how, norms);
    for (std::int64_t head = 0; head < heads; ++head) {
        temporal_similarity(keys, head, how.rotary, at.similarity, memory);
        pool_norms(norms, head, window, at.pooled, memory);
        choose(layer, head, how, at, keep + head * rows, memory);
    }
}

template void infinipot_select(const LayerRows<float>&, const Selection&, bool*, BumpAllocator);
template void infinipot_select(const LayerRows<Half>&, const Selection&, bool*, BumpAllocator);
template void infinipot_select(const LayerRows<Int8>&, const Selection&, bool*, BumpAllocator);

}  // namespace edgevlm
