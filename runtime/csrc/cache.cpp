#include "cache.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "errors.h"
#include "norms.h"
#include "select.h"
#include "similarity.h"

namespace edgevlm {

namespace {

std::size_t reindex_scratch(std::int64_t rows, std::int64_t pairs) {
    Carver sizes;
    sizes.take<std::uint64_t>(rows);
    sizes.take<double>(pairs);
    sizes.take<double>(pairs);
    return sizes.bytes();
}

void check(const Shape& shape) {
    constexpr std::int64_t kWidest = 1 << 16, kLongest = std::numeric_limits<std::int32_t>::max();
    if (shape.capacities.empty()) refuse("layers must be at least 1");
    if (shape.kv_heads < 1 || shape.kv_heads > kWidest) refuse("kv_heads must lie in 1..65536, not ", shape.kv_heads);
    if (shape.head_dim < 2 || shape.head_dim > kWidest || shape.head_dim % 2)
        refuse("head_dim must be even and lie in 2..65536, not ", shape.head_dim);
    if (shape.axes != 1 && shape.axes != 3) refuse("axes must be 1, or 3 for M-RoPE, not ", shape.axes);
    for (std::size_t l = 0; l < shape.capacities.size(); ++l) {
        if (shape.capacities[l] < 1 || shape.capacities[l] > kLongest)
            refuse("the capacity of layer ", l, " must lie in 1..2147483647, not ", shape.capacities[l]);
    }
    if (static_cast<std::int64_t>(shape.inv_freq.size()) != shape.head_dim / 2)
        refuse("inv_freq must hold head_dim / 2 = ", shape.head_dim / 2, " numbers, not ", shape.inv_freq.size());
    for (double frequency : shape.inv_freq) {
        if (!std::isfinite(frequency)) refuse("inv_freq must be finite");
    }
}

// The block, in this order, every array 64-byte aligned, and zero where no valid row lies:
//
//   the table of layers, inv_freq f64 [D / 2], commit serials i64 [smallest capacity]
//   for each layer l:
//     key, value            [H, C_l, D]  of dtype, keys rotated
//     kind u8, seq i64, frame i32, row i16, col i16  [H, C_l]
//     position i32          [H, C_l, axes]
//   the table of angles f64 [3, 64, 2, D / 2]
//   scratch for one kernel at a time: 16 bytes a row of the largest layer
//
// Without a block behind the carver this only measures.
Parts carve(const Shape& shape, Carver& carver) {
    const auto [smallest, largest] = std::minmax_element(shape.capacities.begin(), shape.capacities.end());
    const std::size_t row_bytes = shape.head_dim * element_size(shape.dtype);
    Parts parts;
    parts.layer = carver.take<Layer>(shape.capacities.size());
    parts.inv_freq = carver.take<double>(shape.inv_freq.size());
    parts.serials = carver.take<std::int64_t>(*smallest);
    for (std::size_t l = 0; l < shape.capacities.size(); ++l) {
        const std::size_t slots = static_cast<std::size_t>(shape.kv_heads * shape.capacities[l]);
        Layer layer;
        layer.capacity = shape.capacities[l];
        layer.length = 0;
        layer.key = carver.take_rows(slots, row_bytes);
        layer.value = carver.take_rows(slots, row_bytes);
        layer.kind = carver.take<std::uint8_t>(slots);
        layer.seq = carver.take<std::int64_t>(slots);
        layer.frame = carver.take<std::int32_t>(slots);
        layer.row = carver.take<std::int16_t>(slots);
        layer.col = carver.take<std::int16_t>(slots);
        layer.position = carver.take<std::int32_t>(slots * shape.axes);
        if (parts.layer) parts.layer[l] = layer;
    }
    parts.rotary = carver.take<double>(Rotary::table_size(shape.head_dim / 2));
    parts.scratch_bytes = std::max({similarity_scratch(*largest, shape.head_dim), pool_scratch(*largest),
                                    top_k_scratch(*largest), reindex_scratch(*largest, shape.head_dim / 2)});
    parts.scratch = carver.take<std::byte>(parts.scratch_bytes);
    return parts;
}

std::int64_t count_kept(const Mask& keep, std::int64_t head) {
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < keep.rows; ++i) kept += keep.at(head, i) != 0;
    return kept;
}

}  // namespace

std::size_t element_size(DType dtype) {
    switch (dtype) {
        case DType::fp32: return 4;
    }
    refuse("unknown dtype");
}

