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

    // Asks for the row some way behind this one: a loop that works on each row would else wait for every one of them.
    void prefetch_behind(std::int64_t head, std::int64_t row) const {
        constexpr std::int64_t kAhead = 4096, kLine = 64;
        const std::int64_t bytes = width * static_cast<std::int64_t>(sizeof(T)), far = row + 1 + kAhead / (bytes + 1);
        if (far >= rows) return;
        const auto* const first = reinterpret_cast<const char*>(at(head, far));
        for (std::int64_t line = 0; line < bytes; line += kLine) __builtin_prefetch(first + line);
    }
};

}  // namespace edgevlm
