// Arrays that belong to someone else: numpy arrays, or parts of the cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgevlm {

// [heads, rows], any strides (in bytes).
template <typename T>
struct Plane {
    const std::byte* data = nullptr;
    std::ptrdiff_t head_stride = 0;
    std::ptrdiff_t row_stride = 0;
    std::int64_t heads = 0;
    std::int64_t rows = 0;

    T at(std::int64_t head, std::int64_t row) const {
        return *reinterpret_cast<const T*>(data + head * head_stride + row * row_stride);
    }
};

using Mask = Plane<std::uint8_t>;  // numpy bool: any byte but 0 is true

// [heads, rows, width], any strides (in bytes), the last axis dense.
template <typename T>
struct Volume {
    const std::byte* data = nullptr;
    std::ptrdiff_t head_stride = 0;
    std::ptrdiff_t row_stride = 0;
    std::int64_t heads = 0;
    std::int64_t rows = 0;
    std::int64_t width = 0;

    const T* at(std::int64_t head, std::int64_t row) const {
        return reinterpret_cast<const T*>(data + head * head_stride + row * row_stride);
    }
};

}  // namespace edgevlm