std::size_t Cache::bytes_for(const Shape& shape) {
    check(shape);
    Carver sizes;
    carve(shape, sizes);
    return sizes.bytes();
}

Cache::Cache(const Shape& shape)
    : heads_(shape.kv_heads),
      head_dim_(shape.head_dim),
      axes_(shape.axes),
      layers_(static_cast<std::int64_t>(shape.capacities.size())),
      nbytes_(bytes_for(shape)) {
    static std::atomic<std::int64_t> caches{0};
    id_ = ++caches;
    row_bytes_ = head_dim_ * element_size(shape.dtype);
    block_ = heap_.allocate(nbytes_);
    Carver carver(block_.get());
    parts_ = carve(shape, carver);
    std::copy(shape.inv_freq.begin(), shape.inv_freq.end(), parts_.inv_freq);
    rotary_.emplace(parts_.inv_freq, head_dim_ / 2, parts_.rotary);
    scratch_.memory = parts_.scratch;
    scratch_.bytes = parts_.scratch_bytes;
}

const Layer& Cache::layer(std::int64_t index) const {
    if (index < 0 || index >= layers_) refuse("there is no layer ", index, ": the cache has layers 0..", layers_ - 1);
    return parts_.layer[index];
}

void Cache::require_settled(const char* action) const {
    if (reserved_ >= 0) refuse("cannot ", action, " while ", reserved_, " rows are reserved: commit or abort them first");
}

void Cache::restructured() {
    ++epoch_;
    grown_ = 0;
}

// ---- appending ----

void Cache::reserve(std::int64_t count) {
    require_settled("reserve");
    if (count < 0) refuse("cannot reserve ", count, " rows");
    for (std::int64_t l = 0; l < layers_; ++l) {
        const Layer& layer = parts_.layer[l];
        const std::int64_t room = layer.capacity - layer.length;
        if (count > room)
            refuse<Full>("layer ", l, " holds ", layer.length, " of ", layer.capacity, " rows and cannot take ", count,
                         " more: evict at least ", count - room, ", append fewer, or open with a larger capacity");
    }
    reserved_ = count;
}

void Cache::check_positions(const Rows& rows) const {
    for (std::int64_t i = 0; i < rows.count * axes_; ++i) {
        if (rows.position[i] < 0) refuse("positions must not be negative: row ", i / axes_, " has ", rows.position[i]);
    }
}

void Cache::write_metadata(Layer& layer, const Rows& rows) {
    for (std::int64_t head = 0; head < heads_; ++head) {
        const std::int64_t at = head * layer.capacity + layer.length;
        std::copy_n(rows.kind, rows.count, layer.kind + at);
        std::copy_n(rows.seq, rows.count, layer.seq + at);
        std::copy_n(rows.frame, rows.count, layer.frame + at);
        std::copy_n(rows.row, rows.count, layer.row + at);
        std::copy_n(rows.col, rows.count, layer.col + at);
        std::copy_n(rows.position, rows.count * axes_, layer.position + at * axes_);
    }
    layer.length += rows.count;
}

void Cache::commit(const Rows& rows) {
    if (reserved_ < 0) refuse("nothing is reserved: call reserve(n) before commit");
    if (rows.count != reserved_) refuse(reserved_, " rows are reserved, but ", rows.count, " were committed");
    check_positions(rows);
    for (std::int64_t l = 0; l < layers_; ++l) write_metadata(parts_.layer[l], rows);
    std::fill_n(parts_.serials + grown_, rows.count, ++commits_);
    grown_ += rows.count;
    reserved_ = -1;
}

void Cache::abort() {
    if (reserved_ < 0) refuse("nothing is reserved: there is nothing to abort");
    for (std::int64_t l = 0; l < layers_; ++l) {
        Layer& layer = parts_.layer[l];
        clear_rows(layer, layer.length, layer.length + reserved_);
    }
    reserved_ = -1;
}

