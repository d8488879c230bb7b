#include "similarity.h"

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
// the patch's first recent key: as a stream runs on, all tokens of a frame are as far from there. A batch of patches at a time,
// to bound the memory.
constexpr std::int64_t kBatchFloats = 1 << 17;

std::int64_t batch_size(std::int64_t rows, std::int64_t width) {
    return std::clamp<std::int64_t>(kBatchFloats / std::max<std::int64_t>(width, 1), 1, std::max<std::int64_t>(rows, 1));
}

// A key, where it stands, and where it is to be turned to; [axes] both.
template <typename T>
struct Key {
    const T* row;
    const std::int32_t *at, *to;
};

template <typename T>
class Keys {
public:
    static constexpr int kBlock = Turner::kBlock;

    static void measure(Carver& sizes, std::int64_t width) {
        sizes.take<float>(Turner::floats(width / 2));
        for (int vector = 0; vector < 2; ++vector) sizes.take<double>(width);
        for (int vector = 0; vector < 2; ++vector) sizes.take<double>(width / 2);
        sizes.take<float>(width);
    }

    Keys(const Rotary* rotary, std::int64_t width, Carver& memory) : rotary_(rotary), width_(width) {
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

    // To be compared by the next call of compare(); `next`, a key that comes later. Returns whether there is room for no more.
    bool add(const Key<T>& key, const float* mean, const T* next, float* out) {
        key_[count_] = key;
        out_[count_] = out;
        compared_[count_++] = {key.row, mean, rotary_ ? turner_->of(key.to, key.at) : nullptr, next};
        return count_ == kBlock;
    }

    // out = key . mean / |key|, of each one added.
    void compare() {
        Dots found[kBlock];
        const RowKernels<T>& kernels = simd().rows<T>();
        (rotary_ ? kernels.turned_dots : kernels.dots)(compared_, count_, width_, found);
        for (int k = 0; k < count_; ++k) {
            const Dots& dots = found[k];
            *out_[k] = trusted(dots.square) ? dots.dot / std::sqrt(dots.square) : exact_cosine(k, dots.square);
        }
        count_ = 0;
        if (rotary_) turner_->next_block();
    }

private:
    bool is_zero(const T* row) {
        simd().rows<T>().load(row, width_, loaded_);
        return std::all_of(loaded_, loaded_ + width_, [](float x) { return x == 0; });
    }

    float exact_cosine(int k, float square) {
        if (square == 0 && is_zero(key_[k].row)) return 0;
        const double length = exact(key_[k]);
        double dot = 0;
        for (std::int64_t d = 0; d < width_; ++d) dot += exact_[d] * compared_[k].other[d];
        return static_cast<float>(dot / length);
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
    Key<T> key_[kBlock];
    Compared<T> compared_[kBlock];
    float* out_[kBlock];
    int count_ = 0;
};

// The means of the recent unit keys of each patch.
template <typename T>
class Means {
public:
    Means(std::int64_t rows, std::int64_t width, Carver& memory)
        : width_(width), batch_(batch_size(rows, width)), patches_(memory, rows) {
        for (std::int32_t** list : {&recent_, &patch_, &count_, &place_}) *list = memory.take<std::int32_t>(rows);
        mean_ = memory.take<float>(batch_ * width);
    }

    void find_recent(const PatchedKeys<T>& tokens, std::int64_t head, const Extent& extent) {
        const std::int16_t *const row = tokens.row.of(head), *const col = tokens.col.of(head);
        const std::uint8_t *const valid = tokens.valid.of(head), *const recent = tokens.recent.of(head);
        patches_.clear(0, extent.cells());
        for (std::int64_t i = 0; i < tokens.key.rows; ++i) {
            if (!valid[i] || !recent[i]) continue;
            const std::int32_t known = patches_.count(), patch = patches_.find_or_add(extent.cell(row[i], col[i]));
            const auto place = static_cast<std::int32_t>(i);
            if (patch == known) count_[patch] = 0, place_[patch] = place;
            ++count_[patch];
            patch_[found_] = patch;
            recent_[found_++] = place;
        }
    }

    // Means of the next batch of patches; false where there are no more.
    bool take(const PatchedKeys<T>& tokens, std::int64_t head, Keys<T>& keys) {
        first_ += size_;
        size_ = std::min<std::int64_t>(batch_, patches_.count() - first_);
        if (size_ == 0) return false;
        std::fill_n(mean_, size_ * width_, 0.0f);
        for (std::int32_t r = 0; r < found_; ++r) {
            const std::int64_t i = recent_[r];
            if (has(patch_[r])) keys.add_unit(key(tokens, head, i, patch_[r]), mean_ + (patch_[r] - first_) * width_);
        }
        for (std::int64_t slot = 0; slot < size_; ++slot) {
            const float share = 1.0f / static_cast<float>(count_[first_ + slot]);
            std::transform(mean_ + slot * width_, mean_ + (slot + 1) * width_, mean_ + slot * width_,
                           [share](float x) { return x * share; });
        }
        return true;
    }

    std::int32_t patch(std::uint32_t cell) const { return patches_.find(cell); }
    bool has(std::int32_t patch) const { return patch >= first_ && patch < first_ + size_; }  // of this batch
    const float* of(std::int32_t patch) const { return mean_ + (patch - first_) * width_; }

    // Key i, to be turned to where the mean of its patch stands.
    Key<T> key(const PatchedKeys<T>& tokens, std::int64_t head, std::int64_t i, std::int32_t patch) const {
        return {tokens.key.at(head, i), tokens.position.at(head, i), tokens.position.at(head, place_[patch])};
    }

private:
    std::int64_t width_, batch_;
    Groups patches_;
    std::int32_t *recent_, *patch_;  // [recent tokens]
    std::int32_t *count_, *place_;   // [patches]: its recent tokens, and the first of them
    std::int32_t found_ = 0;
    std::int64_t first_ = 0, size_ = 0;
    float* mean_;
};

}  // namespace

std::size_t similarity_scratch(std::int64_t rows, std::int64_t width) {
    Carver sizes;
    Means<float>(rows, width, sizes);
    Keys<float>::measure(sizes, width);
    return sizes.bytes();
}

template <typename T>
void temporal_similarity(const PatchedKeys<T>& tokens, std::int64_t head, const Rotary* rotary, float* out, Carver memory) {
    const std::int64_t rows = tokens.key.rows, width = tokens.key.width;
    const std::int16_t *const row = tokens.row.of(head), *const col = tokens.col.of(head);
    const std::uint8_t *const valid = tokens.valid.of(head), *const recent = tokens.recent.of(head);
    const Extent extent(row, col, rows);
    Means<T> means(rows, width, memory);
    Keys<T> keys(rotary, width, memory);
    means.find_recent(tokens, head, extent);
    for (std::int64_t i = 0; i < rows; ++i) out[i] = valid[i] && !recent[i] ? -1.0f : 0.0f;
    const std::int64_t ahead = tokens.key.rows_ahead();
    while (means.take(tokens, head, keys)) {
        for (std::int64_t i = 0; i < rows; ++i) {
            if (!valid[i] || recent[i]) continue;
            const std::int32_t patch = means.patch(extent.cell(row[i], col[i]));
            const T* const next = tokens.key.at(head, std::min(i + ahead, rows - 1));
            if (means.has(patch) && keys.add(means.key(tokens, head, i, patch), means.of(patch), next, out + i)) keys.compare();
        }
        keys.compare();
    }
}

template void temporal_similarity(const PatchedKeys<float>&, std::int64_t, const Rotary*, float*, Carver);
template void temporal_similarity(const PatchedKeys<Half>&, std::int64_t, const Rotary*, float*, Carver);

}  // namespace edgevlm
