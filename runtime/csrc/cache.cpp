#include "cache.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "errors.h"
#include "infinipot.h"
#include "pool.h"

namespace edgevlm {

namespace {

constexpr std::size_t kLarge = std::size_t{16} << 20;

std::size_t reindex_scratch(std::int64_t rows, std::int64_t pairs, std::int64_t axes) {
    Carver sizes;
    sizes.take<std::uint64_t>(rows);
    sizes.take<std::int32_t>(rows);
    sizes.take<std::int32_t>(rows * axes);
    for (int vector = 0; vector < 2; ++vector) sizes.take<double>(pairs);
    for (int vector = 0; vector < 2; ++vector) sizes.take<float>(pairs);
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
//   the table of layers, inv_freq f64 [D / 2], runs [runs], commit serials i64 [smallest capacity]
//   for each layer l:
//     key, value            [H, C_l, D]  of dtype, keys rotated
//     kind u8, seq i64, frame i32, row i16, col i16  [H, C_l]
//     position i32          [H, C_l, axes]
//   the table of angles [3, 64, 2, D / 2], in f64 and in f32
//   scratch for one kernel at a time, a slot for each thread that may take part
//
// Without a block behind the carver this only measures.
Parts carve(const Shape& shape, Carver& carver) {
    const auto [smallest, largest] = std::minmax_element(shape.capacities.begin(), shape.capacities.end());
    const std::size_t row_bytes = shape.head_dim * element_size(shape.dtype);
    Parts parts;
    parts.layer = carver.take<Layer>(shape.capacities.size());
    parts.inv_freq = carver.take<double>(shape.inv_freq.size());
    parts.runs = carver.take<Run>(shape.runs.size());
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
    parts.rounded = carver.take<float>(Rotary::table_size(shape.head_dim / 2));
    parts.scratch_bytes = std::max({infinipot_scratch(shape.kv_heads, *largest, shape.head_dim),  // and its parts
                                    attention_scratch(*largest, shape.head_dim),
                                    reindex_scratch(*largest, shape.head_dim / 2, shape.axes)});
    parts.scratch = carver.take_rows(shape.threads, parts.scratch_bytes);
    return parts;
}

std::int64_t count_kept(const Mask& keep, std::int64_t head) {
    const std::uint8_t* const rows = keep.of(head);
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < keep.rows; ++i) kept += rows[i] != 0;
    return kept;
}

}  // namespace

std::size_t element_size(DType dtype) {
    switch (dtype) {
        case DType::fp32: return 4;
        case DType::fp16: return 2;
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
      dtype_(shape.dtype),
      nbytes_(bytes_for(shape)),
      large_(nbytes_ > kLarge) {
    static std::atomic<std::int64_t> caches{0};
    id_ = ++caches;
    row_bytes_ = head_dim_ * element_size(shape.dtype);
    block_ = heap_.allocate(nbytes_);
    Carver carver(block_.get());
    parts_ = carve(shape, carver);
    std::copy(shape.inv_freq.begin(), shape.inv_freq.end(), parts_.inv_freq);
    std::copy(shape.runs.begin(), shape.runs.end(), parts_.runs);
    if (const auto runs = static_cast<std::int64_t>(shape.runs.size()))
        rotary_.emplace(parts_.inv_freq, head_dim_ / 2, parts_.runs, runs, parts_.rotary, parts_.rounded);
    scratch_.memory = parts_.scratch;
    scratch_.bytes = parts_.scratch_bytes;
    scratch_.slots = shape.threads;
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
        for (std::int64_t head = 0; head < heads_; ++head) clear_rows(layer, head, layer.length, layer.length + reserved_);
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
            if (dtype_ == DType::fp32) {
                std::memcpy(layer.key + at, key.at(head, i), row_bytes_);
                std::memcpy(layer.value + at, value.at(head, i), row_bytes_);
            } else {
                simd().fp16.store(key.at(head, i), head_dim_, reinterpret_cast<Half*>(layer.key + at));
                simd().fp16.store(value.at(head, i), head_dim_, reinterpret_cast<Half*>(layer.value + at));
            }
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
        for (std::int64_t head = 0; head < heads_; ++head) clear_rows(layer, head, layer.length - dropped, layer.length);
        layer.length -= dropped;
    }
    grown_ = mark.grown;
}

// ---- evicting ----

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
}

void Cache::clear_rows(Layer& layer, std::int64_t head, std::int64_t first, std::int64_t last) {
    const std::int64_t at = head * layer.capacity + first, count = last - first;
    for (std::byte* rows : {layer.key, layer.value}) {
        if (large_) simd().zero(rows + at * row_bytes_, count * row_bytes_);
        else std::memset(rows + at * row_bytes_, 0, count * row_bytes_);
    }
    if (large_) simd().drain();
    std::fill_n(layer.kind + at, count, std::uint8_t{0});
    std::fill_n(layer.seq + at, count, std::int64_t{0});
    std::fill_n(layer.frame + at, count, 0);
    std::fill_n(layer.row + at, count, std::int16_t{0});
    std::fill_n(layer.col + at, count, std::int16_t{0});
    std::fill_n(layer.position + at * axes_, count * axes_, 0);
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
    share(layers_ * heads_, threads(), [&](std::int64_t task, int) {
        const std::int64_t l = task / heads_, head = task % heads_;
        if (!keep[l] || kept[l] == parts_.layer[l].length) return;
        moved += fill_holes(parts_.layer[l], head, *keep[l], kept[l]);
        clear_rows(parts_.layer[l], head, kept[l], parts_.layer[l].length);
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

// ---- positions ----

const Rotary& Cache::turning(const char* action) const {
    require_settled(action);
    if (!rotary_)
        refuse("cannot ", action, " keys with ", axes_, " position axes: open the cache with the sections that each axis turns");
    return *rotary_;
}

// Turns one key after another; neighbours are often turned by the same angles.
class Cache::Turning {
public:
    Turning(const Rotary& rotary, Carver& memory) : rotary_(rotary), pairs_(rotary.pairs()) {
        for (double** vector : {&exact_cosine_, &exact_sine_}) *vector = memory.take<double>(pairs_);
        for (float** vector : {&cosine_, &sine_}) *vector = memory.take<float>(pairs_);
    }

    // Gives a row [dtype] at position `from` the position `to`; both [axes]. Returns whether they differed.
    bool turn(std::byte* row, DType dtype, std::int32_t* from, const std::int32_t* to, std::int64_t axes) {
        std::int64_t by[Rotary::kAxes] = {};
        for (std::int64_t axis = 0; axis < axes; ++axis) by[axis] = std::int64_t{to[axis]} - from[axis];
        if (std::all_of(by, by + axes, [](std::int64_t delta) { return delta == 0; })) return false;
        if (!std::equal(by, by + axes, last_)) {
            rotary_.angles(by, exact_cosine_, exact_sine_);
            const auto rounded = [](double x) { return static_cast<float>(x); };
            std::transform(exact_cosine_, exact_cosine_ + pairs_, cosine_, rounded);
            std::transform(exact_sine_, exact_sine_ + pairs_, sine_, rounded);
            std::copy_n(by, axes, last_);
        }
        if (dtype == DType::fp32) simd().fp32.rotate(reinterpret_cast<float*>(row), cosine_, sine_, pairs_);
        else simd().fp16.rotate(reinterpret_cast<Half*>(row), cosine_, sine_, pairs_);
        std::copy_n(to, axes, from);
        return true;
    }

private:
    const Rotary& rotary_;
    std::int64_t pairs_;
    double *exact_cosine_, *exact_sine_;
    float *cosine_, *sine_;
    std::int64_t last_[Rotary::kAxes] = {};  // 0: nothing turned yet
};

void Cache::shift(std::int64_t index, const Volume<std::int32_t>& position) {
    const Rotary& rotary = turning("shift");
    const Layer& layer = this->layer(index);
    if (position.heads != heads_ || position.rows != layer.length || position.width != axes_)
        refuse("the positions of layer ", index, " must be [", heads_, ", ", layer.length, ", ", axes_, "], not [",
               position.heads, ", ", position.rows, ", ", position.width, "]");
    for (std::int64_t head = 0; head < heads_; ++head) {
        for (std::int64_t i = 0; i < layer.length; ++i) {
            const std::int32_t* const place = position.at(head, i);
            if (std::any_of(place, place + axes_, [](std::int32_t p) { return p < 0; }))
                refuse("positions must not be negative: head ", head, ", row ", i);
        }
    }
    const Lease memory(&scratch_, reindex_scratch(0, rotary.pairs(), axes_), heads_);
    std::atomic<bool> moved{false};
    share(heads_, memory.workers(), [&](std::int64_t head, int worker) {
        Carver part = memory.of(worker);
        Turning turning(rotary, part);
        bool any = false;
        for (std::int64_t i = 0; i < layer.length; ++i) {
            const std::int64_t at = head * layer.capacity + i;
            any |= turning.turn(layer.key + at * row_bytes_, dtype_, layer.position + at * axes_, position.at(head, i), axes_);
        }
        if (any) moved = true;
    });
    if (moved) restructured();
}

namespace {

// What each of n positions that are not below `prefix` becomes: prefix + its rank among the different ones. Strided by axes.
// By counting bits where they lie close enough together, else by sorting. order [n], count [n].
void dense_ranks(const std::int32_t* position, std::int64_t n, std::int64_t axes, std::int32_t prefix, std::uint64_t* order,
                 std::int32_t* count, std::int32_t* dense) {
    std::int32_t largest = prefix;
    for (std::int64_t i = 0; i < n; ++i) largest = std::max(largest, position[i * axes]);
    const std::int64_t words = (std::int64_t{largest} - prefix) / 64 + 1;
    if (words <= n) {
        std::fill_n(order, words, std::uint64_t{0});
        const auto bit = [](std::int64_t offset) { return std::uint64_t{1} << (offset % 64); };
        for (std::int64_t i = 0; i < n; ++i) {
            const std::int64_t offset = std::int64_t{position[i * axes]} - prefix;
            if (offset >= 0) order[offset / 64] |= bit(offset);
        }
        std::int32_t before = 0;
        for (std::int64_t word = 0; word < words; ++word) {
            count[word] = before;
            before += __builtin_popcountll(order[word]);
        }
        for (std::int64_t i = 0; i < n; ++i) {
            const std::int64_t offset = std::int64_t{position[i * axes]} - prefix;
            if (offset < 0) dense[i * axes] = position[i * axes];
            else dense[i * axes] = prefix + count[offset / 64] + __builtin_popcountll(order[offset / 64] & (bit(offset) - 1));
        }
        return;
    }
    std::int64_t later = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int32_t place = position[i * axes];
        dense[i * axes] = place;
        if (place >= prefix) order[later++] = static_cast<std::uint64_t>(place) << 32 | static_cast<std::uint64_t>(i);
    }
    std::sort(order, order + later);
    std::int32_t rank = prefix - 1;
    std::int64_t previous = -1;
    for (std::int64_t k = 0; k < later; ++k) {
        const auto place = static_cast<std::int64_t>(order[k] >> 32);
        rank += place != previous;
        previous = place;
        dense[static_cast<std::int64_t>(order[k] & 0xffffffffu) * axes] = rank;
    }
}

}  // namespace

bool Cache::make_dense(Layer& layer, std::int64_t head, std::int64_t prefix, Carver memory) {
    std::uint64_t* const order = memory.take<std::uint64_t>(layer.length);
    std::int32_t* const count = memory.take<std::int32_t>(layer.length);
    std::int32_t* const dense = memory.take<std::int32_t>(layer.length * axes_);
    Turning turning(*rotary_, memory);
    const std::int64_t base = head * layer.capacity;
    const auto first = static_cast<std::int32_t>(std::min<std::int64_t>(prefix, std::numeric_limits<std::int32_t>::max()));
    for (std::int64_t axis = 0; axis < axes_; ++axis)
        dense_ranks(layer.position + base * axes_ + axis, layer.length, axes_, first, order, count, dense + axis);
    bool moved = false;
    for (std::int64_t i = 0; i < layer.length; ++i) {
        const std::int64_t at = base + i;
        moved |= turning.turn(layer.key + at * row_bytes_, dtype_, layer.position + at * axes_, dense + i * axes_, axes_);
    }
    return moved;
}

std::int64_t Cache::reindex(std::int64_t prefix) {
    const Rotary& rotary = turning("reindex");
    if (prefix < 0) refuse("the prefix cannot be ", prefix, " positions long");
    std::int64_t longest = 0;
    for (std::int64_t l = 0; l < layers_; ++l) longest = std::max(longest, parts_.layer[l].length);
    const Lease memory(&scratch_, reindex_scratch(longest, rotary.pairs(), axes_), layers_ * heads_);
    std::atomic<bool> moved{false};
    share(layers_ * heads_, memory.workers(), [&](std::int64_t task, int worker) {
        if (make_dense(parts_.layer[task / heads_], task % heads_, prefix, memory.of(worker))) moved = true;
    });
    if (moved) restructured();
    std::int64_t next = 0;
    for (std::int64_t l = 0; l < layers_; ++l) {
        const Layer& layer = parts_.layer[l];
        for (std::int64_t head = 0; head < heads_; ++head) {
            const std::int32_t* const places = layer.position + head * layer.capacity * axes_;
            for (std::int64_t p = 0; p < layer.length * axes_; ++p) next = std::max(next, std::int64_t{places[p]} + 1);
        }
    }
    return next;
}

}  // namespace edgevlm
