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
// one vector, whatever the number of recent ones. A batch of patches at a time, to bound the memory.
constexpr std::int64_t kBatchFloats = 1 << 17;

std::int64_t batch_size(std::int64_t rows, std::int64_t width) {
    return std::clamp<std::int64_t>(kBatchFloats / std::max<std::int64_t>(width, 1), 1, std::max<std::int64_t>(rows, 1));
}

// One key after another, turned back.
template <typename T>
class Keys {
public:
    static void measure(Carver& sizes, std::int64_t width) {
        sizes.take<float>(Turner::floats(width / 2));
        for (int vector = 0; vector < 2; ++vector) sizes.take<double>(width);
        for (int vector = 0; vector < 2; ++vector) sizes.take<double>(width / 2);
        sizes.take<float>(width);
    }

    Keys(const Rotary* rotary, std::int64_t width, Carver& memory)
        : rotary_(rotary), width_(width), turner_(rotary, memory.take<float>(Turner::floats(width / 2))) {
        for (double** vector : {&stored_, &exact_}) *vector = memory.take<double>(width);
        for (double** vector : {&cosine_, &sine_}) *vector = memory.take<double>(width / 2);
        loaded_ = memory.take<float>(width);
    }

    // mean += key / |key|
    void add_unit(const T* key, const std::int32_t* position, float* mean) {
        const RowKernels<T>& kernels = simd().rows<T>();
        const float square = kernels.square(key, width_);
        if (square == 0 && is_zero(key)) return;
        if (!trusted(square)) {
            const double length = exact(key, position);
            for (std::int64_t d = 0; d < width_; ++d) mean[d] += static_cast<float>(exact_[d] / length);
        } else if (rotary_) {
            turner_.to(position);
            kernels.add_turned(key, 1 / std::sqrt(square), turner_.cosine(), turner_.sine(), width_ / 2, mean);
        } else {
            kernels.add(key, 1 / std::sqrt(square), width_, mean);
        }
    }

    // key . mean / |key|; and into `square`, |value|^2.
    float compare(const T* key, const T* value, const std::int32_t* position, const float* mean, float* square) {
        const RowKernels<T>& kernels = simd().rows<T>();
        Dots found;
        if (rotary_) {
            const Turner::Two by = turner_.split(position);
            found = kernels.turned_dots(key, value, mean, by.angle, by.more, width_ / 2);
        } else {
            found = kernels.dots(key, value, mean, width_);
        }
        *square = found.second;
        if (trusted(found.square)) return found.dot / std::sqrt(found.square);
        if (found.square == 0 && is_zero(key)) return 0;
        const double length = exact(key, position);
        double dot = 0;
        for (std::int64_t d = 0; d < width_; ++d) dot += exact_[d] * mean[d];
        return static_cast<float>(dot / length);
    }

private:
    class OptionalTurner {  // a Turner if there is something to turn by
    public:
        OptionalTurner(const Rotary* rotary, float* memory) {
            if (rotary) turner_.emplace(*rotary, memory);
        }
        void to(const std::int32_t* position) { turner_->to(position); }
        Turner::Two split(const std::int32_t* position) { return turner_->split(position); }
        const float* cosine() const { return turner_->cosine(); }
        const float* sine() const { return turner_->sine(); }

    private:
        std::optional<Turner> turner_;
    };

    bool is_zero(const T* key) {
        simd().rows<T>().load(key, width_, loaded_);
        return std::all_of(loaded_, loaded_ + width_, [](float x) { return x == 0; });
    }

    // exact_ = key, turned back, in double; returns its length.
    double exact(const T* key, const std::int32_t* position) {
        simd().rows<T>().load(key, width_, loaded_);
        std::copy_n(loaded_, width_, rotary_ ? stored_ : exact_);
        if (rotary_) {
            std::int64_t place[Rotary::kAxes];
            for (int axis = 0; axis < rotary_->axes(); ++axis) place[axis] = position[axis];
            rotary_->angles(place, cosine_, sine_);
            unrotate(stored_, cosine_, sine_, width_ / 2, exact_);
        }
        double square = 0;
        for (std::int64_t d = 0; d < width_; ++d) square += exact_[d] * exact_[d];
        return std::sqrt(square);
    }

    const Rotary* rotary_;
    std::int64_t width_;
    OptionalTurner turner_;
    double *stored_, *exact_, *cosine_, *sine_;
    float* loaded_;
};

// The means of the recent keys of each patch.
template <typename T>
class Means {
public:
    Means(std::int64_t rows, std::int64_t width, Carver& memory)
        : width_(width), batch_(batch_size(rows, width)), patches_(memory, rows) {
        for (std::int32_t** list : {&recent_, &group_, &count_}) *list = memory.take<std::int32_t>(rows);
        mean_ = memory.take<float>(batch_ * width);
    }

