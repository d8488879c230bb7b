#include "temporal_similarity.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>

#include "groups.h"
#include "norms.h"
#include "simd.h"

namespace edgevlm {

namespace {

// The mean of a key's cosines with the recent keys of its patch is its unit vector times the mean of theirs: each past key meets
// one vector, whatever the number of recent ones. What position adds to a likeness goes when all are turned to the position of
// the patch's latest key: as a stream runs on, all tokens of a frame are as far from there. A batch of patches at a time,
// to bound the memory.
constexpr std::int64_t kBatchFloats = 1 << 17;

std::int64_t batch_size(std::int64_t rows, std::int64_t width) {
    return std::clamp<std::int64_t>(kBatchFloats / std::max<std::int64_t>(width, 1), 1, std::max<std::int64_t>(rows, 1));
}

// A key, where it stands, and where it is to be turned to; [axes] both.
template <typename T>
struct Key {
    Row<T> row;
    const std::int32_t *at, *to;
};

template <typename T>
class Keys {
public:
    static void measure(BumpAllocator& sizes, std::int64_t width) {
        sizes.take<float>(Turner::floats(width / 2));
        for (int vector = 0; vector < 2; ++vector) sizes.take<double>(width);
        for (int vector = 0; vector < 2; ++vector) sizes.take<double>(width / 2);
        sizes.take<float>(width);
    }

    Keys(const Rotary* rotary, std::int64_t width, BumpAllocator& memory) : rotary_(rotary), width_(width) {
        float* const angles = memory.take<float>(Turner::floats(width / 2));
        if (rotary) turner_.emplace(*rotary, angles);
        for (double** vector : {&stored_, &exact_}) *vector = memory.take<double>(width);
        for (double** vector : {&cosine_, &sine_}) *vector = memory.take<double>(width / 2);
        loaded_ = memory.take<float>(width);
    }

    // mean += key / |key|
    void add_unit(const Key<T>& key, float* mean) {
        const RowKernels<T>& kernels = simd().rows<T>();
        float square;
        kernels.squares(key.row, width_, 1, width_, &square);
        if (square == 0 && is_zero(key.row)) return;
        if (!trusted(square)) {
            const double length = exact(key);
            for (std::int64_t d = 0; d < width_; ++d) mean[d] += static_cast<float>(exact_[d] / length);
        } else if (rotary_) {
            const float* const angle = turner_->of(key.to, key.at);
            kernels.add_turned(key.row, 1 / std::sqrt(square), angle, angle + width_ / 2, width_ / 2, mean);
            turner_->next_block();
        } else {
            kernels.add(key.row, 1 / std::sqrt(square), width_, mean);
        }
    }

    // What key `at` is turned by to where `to` is, or nothing. Good until next_block(), for kBlock keys at most.
    const float* angle(const std::int32_t* at, const std::int32_t* to) { return rotary_ ? turner_->of(to, at) : nullptr; }

    bool turns() const { return rotary_ != nullptr; }
    void next_block() {
        if (rotary_) turner_->next_block();
    }

    // key . mean / |key|, of the |key|^2 that float32 makes of it.
    float exact_cosine(const Key<T>& key, const float* mean, float square) {
        if (square == 0 && is_zero(key.row)) return 0;
        const double length = exact(key);
        double dot = 0;
        for (std::int64_t d = 0; d < width_; ++d) dot += exact_[d] * mean[d];
        return static_cast<float>(dot / length);
    }

private:
    bool is_zero(Row<T> row) {
        simd().rows<T>().load(row, width_, loaded_);
        return std::all_of(loaded_, loaded_ + width_, [](float x) { return x == 0; });
    }

    // exact_ = key, turned, in double; returns its length.
    double exact(const Key<T>& key) {
        simd().rows<T>().load(key.row, width_, loaded_);
        std::copy_n(loaded_, width_, rotary_ ? stored_ : exact_);
        if (rotary_) {
            std::int64_t by[Rotary::kAxes];
            for (int axis = 0; axis < rotary_->axes(); ++axis) by[axis] = std::int64_t{key.at[axis]} - key.to[axis];
            rotary_->angles(by, cosine_, sine_);
            unrotate(stored_, cosine_, sine_, width_ / 2, exact_);
        }
        double square = 0;
        for (std::int64_t d = 0; d < width_; ++d) square += exact_[d] * exact_[d];
        return std::sqrt(square);
    }