void Cache::append(std::int64_t index, const Volume<float>& key, const Volume<float>& value, const Rows& rows) {
    require_settled("append");
    const Layer& target = layer(index);
    if (rows.count > target.capacity - target.length)
        refuse<Full>("layer ", index, " holds ", target.length, " of ", target.capacity, " rows and cannot take ", rows.count,
                     " more: evict first, or open with a larger capacity");
    check_positions(rows);
    if (rows.count == 0) return;
    Layer& layer = parts_.layer[index];
    for (std::int64_t head = 0; head < heads_; ++head) {
        for (std::int64_t i = 0; i < rows.count; ++i) {
            const std::size_t at = (head * layer.capacity + layer.length + i) * row_bytes_;
            std::memcpy(layer.key + at, key.at(head, i), row_bytes_);
            std::memcpy(layer.value + at, value.at(head, i), row_bytes_);
        }
    }
    write_metadata(layer, rows);
    restructured();
}

// ---- undoing ----

Mark Cache::mark() const {
    require_settled("mark");
    return {id_, epoch_, grown_, grown_ ? parts_.serials[grown_ - 1] : 0};
}

void Cache::rollback(const Mark& mark) {
    require_settled("roll back");
    if (mark.cache != id_) refuse("the mark belongs to another cache");
    if (mark.epoch != epoch_) refuse("the mark is stale: rows were evicted, shifted or added to one layer after it was taken");
    if (mark.grown > grown_ || (mark.grown && parts_.serials[mark.grown - 1] != mark.serial))
        refuse("the mark is stale: the rows it stands on were themselves rolled back");
    const std::int64_t dropped = grown_ - mark.grown;
    for (std::int64_t l = 0; l < layers_; ++l) {
        Layer& layer = parts_.layer[l];
        clear_rows(layer, layer.length - dropped, layer.length);
        layer.length -= dropped;
    }
    grown_ = mark.grown;
}

// ---- evicting ----

void Cache::move_row(Layer& layer, std::int64_t from, std::int64_t to) {
    std::memcpy(layer.key + to * row_bytes_, layer.key + from * row_bytes_, row_bytes_);
    std::memcpy(layer.value + to * row_bytes_, layer.value + from * row_bytes_, row_bytes_);
    layer.kind[to] = layer.kind[from];
    layer.seq[to] = layer.seq[from];
    layer.frame[to] = layer.frame[from];
    layer.row[to] = layer.row[from];
    layer.col[to] = layer.col[from];
    std::copy_n(layer.position + from * axes_, axes_, layer.position + to * axes_);
    ++rows_moved_;
}

void Cache::clear_rows(Layer& layer, std::int64_t first, std::int64_t last) {
    for (std::int64_t head = 0; head < heads_; ++head) {
        const std::int64_t at = head * layer.capacity + first, count = last - first;
        std::memset(layer.key + at * row_bytes_, 0, count * row_bytes_);
        std::memset(layer.value + at * row_bytes_, 0, count * row_bytes_);
        std::fill_n(layer.kind + at, count, std::uint8_t{0});
        std::fill_n(layer.seq + at, count, std::int64_t{0});
        std::fill_n(layer.frame + at, count, 0);
        std::fill_n(layer.row + at, count, std::int16_t{0});
        std::fill_n(layer.col + at, count, std::int16_t{0});
        std::fill_n(layer.position + at * axes_, count * axes_, 0);
    }
}

std::int64_t Cache::evict(const std::vector<std::optional<Mask>>& keep) {
    require_settled("evict");
    if (static_cast<std::int64_t>(keep.size()) != layers_)
        refuse("keep needs one mask, or None, for each of the ", layers_, " layers, not ", keep.size());
    for (std::int64_t l = 0; l < layers_; ++l) {
        if (!keep[l]) continue;
        const Layer& layer = parts_.layer[l];
        if (keep[l]->heads != heads_ || keep[l]->rows != layer.length)
            refuse("the mask of layer ", l, " must be [", heads_, ", ", layer.length, "], not [", keep[l]->heads, ", ",
                   keep[l]->rows, "]");
        const std::int64_t kept = count_kept(*keep[l], 0);
        for (std::int64_t head = 1; head < heads_; ++head) {
            if (const std::int64_t other = count_kept(*keep[l], head); other != kept)
                refuse("all heads of a layer must keep the same number of rows: in layer ", l, " head 0 keeps ", kept,
                       " and head ", head, " keeps ", other);
        }
    }
    std::int64_t evicted = 0;
    for (std::int64_t l = 0; l < layers_; ++l) {
        if (!keep[l]) continue;
        Layer& layer = parts_.layer[l];
        const std::int64_t kept = count_kept(*keep[l], 0);
        if (kept == layer.length) continue;
        for (std::int64_t head = 0; head < heads_; ++head) {
            // The first hole takes the first survivor behind `kept`, and so on: as many moves as holes.
            std::int64_t survivor = kept;
            for (std::int64_t hole = 0; hole < kept; ++hole) {
                if (keep[l]->at(head, hole)) continue;
                while (!keep[l]->at(head, survivor)) ++survivor;
                move_row(layer, head * layer.capacity + survivor++, head * layer.capacity + hole);
            }
        }
        clear_rows(layer, kept, layer.length);
        evicted += layer.length - kept;
        layer.length = kept;
    }
    if (evicted) restructured();
    return evicted;
}

