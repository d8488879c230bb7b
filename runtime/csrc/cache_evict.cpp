// Eviction: holes are filled from the tail.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "cache.h"
#include "errors.h"
#include "threads.h"

namespace edgevlm {

namespace {

std::int64_t count_kept(const Mask& keep, std::int64_t head) {
    const std::uint8_t* const rows = keep.of(head);
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < keep.rows; ++i) kept += rows[i] != 0;
    return kept;
}

}  // namespace

void Cache::move_row(Layer& layer, std::int64_t from, std::int64_t to) {
    for (std::byte* rows : {layer.key, layer.value}) {
        if (large_) simd().copy(rows + from * row_bytes_, rows + to * row_bytes_, row_bytes_);
        else std::memcpy(rows + to * row_bytes_, rows + from * row_bytes_, row_bytes_);
    }
    layer.kind[to] = layer.kind[from];
    layer.seq[to] = layer.seq[from];
    layer.frame[to] = layer.frame[from];
    layer.row[to] = layer.row[from];
    layer.col[to] = layer.col[from];
    std::copy_n(layer.position + from * axes_, axes_, layer.position + to * axes_);
    layer.confirmed[to] = layer.confirmed[from];
    layer.norm[to] = layer.norm[from];
}

void Cache::prefetch_row(const Layer& layer, std::int64_t at) const {
    constexpr std::size_t kLine = 64;
    for (const std::byte* rows : {layer.key, layer.value}) {
        for (std::size_t byte = 0; byte < row_bytes_; byte += kLine) __builtin_prefetch(rows + at * row_bytes_ + byte, 0, 2);
    }
}

// The first hole takes the first survivor behind `kept`, and so on: as many moves as holes. Survivors lie here and there, so
// they are asked for some moves before.
std::int64_t Cache::fill_holes(Layer& layer, std::int64_t head, const Mask& keep, std::int64_t kept) {
    constexpr int kAhead = 8;
    const std::uint8_t* const keeps = keep.of(head);
    const std::int64_t base = head * layer.capacity;
    const auto survivor_from = [=](std::int64_t i) {
        while (i < keep.rows && !keeps[i]) ++i;
        return i;
    };
    std::int64_t survivor = kept, asked = kept, moved = 0;
    const auto ask = [&] {
        asked = survivor_from(asked);
        if (asked < keep.rows) prefetch_row(layer, base + asked++);
    };
    for (int k = 0; k < kAhead; ++k) ask();
    for (std::int64_t hole = 0; hole < kept; ++hole) {
        if (keeps[hole]) continue;
        ask();
        survivor = survivor_from(survivor);
        move_row(layer, base + survivor++, base + hole);
        ++moved;
    }
    return moved;
}

std::int64_t Cache::evict(const std::vector<std::optional<Mask>>& keep) {
    require_settled("evict");
    if (static_cast<std::int64_t>(keep.size()) != layers_)
        refuse("keep needs one mask, or None, for each of the ", layers_, " layers, not ", keep.size());
    std::vector<std::int64_t> kept(layers_);
    for (std::int64_t l = 0; l < layers_; ++l) {
        if (!keep[l]) continue;
        const Layer& layer = parts_.layer[l];
        if (keep[l]->heads != heads_ || keep[l]->rows != layer.length)
            refuse("the mask of layer ", l, " must be [", heads_, ", ", layer.length, "], not [", keep[l]->heads, ", ",
                   keep[l]->rows, "]");
        kept[l] = count_kept(*keep[l], 0);
        for (std::int64_t head = 1; head < heads_; ++head) {
            if (const std::int64_t other = count_kept(*keep[l], head); other != kept[l])
                refuse("all heads of a layer must keep the same number of rows: in layer ", l, " head 0 keeps ", kept[l],
                       " and head ", head, " keeps ", other);
        }
    }
    std::atomic<std::int64_t> moved{0};
    parallel_for(layers_ * heads_, threads(), [&](std::int64_t task, int) {
        const std::int64_t l = task / heads_, head = task % heads_;
        if (!keep[l] || kept[l] == parts_.layer[l].length) return;
        moved += fill_holes(parts_.layer[l], head, *keep[l], kept[l]);
        if (large_) simd().drain();
    });
    std::int64_t evicted = 0;
    for (std::int64_t l = 0; l < layers_; ++l) {
        if (!keep[l]) continue;
        evicted += parts_.layer[l].length - kept[l];
        parts_.layer[l].length = kept[l];
    }
    rows_moved_ += moved;
    if (evicted) restructured();
    return evicted;
}

}  // namespace edgevlm