    const Rotary* rotary_;
    std::int64_t width_;
    std::optional<Turner> turner_;
    double *stored_, *exact_, *cosine_, *sine_;
    float* loaded_;
};

// The means of the recent unit keys of each patch, and the past keys that are to be compared with them.
template <typename T>
class Means {
public:
    Means(std::int64_t rows, std::int64_t width, BumpAllocator& memory)
        : width_(width), batch_(batch_size(rows, width)), patches_(memory, rows) {
        for (std::int32_t** list : {&row_, &patch_, &count_, &place_}) *list = memory.take<std::int32_t>(rows);
        mean_ = memory.take<float>(batch_ * width);
    }

    void find(const PatchedKeys<T>& tokens, std::int64_t head) {
        const std::int16_t *const row = tokens.row.of(head), *const col = tokens.col.of(head);
        const Extent extent(row, col, tokens.key.rows);
        const std::uint8_t *const valid = tokens.valid.of(head), *const recent = tokens.recent.of(head);
        patches_.clear(0, extent.cells());
        for (std::int64_t i = 0; i < tokens.key.rows; ++i) {
            if (!valid[i] || !recent[i]) continue;
            const std::int32_t known = patches_.count(), patch = patches_.find_or_add(extent.cell(row[i], col[i]));
            const auto place = static_cast<std::int32_t>(i);
            if (patch == known) count_[patch] = 0, place_[patch] = place;
            if (*tokens.position.at(head, i) > *tokens.position.at(head, place_[patch])) place_[patch] = place;
            ++count_[patch];
            list(place, patch);
        }
        recent_ = listed_;
        for (std::int64_t i = 0; i < tokens.key.rows; ++i) {
            if (!valid[i] || recent[i]) continue;
            const std::int32_t patch = patches_.find(extent.cell(row[i], col[i]));
            if (patch != Groups::kNone) list(static_cast<std::int32_t>(i), patch);
        }
    }

    // Means of the next batch of patches; false where there are no more.
    bool take(const PatchedKeys<T>& tokens, std::int64_t head, Keys<T>& keys) {
        first_ += size_;
        size_ = std::min<std::int64_t>(batch_, patches_.count() - first_);
        if (size_ == 0) return false;
        std::fill_n(mean_, size_ * width_, 0.0f);
        for (std::int32_t r = 0; r < recent_; ++r) {
            if (!has(patch_[r])) continue;
            const Key<T> recent = key(tokens, head, r);
            ask(recent.row.at + ahead(tokens));
            keys.add_unit(recent, mean(r));
        }
        for (std::int64_t slot = 0; slot < size_; ++slot) {
            const float weight = 1.0f / static_cast<float>(count_[first_ + slot]);
            std::transform(mean_ + slot * width_, mean_ + (slot + 1) * width_, mean_ + slot * width_,
                           [weight](float x) { return x * weight; });
        }
        return true;
    }

    // out = the past keys of this batch compared with its means, a block at a time.
    void compare(const PatchedKeys<T>& tokens, std::int64_t head, Keys<T>& keys, float* out) const {
        const std::int64_t stride = tokens.key.row_stride / static_cast<std::ptrdiff_t>(sizeof(T));
        const std::int64_t axes = tokens.position.row_stride / static_cast<std::ptrdiff_t>(sizeof(std::int32_t));
        const Row<T> key = tokens.key.row(head, 0);
        const std::int32_t* const position = tokens.position.at(head, 0);
        const std::int32_t *const row = row_, *const patches = patch_, *const latest = place_, end = listed_;
        const auto first = static_cast<std::int32_t>(first_), size = static_cast<std::int32_t>(size_);
        const float* const mean = mean_;
        const std::int64_t width = width_, ahead = this->ahead(tokens);
        Block block;
        for (std::int32_t r = recent_; r < end; ++r) {
            const std::int32_t patch = patches[r], place = patch - first;
            if (place < 0 || place >= size) continue;
            const T* const own = key.at + row[r] * stride;
            ask(own + ahead);
            const float* const angle = keys.angle(position + row[r] * axes, position + latest[patch] * axes);
            block.compared[block.count] = {{own, key.scale}, mean + place * width, angle};
            block.listed[block.count++] = r;
            if (block.count == kBlock) finish(tokens, head, keys, block, out);
        }
        finish(tokens, head, keys, block, out);
    }

private:
    static constexpr int kBlock = Turner::kBlock;

