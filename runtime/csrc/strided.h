// Arrays that belong to someone else: numpy arrays, or parts of the cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgevlm {

// [heads, rows], each head's rows dense; head_stride in bytes.
template <typename T>
struct Plane {
    const std::byte* data = nullptr;
    std::ptrdiff_t head_stride = 0;
    std::int64_t heads = 0;
    std::int64_t rows = 0;

    const T* of(std::int64_t head) const { return reinterpret_cast<const T*>(data + head * head_stride); }
    T at(std::int64_t head, std::int64_t row) const { return of(head)[row]; }
};

using Mask = Plane<std::uint8_t>;  // numpy bool: any byte but 0 is true

// One stored row, dense. scale [width] where numbers are kept as a Int8 of their channel, else null.
template <typename T>
struct Row {
    const T* at;
    const float* scale;
};

// [heads, rows, width], any strides (in bytes), the last axis dense.
template <typename T>
struct Volume {
    const std::byte* data = nullptr;
    std::ptrdiff_t head_stride = 0;
    std::ptrdiff_t row_stride = 0;
    std::int64_t heads = 0;
    std::int64_t rows = 0;
    std::int64_t width = 0;
    const float* scale = nullptr;  // [heads, width], dense, of codes

    const T* at(std::int64_t head, std::int64_t row) const {
        return reinterpret_cast<const T*>(data + head * head_stride + row * row_stride);
    }

    Row<T> row(std::int64_t head, std::int64_t row) const { return {at(head, row), scale ? scale + head * width : nullptr}; }

    // How far ahead a loop over rows should prefetch: it would else wait for every one of them.
    std::int64_t rows_ahead() const {
        constexpr std::int64_t kBytes = 16384;
        return 1 + kBytes / (width * static_cast<std::int64_t>(sizeof(T)) + 1);
    }
};

}  // namespace edgevlm
