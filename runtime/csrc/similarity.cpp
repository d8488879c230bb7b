#include "similarity.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>

#include "groups.h"
#include "simd.h"

namespace edgevlm {

namespace {

// The mean of a key's cosines with the recent keys of its patch is its unit vector times the mean of theirs: each past key meets
// one vector, whatever the number of recent ones. A batch of patches at a time, to bound the memory.
constexpr std::int64_t kBatchFloats = 1 << 17;

std::int64_t batch_size(std::int64_t rows, std::int64_t width) {
    return std::clamp<std::int64_t>(kBatchFloats / std::max<std::int64_t>(width, 1), 1, std::max<std::int64_t>(rows, 1));
}

constexpr std::int32_t kRecent = std::int32_t{1} << 30;  // added to the patch of a recent token
constexpr std::int32_t kNothing = -1;

// Where a float32 sum of squares can be trusted: no square overflowed, and what underflowed does not matter.
bool trusted(float square) { return square > 1e-24f && square < 1e30f; }

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

    // key . mean / |key|
    float compare(const T* key, const std::int32_t* position, const float* mean) {
        const RowKernels<T>& kernels = simd().rows<T>();
        Dots found;
        if (rotary_) {
            const Turner::Two by = turner_.split(position);
            found = kernels.turned_dots(key, mean, by.angle, by.more, width_ / 2);
        } else {
            found = kernels.dots(key, mean, width_);
        }
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

}  // namespace

std::size_t similarity_scratch(std::int64_t rows, std::int64_t width) {
    Carver sizes;
    Groups(sizes, rows);
    sizes.take<std::int32_t>(rows);
    sizes.take<std::int32_t>(rows);
    sizes.take<float>(batch_size(rows, width) * width);
    Keys<float>::measure(sizes, width);
    return sizes.bytes();
}

template <typename T>
void temporal_similarity(const PatchedKeys<T>& tokens, std::int64_t head, const Rotary* rotary, float* out, Carver memory) {
    const std::int64_t rows = tokens.key.rows, width = tokens.key.width;
    Groups patches(memory, rows);
    std::int32_t* const patch = memory.take<std::int32_t>(rows);
    std::int32_t* const count = memory.take<std::int32_t>(rows);
    const std::int64_t batch = batch_size(rows, width);
    float* const mean = memory.take<float>(batch * width);
    Keys<T> keys(rotary, width, memory);

    patches.clear();
    std::fill_n(count, rows, 0);
    for (std::int64_t i = 0; i < rows; ++i) {
        patch[i] = kNothing;
        if (!tokens.valid.at(head, i) || !tokens.recent.at(head, i)) continue;
        const std::int32_t id = patches.find_or_add(patch_key(tokens.row.at(head, i), tokens.col.at(head, i)));
        ++count[id];
        patch[i] = id + kRecent;
    }
    for (std::int64_t i = 0; i < rows; ++i) {
        out[i] = 0;
        if (!tokens.valid.at(head, i) || tokens.recent.at(head, i)) continue;
        patch[i] = patches.find(patch_key(tokens.row.at(head, i), tokens.col.at(head, i)));
        if (patch[i] == Groups::kNone) out[i] = -1;
    }
    for (std::int64_t first = 0; first < patches.count(); first += batch) {
        const std::int64_t size = std::min<std::int64_t>(batch, patches.count() - first);
        std::fill_n(mean, size * width, 0.0f);
        for (std::int64_t i = 0; i < rows; ++i) {
            const std::int64_t slot = std::int64_t{patch[i]} - kRecent - first;
            if (slot >= 0 && slot < size) keys.add_unit(tokens.key.at(head, i), tokens.position.at(head, i), mean + slot * width);
        }
        for (std::int64_t slot = 0; slot < size; ++slot) {
            const float share = 1.0f / static_cast<float>(count[first + slot]);
            std::transform(mean + slot * width, mean + (slot + 1) * width, mean + slot * width,
                           [share](float x) { return x * share; });
        }
        for (std::int64_t i = 0; i < rows; ++i) {
            const std::int64_t slot = patch[i] - first;
            if (patch[i] < 0 || slot < 0 || slot >= size) continue;
            tokens.key.prefetch_behind(head, i);
            out[i] = keys.compare(tokens.key.at(head, i), tokens.position.at(head, i), mean + slot * width);
        }
    }
}

template void temporal_similarity(const PatchedKeys<float>&, std::int64_t, const Rotary*, float*, Carver);
template void temporal_similarity(const PatchedKeys<Half>&, std::int64_t, const Rotary*, float*, Carver);

}  // namespace edgevlm