    struct Block {
        Compared<T> compared[kBlock];
        std::int32_t listed[kBlock];
        int count = 0;
    };

    void finish(const PatchedKeys<T>& tokens, std::int64_t head, Keys<T>& keys, Block& block, float* out) const {
        Dots found[kBlock] = {};
        const RowKernels<T>& kernels = simd().rows<T>();
        (keys.turns() ? kernels.turned_dots : kernels.dots)(block.compared, block.count, width_, found);
        float cosine[kBlock];
        for (int k = 0; k < kBlock; ++k) cosine[k] = found[k].dot / std::sqrt(found[k].square);
        for (int k = 0; k < block.count; ++k) {
            const std::int32_t r = block.listed[k];
            const float square = found[k].square;
            out[row_[r]] = trusted(square) ? cosine[k] : keys.exact_cosine(this->key(tokens, head, r), mean(r), square);
        }
        block.count = 0;
        keys.next_block();
    }

    // How far behind a key the one lies that the second-level cache is asked for meanwhile.
    static std::int64_t ahead(const PatchedKeys<T>& tokens) {
        return tokens.key.rows_ahead() * tokens.key.row_stride / static_cast<std::ptrdiff_t>(sizeof(T));
    }

    void ask(const T* key) const {
        constexpr std::int64_t kLine = 64 / sizeof(T);
        for (std::int64_t d = 0; d < width_; d += kLine) __builtin_prefetch(key + d, 0, 2);
    }

    void list(std::int32_t row, std::int32_t patch) {
        row_[listed_] = row;
        patch_[listed_++] = patch;
    }

    bool has(std::int32_t patch) const { return patch >= first_ && patch < first_ + size_; }  // of this batch
    float* mean(std::int32_t listed) const { return mean_ + (patch_[listed] - first_) * width_; }

    // A listed key, to be turned to where the mean of its patch stands.
    Key<T> key(const PatchedKeys<T>& tokens, std::int64_t head, std::int32_t listed) const {
        const std::int32_t i = row_[listed], latest = place_[patch_[listed]];
        return {tokens.key.row(head, i), tokens.position.at(head, i), tokens.position.at(head, latest)};
    }

    std::int64_t width_, batch_;
    Groups patches_;
    std::int32_t *row_, *patch_;    // [listed]: recent tokens, then past ones
    std::int32_t *count_, *place_;  // [patches]: its recent tokens, and the latest of them
    std::int32_t recent_ = 0, listed_ = 0;
    std::int64_t first_ = 0, size_ = 0;
    float* mean_;
};

}  // namespace

std::size_t similarity_scratch(std::int64_t rows, std::int64_t width) {
    BumpAllocator sizes;
    Means<float>(rows, width, sizes);
    Keys<float>::measure(sizes, width);
    return sizes.bytes();
}

template <typename T>
void temporal_similarity(const PatchedKeys<T>& tokens, std::int64_t head, const Rotary* rotary, float* out, BumpAllocator memory) {
    const std::int64_t rows = tokens.key.rows, width = tokens.key.width;
    const std::uint8_t *const valid = tokens.valid.of(head), *const recent = tokens.recent.of(head);
    Means<T> means(rows, width, memory);
    Keys<T> keys(rotary, width, memory);
    means.find(tokens, head);
    for (std::int64_t i = 0; i < rows; ++i) out[i] = 0.0f - static_cast<float>((valid[i] != 0) & (recent[i] == 0));
    while (means.take(tokens, head, keys)) means.compare(tokens, head, keys, out);
}

template void temporal_similarity(const PatchedKeys<float>&, std::int64_t, const Rotary*, float*, BumpAllocator);
template void temporal_similarity(const PatchedKeys<Half>&, std::int64_t, const Rotary*, float*, BumpAllocator);
template void temporal_similarity(const PatchedKeys<Int8>&, std::int64_t, const Rotary*, float*, BumpAllocator);

}  // namespace edgevlm
