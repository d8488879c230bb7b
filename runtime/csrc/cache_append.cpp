// Rows that come, and rows that go again: reserve, commit, abort, append; mark, rollback.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cache.h"
#include "cache_rows.h"
#include "errors.h"
#include "kinds.h"
#include "norms.h"

namespace edgevlm {

void Cache::reserve(std::int64_t count) {
    require_settled("reserve");
    if (count < 0) refuse("cannot reserve ", count, " rows");
    for (std::int64_t l = 0; l < layers_; ++l) {
        const Layer& layer = parts_.layer[l];
        const std::int64_t free_rows = layer.capacity - layer.length;
        if (count > free_rows)
            refuse<Full>("layer ", l, " holds ", layer.length, " of ", layer.capacity, " rows and cannot take ", count,
                         " more: evict at least ", count - free_rows, ", append fewer, or open with a larger capacity");
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
        std::copy_n(rows.frame, rows.count, layer.confirmed + at);
        std::fill_n(layer.norm + at, rows.count, kUnknownNorm);
    }
    layer.length += rows.count;
}

void Cache::commit(const Rows& rows) {
    if (reserved_ < 0) refuse("nothing is reserved: call reserve(n) before commit");
    if (rows.count != reserved_) refuse(reserved_, " rows are reserved, but ", rows.count, " were committed");
    check_positions(rows);
    for (std::int64_t l = 0; l < layers_; ++l) {
        Layer& layer = parts_.layer[l];
        saturated_ += saturated_in(layer, layer.length, layer.length + rows.count);
        write_metadata(layer, rows);
    }
    std::fill_n(parts_.serials + grown_, rows.count, ++commits_);
    grown_ += rows.count;
    reserved_ = -1;
}

void Cache::confirm(const Plane<std::int64_t>& seq, std::int32_t frame) {
    require_settled("confirm");
    for (std::int64_t l = 0; l < layers_; ++l) {
        Layer& layer = parts_.layer[l];
        for (std::int64_t head = 0; head < heads_; ++head) {
            const std::int64_t first = head * layer.capacity;
            for (std::int64_t at = first; at < first + layer.length; ++at) {
                const std::int64_t row = layer.row[at], col = layer.col[at];
                if (layer.kind[at] != kVision || row < 0 || row >= seq.heads || col < 0 || col >= seq.rows) continue;
                if (seq.of(row)[col] == layer.seq[at]) layer.confirmed[at] = frame;
            }
        }
    }
}

void Cache::clear_rows(Layer& layer, std::int64_t head, std::int64_t first, std::int64_t last) {
    const std::int64_t at = head * layer.capacity + first, count = last - first;
    for (std::byte* rows : {layer.key, layer.value}) std::memset(rows + at * row_bytes_, 0, count * row_bytes_);
    std::fill_n(layer.kind + at, count, std::uint8_t{0});
    std::fill_n(layer.seq + at, count, std::int64_t{0});
    std::fill_n(layer.frame + at, count, 0);
    std::fill_n(layer.row + at, count, std::int16_t{0});
    std::fill_n(layer.col + at, count, std::int16_t{0});
    std::fill_n(layer.position + at * axes_, count * axes_, 0);
    std::fill_n(layer.confirmed + at, count, 0);
    std::fill_n(layer.norm + at, count, 0.0f);
}

void Cache::abort() {
    if (reserved_ < 0) refuse("nothing is reserved: there is nothing to abort");
    for (std::int64_t l = 0; l < layers_; ++l) {
        Layer& layer = parts_.layer[l];
        for (std::int64_t head = 0; head < heads_; ++head) clear_rows(layer, head, layer.length, layer.length + reserved_);
    }
    reserved_ = -1;
}

namespace {

template <typename T>
void store_row(const float* row, const float* scale, std::int64_t size, std::byte* out) {
    simd().rows<T>().store(row, scale, size, reinterpret_cast<T*>(out));
}

}  // namespace

void Cache::append(std::int64_t index, const Volume<float>& key, const Volume<float>& value, const Rows& rows) {
    require_settled("append");
    const Layer& target = layer(index);
    if (rows.count > target.capacity - target.length)
        refuse<Full>("layer ", index, " holds ", target.length, " of ", target.capacity, " rows and cannot take ", rows.count,
                     " more: evict first, or open with a larger capacity");
    check_positions(rows);
    if (rows.count == 0) return;
    Layer& layer = parts_.layer[index];
    const auto store = by_dtype(dtype_, [](auto* type) { return store_row<std::remove_pointer_t<decltype(type)>>; });
    for (std::int64_t head = 0; head < heads_; ++head) {
        const std::int64_t scales = layer.key_scale ? head * head_dim_ : 0;
        for (std::int64_t i = 0; i < rows.count; ++i) {
            const std::size_t at = (head * layer.capacity + layer.length + i) * row_bytes_;
            store(key.at(head, i), layer.key_scale + scales, head_dim_, layer.key + at);
            store(value.at(head, i), layer.value_scale + scales, head_dim_, layer.value + at);
        }
    }
    saturated_ += saturated_in(layer, layer.length, layer.length + rows.count);
    write_metadata(layer, rows);
    restructured();
}

Mark Cache::mark() const {
    require_settled("mark");
    return {id_, epoch_, grown_, grown_ ? parts_.serials[grown_ - 1] : 0};
}

void Cache::rollback(const Mark& mark) {
    require_settled("roll back");
    if (mark.cache != id_) refuse("the mark belongs to another cache");
    if (mark.epoch != epoch_) refuse("the mark is stale: rows were evicted, shifted or added to one layer after it was taken");
    if (mark.grown > grown_ || (mark.grown && parts_.serials[mark.grown - 1] != mark.serial))
        refuse("the mark is stale: its rows were rolled back");
    const std::int64_t dropped = grown_ - mark.grown;
    for (std::int64_t l = 0; l < layers_; ++l) {
        Layer& layer = parts_.layer[l];
        for (std::int64_t head = 0; head < heads_; ++head) clear_rows(layer, head, layer.length - dropped, layer.length);
        layer.length -= dropped;
    }
    grown_ = mark.grown;
}

}  // namespace edgevlm