    void find_recent(const PatchedKeys<T>& tokens, std::int64_t head, const Extent& extent) {
        const std::int16_t *const row = tokens.row.of(head), *const col = tokens.col.of(head);
        const std::uint8_t *const valid = tokens.valid.of(head), *const recent = tokens.recent.of(head);
        patches_.clear(0, extent.cells());
        found_ = 0;
        for (std::int64_t i = 0; i < tokens.key.rows; ++i) {
            if (!valid[i] || !recent[i]) continue;
            const std::int32_t known = patches_.count(), id = patches_.find_or_add(extent.cell(row[i], col[i]));
            if (id == known) count_[id] = 0;
            ++count_[id];
            group_[found_] = id;
            recent_[found_++] = static_cast<std::int32_t>(i);
        }
    }

    // Takes the next batch of patches, or none where there is no recent key at all.
    void take(const PatchedKeys<T>& tokens, std::int64_t head, std::int32_t first, Keys<T>& keys) {
        first_ = first;
        size_ = std::min<std::int64_t>(batch_, patches_.count() - first);
        std::fill_n(mean_, size_ * width_, 0.0f);
        for (std::int32_t r = 0; r < found_; ++r) {
            const std::int64_t slot = std::int64_t{group_[r]} - first;
            if (slot >= 0 && slot < size_)
                keys.add_unit(tokens.key.at(head, recent_[r]), tokens.position.at(head, recent_[r]), mean_ + slot * width_);
        }
        for (std::int64_t slot = 0; slot < size_; ++slot) {
            const float share = 1.0f / static_cast<float>(count_[first + slot]);
            std::transform(mean_ + slot * width_, mean_ + (slot + 1) * width_, mean_ + slot * width_,
                           [share](float x) { return x * share; });
        }
    }

    bool more() const { return first_ + size_ < patches_.count(); }
    std::int32_t next() const { return static_cast<std::int32_t>(first_ + size_); }
    std::int32_t patch(std::uint32_t cell) const { return patches_.find(cell); }
    const float* of(std::int32_t patch) const {  // null if in another batch
        const std::int64_t slot = std::int64_t{patch} - first_;
        return slot >= 0 && slot < size_ ? mean_ + slot * width_ : nullptr;
    }

private:
    std::int64_t width_, batch_;
    Groups patches_;
    std::int32_t *recent_, *group_, *count_;
    std::int32_t found_ = 0, first_ = 0;
    std::int64_t size_ = 0;
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
void temporal_similarity(const PatchedKeys<T>& tokens, std::int64_t head, const Rotary* rotary, float* out, float* norm,
                         Carver memory) {
    const std::int64_t rows = tokens.key.rows, width = tokens.key.width;
    const std::int16_t *const row = tokens.row.of(head), *const col = tokens.col.of(head);
    const std::uint8_t *const valid = tokens.valid.of(head), *const recent = tokens.recent.of(head);
    const Volume<T>& value = norm ? tokens.value : tokens.key;
    const Extent extent(row, col, rows);
    Means<T> means(rows, width, memory);
    Keys<T> keys(rotary, width, memory);
    means.find_recent(tokens, head, extent);
    std::fill_n(out, rows, 0.0f);
    std::int32_t first = 0;
    do {
        means.take(tokens, head, first, keys);
        for (std::int64_t i = 0; i < rows; ++i) {
            tokens.key.prefetch_behind(head, i);
            if (norm) value.prefetch_behind(head, i);
            const std::int32_t patch = valid[i] && !recent[i] ? means.patch(extent.cell(row[i], col[i])) : Groups::kNone;
            const float* const mean = patch == Groups::kNone ? nullptr : means.of(patch);
            float square = 0;
            if (mean) out[i] = keys.compare(tokens.key.at(head, i), value.at(head, i), tokens.position.at(head, i), mean, &square);
            else if (valid[i] && !recent[i] && patch == Groups::kNone) out[i] = -1;
            if (norm && (mean || first == 0)) {
                if (!mean) square = simd().rows<T>().square(value.at(head, i), width);
                norm[i] = norm_of(value.at(head, i), square, width);
            }
        }
        first = means.next();
    } while (means.more());
}

template void temporal_similarity(const PatchedKeys<float>&, std::int64_t, const Rotary*, float*, float*, Carver);
template void temporal_similarity(const PatchedKeys<Half>&, std::int64_t, const Rotary*, float*, float*, Carver);

}  // namespace edgevlm