// ---- positions ----

void Cache::shift(std::int64_t index, const Volume<std::int32_t>& position) {
    require_settled("shift");
    const Layer& layer = this->layer(index);
    if (axes_ != 1) refuse("shift knows one position axis, and this cache has ", axes_);
    if (position.heads != heads_ || position.rows != layer.length || position.width != axes_)
        refuse("the positions of layer ", index, " must be [", heads_, ", ", layer.length, ", ", axes_, "], not [",
               position.heads, ", ", position.rows, ", ", position.width, "]");
    for (std::int64_t head = 0; head < heads_; ++head) {
        for (std::int64_t i = 0; i < layer.length; ++i) {
            if (*position.at(head, i) < 0) refuse("positions must not be negative: head ", head, ", row ", i);
        }
    }
    const std::int64_t pairs = head_dim_ / 2;
    Lease memory(&scratch_, reindex_scratch(0, pairs));
    double* const cosine = memory.take<double>(pairs);
    double* const sine = memory.take<double>(pairs);
    bool moved = false;
    for (std::int64_t head = 0; head < heads_; ++head) {
        for (std::int64_t i = 0; i < layer.length; ++i) {
            const std::int64_t at = head * layer.capacity + i;
            const std::int64_t delta = std::int64_t{*position.at(head, i)} - layer.position[at];
            if (delta == 0) continue;
            rotary_->angles(delta, cosine, sine);
            rotate(reinterpret_cast<float*>(layer.key + at * row_bytes_), cosine, sine, pairs);
            layer.position[at] = *position.at(head, i);
            moved = true;
        }
    }
    if (moved) restructured();
}

std::int64_t Cache::reindex(std::int64_t prefix) {
    require_settled("reindex");
    if (axes_ != 1) refuse("reindex knows one position axis, and this cache has ", axes_);
    if (prefix < 0) refuse("the prefix cannot be ", prefix, " positions long");
    const std::int64_t pairs = head_dim_ / 2;
    std::int64_t largest = 0;
    for (std::int64_t l = 0; l < layers_; ++l) largest = std::max(largest, parts_.layer[l].length);
    Lease memory(&scratch_, reindex_scratch(largest, pairs));
    double* const cosine = memory.take<double>(pairs);
    double* const sine = memory.take<double>(pairs);
    std::uint64_t* const order = memory.take<std::uint64_t>(largest);  // position, then row

    bool moved = false;
    std::int64_t next = 0;
    for (std::int64_t l = 0; l < layers_; ++l) {
        Layer& layer = parts_.layer[l];
        for (std::int64_t head = 0; head < heads_; ++head) {
            const std::int64_t base = head * layer.capacity;
            std::int64_t count = 0;
            for (std::int64_t i = 0; i < layer.length; ++i) {
                const std::int64_t position = layer.position[base + i];
                if (position < prefix) next = std::max(next, position + 1);
                else order[count++] = static_cast<std::uint64_t>(position) << 32 | static_cast<std::uint64_t>(i);
            }
            std::sort(order, order + count);
            std::int64_t rank = prefix - 1;
            std::int64_t previous = -1;
            for (std::int64_t n = 0; n < count; ++n) {
                const auto position = static_cast<std::int64_t>(order[n] >> 32);
                const std::int64_t at = base + static_cast<std::int64_t>(order[n] & 0xffffffffu);
                if (position != previous) ++rank;
                previous = position;
                if (rank == position) continue;
                rotary_->angles(rank - position, cosine, sine);
                rotate(reinterpret_cast<float*>(layer.key + at * row_bytes_), cosine, sine, pairs);
                layer.position[at] = static_cast<std::int32_t>(rank);
                moved = true;
            }
            if (count) next = std::max(next, rank + 1);
        }
    }
    if (moved) restructured();
    return next;
}

}  // namespace edgevlm
