// What the kernels read of a cache: the rows of a layer, and what turns their keys back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cache.h"
#include "errors.h"
#include "infinipot.h"
#include "rotary.h"
#include "strided.h"

namespace edgevlm {

template <typename T>
Plane<T> plane(const Cache& cache, const Layer& layer, const T* first) {
    const auto stride = static_cast<std::ptrdiff_t>(sizeof(T)) * layer.capacity;
    return {reinterpret_cast<const std::byte*>(first), stride, cache.kv_heads(), layer.length};
}

template <typename T>
Volume<T> volume(const Cache& cache, const Layer& layer, const void* first, std::int64_t width, const float* scale = nullptr) {
    const auto row = static_cast<std::ptrdiff_t>(sizeof(T)) * width;
    return {static_cast<const std::byte*>(first), row * layer.capacity, row, cache.kv_heads(), layer.length, width, scale};
}

template <typename T>
LayerRows<T> rows_of(const Cache& cache, const Layer& layer) {
    return {volume<T>(cache, layer, layer.key, cache.head_dim(), layer.key_scale),
            volume<T>(cache, layer, layer.value, cache.head_dim(), layer.value_scale),
            volume<std::int32_t>(cache, layer, layer.position, cache.axes()),
            plane(cache, layer, layer.kind),
            plane(cache, layer, layer.seq),
            plane(cache, layer, layer.frame),
            plane(cache, layer, layer.row),
            plane(cache, layer, layer.col),
            {layer.norm, layer.capacity}};
}

// Calls f with a null float*, Half* or Int8*, by what keys and values are stored as.
template <typename F>
auto by_dtype(DType dtype, F&& f) {
    switch (dtype) {
        case DType::fp32: break;
        case DType::fp16: return f(static_cast<Half*>(nullptr));
        case DType::int8: return f(static_cast<Int8*>(nullptr));
    }
    return f(static_cast<float*>(nullptr));
}

inline std::int64_t longest_of(const Cache& cache) {
    std::int64_t longest = 0;
    for (std::int64_t l = 0; l < cache.layers(); ++l) longest = std::max(longest, cache.layer(l).length);
    return longest;
}

inline const Rotary* rotary_of(const Cache& cache, bool rotated, std::int64_t layer) {
    if (rotated) return nullptr;
    if (!cache.rotary(layer))
        refuse("cannot un-rotate keys with ", cache.axes(), " position axes: open the cache with rotary sections");
    return cache.rotary(layer);
}

}  // namespace edgevlm
