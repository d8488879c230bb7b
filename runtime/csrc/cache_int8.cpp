// Rows of int8: their scales, and how much of what was added lies beyond what codes can say.
#include <algorithm>
#include <cmath>

#include "cache.h"
#include "errors.h"

namespace edgevlm {

namespace {

void check_scales(const Shape& shape) {
    const auto count = shape.capacities.size() * static_cast<std::size_t>(shape.kv_heads * shape.head_dim);
    if (shape.key_scale.size() != count || shape.value_scale.size() != count)
        refuse("an int8 cache needs a scale for each layer, head and channel of keys and of values");
    for (const std::vector<float>* scales : {&shape.key_scale, &shape.value_scale}) {
        const auto usable = [](float x) { return std::isfinite(x) && x > 0; };
        if (!std::all_of(scales->begin(), scales->end(), usable)) refuse("scales must be finite and above 0");
    }
    const std::int64_t pairs = shape.head_dim / 2;
    for (auto row = shape.key_scale.begin(); row != shape.key_scale.end(); row += shape.head_dim) {
        if (!std::equal(row, row + pairs, row + pairs)) refuse("both halves of a key's rotary pair must have one scale");
    }
}

}  // namespace

void Cache::take_scales(const Shape& shape) {
    check_scales(shape);
    const std::int64_t size = heads_ * head_dim_;
    for (std::int64_t l = 0; l < layers_; ++l) {
        std::copy_n(shape.key_scale.begin() + l * size, size, parts_.layer[l].key_scale);
        std::copy_n(shape.value_scale.begin() + l * size, size, parts_.layer[l].value_scale);
    }
}

std::int64_t Cache::saturated_in(const Layer& layer, std::int64_t first, std::int64_t last) const {
    if (dtype_ != DType::int8) return 0;
    std::int64_t found = 0;
    for (std::int64_t head = 0; head < heads_; ++head) {
        for (std::int64_t i = first; i < last; ++i) {
            const std::int64_t at = (head * layer.capacity + i) * head_dim_;
            found += simd().outside(reinterpret_cast<const Int8*>(layer.key) + at, head_dim_ / 2);
            found += simd().saturated(reinterpret_cast<const Int8*>(layer.value) + at, head_dim_);
        }
    }
    return found;
}

}  // namespace edgevlm
