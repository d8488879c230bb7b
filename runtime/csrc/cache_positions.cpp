// New positions: keys turned along, one layer at a time or all of them made dense.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#include "cache.h"
#include "cache_rows.h"
#include "errors.h"
#include "threads.h"

namespace edgevlm {

std::size_t reindex_scratch(std::int64_t rows, std::int64_t pairs, std::int64_t axes) {
    BumpAllocator sizes;
    sizes.take<std::uint64_t>(rows);
    sizes.take<std::int32_t>(rows);
    sizes.take<std::int32_t>(rows * axes);
    for (int vector = 0; vector < 2; ++vector) sizes.take<double>(pairs);
    for (int vector = 0; vector < 2; ++vector) sizes.take<float>(pairs);
    return sizes.bytes();
}

const Rotary& Cache::turning(const char* action, std::int64_t layer) const {
    require_settled(action);
    if (!rotary(layer))
        refuse("cannot ", action, " keys with ", axes_, " position axes: open the cache with rotary sections");
    return *rotary(layer);
}

// Turns one key after another; neighbours are often turned by the same angles.
class Cache::Turning {
public:
    Turning(const Rotary& rotary, BumpAllocator& memory) : rotary_(rotary), pairs_(rotary.pairs()) {
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
        by_dtype(dtype, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            simd().rows<T>().rotate(reinterpret_cast<T*>(row), cosine_, sine_, pairs_);
        });
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
    const Layer& layer = this->layer(index);
    const Rotary& rotary = turning("shift", index);
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
    parallel_for(heads_, memory.workers(), [&](std::int64_t head, int worker) {
        BumpAllocator part = memory.of(worker);
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

bool Cache::make_dense(std::int64_t index, std::int64_t head, std::int64_t prefix, BumpAllocator memory) {
    Layer& layer = parts_.layer[index];
    std::uint64_t* const order = memory.take<std::uint64_t>(layer.length);
    std::int32_t* const count = memory.take<std::int32_t>(layer.length);
    std::int32_t* const dense = memory.take<std::int32_t>(layer.length * axes_);
    Turning turning(*rotary(index), memory);
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
    parallel_for(layers_ * heads_, memory.workers(), [&](std::int64_t task, int worker) {
        if (make_dense(task / heads_, task % heads_, prefix, memory.of(worker))) moved = true;
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
