#include "cache.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "attention.h"
#include "errors.h"
#include "infinipot.h"
#include "index_of.h"
#include "newer_similarity.h"

namespace edgevlm {

namespace {

constexpr std::size_t kLarge = std::size_t{16} << 20;

// Of rotary frequencies.
std::int64_t bases(const Shape& shape) { return shape.local.empty() ? 1 : 2; }

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
    const std::int64_t wanted = shape.head_dim / 2 * bases(shape);
    if (static_cast<std::int64_t>(shape.inv_freq.size()) != wanted)
        refuse("inv_freq must hold ", wanted, " numbers, head_dim / 2 for each rotary base, not ", shape.inv_freq.size());
    for (double frequency : shape.inv_freq) {
        if (!std::isfinite(frequency)) refuse("inv_freq must be finite");
    }
}

// The block, in this order, every array 64-byte aligned, and zero at the start:
//
//   the table of layers, inv_freq f64 [bases, D / 2], runs [runs], commit serials i64 [smallest capacity]
//   for each layer l:
//     key scale, value scale f32  [H, D]  of int8 alone
//     key, value            [H, C_l, D]  of dtype, keys rotated
//     kind u8, seq i64, frame i32, row i16, col i16  [H, C_l]
//     position i32          [H, C_l, axes]
//     confirmed i32         [H, C_l]
//     norm f32              [H, C_l]
//   the table of angles [bases, 3, 64, 2, D / 2], in f64 and in f32
//   scratch for one kernel at a time, a slot for each thread that may take part
//
// Without a block behind the carver this only measures.
Parts carve(const Shape& shape, BumpAllocator& carver) {
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
        layer.key_scale = layer.value_scale = nullptr;
        if (shape.dtype == DType::int8) {
            for (float** scale : {&layer.key_scale, &layer.value_scale})
                *scale = carver.take<float>(static_cast<std::size_t>(shape.kv_heads * shape.head_dim));
        }
        layer.key = carver.take_rows(slots, row_bytes);
        layer.value = carver.take_rows(slots, row_bytes);
        layer.kind = carver.take<std::uint8_t>(slots);
        layer.seq = carver.take<std::int64_t>(slots);
        layer.frame = carver.take<std::int32_t>(slots);
        layer.row = carver.take<std::int16_t>(slots);
        layer.col = carver.take<std::int16_t>(slots);
        layer.position = carver.take<std::int32_t>(slots * shape.axes);
        layer.confirmed = carver.take<std::int32_t>(slots);
        layer.norm = carver.take<float>(slots);
        if (parts.layer) parts.layer[l] = layer;
    }
    parts.rotary = carver.take<double>(bases(shape) * Rotary::table_size(shape.head_dim / 2));
    parts.rounded = carver.take<float>(bases(shape) * Rotary::table_size(shape.head_dim / 2));
    parts.scratch_bytes = std::max({infinipot_scratch(shape.kv_heads, *largest, shape.head_dim),  // and its parts
                                    attention_scratch(*largest, shape.head_dim), newer_similarity_scratch(*largest, shape.head_dim),
                                    index_of_scratch(*largest), reindex_scratch(*largest, shape.head_dim / 2, shape.axes)});
    parts.scratch = carver.take_rows(shape.threads, parts.scratch_bytes);
    return parts;
}

}  // namespace

std::size_t element_size(DType dtype) {
    switch (dtype) {
        case DType::fp32: return 4;
        case DType::fp16: return 2;
        case DType::int8: return 1;
    }
    refuse("unknown dtype");
}

std::size_t Cache::bytes_for(const Shape& shape) {
    check(shape);
    BumpAllocator sizes;
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
    local_ = shape.local;
    BumpAllocator carver(block_.get());
    parts_ = carve(shape, carver);
    std::copy(shape.inv_freq.begin(), shape.inv_freq.end(), parts_.inv_freq);
    std::copy(shape.runs.begin(), shape.runs.end(), parts_.runs);
    const std::size_t pairs = head_dim_ / 2, size = Rotary::table_size(pairs);
    for (std::int64_t b = 0; b < bases(shape) && !shape.runs.empty(); ++b)
        rotary_[b].emplace(parts_.inv_freq + b * pairs, pairs, parts_.runs, shape.runs.size(), parts_.rotary + b * size,
                           parts_.rounded + b * size);
    if (dtype_ == DType::int8) take_scales(shape);
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

}  // namespace edgevlm
