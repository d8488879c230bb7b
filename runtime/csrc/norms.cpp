#include "norms.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace edgevlm {

namespace {

template <typename T>
float exact_norm(const T* row, std::int64_t width) {
    double square = 0;
    for (std::int64_t d = 0; d < width; ++d) {
        float x;
        simd().rows<T>().load(row + d, 1, &x);
        square += static_cast<double>(x) * x;
    }
    return static_cast<float>(std::sqrt(square));
}

}  // namespace

template <typename T>
void value_norms(const Volume<T>& value, std::int64_t head, float* out) {
    const auto stride = value.row_stride / static_cast<std::ptrdiff_t>(sizeof(T));
    simd().rows<T>().squares(value.at(head, 0), stride, value.rows, value.width, out);
    for (std::int64_t i = 0; i < value.rows; ++i)
        out[i] = trusted(out[i]) ? std::sqrt(out[i]) : exact_norm(value.at(head, i), value.width);
}

template void value_norms(const Volume<float>&, std::int64_t, float*);
template void value_norms(const Volume<Half>&, std::int64_t, float*);

namespace {

constexpr std::int64_t kStretch = 64;

// From a stretch's start, the start of the first stretch that holds a frame newer than `oldest`, or `rows`.
std::int64_t skip_old(const std::int32_t* frame, std::int64_t start, std::int64_t rows, std::int32_t oldest) {
    for (; start + kStretch <= rows; start += kStretch) {
        std::int32_t newest = frame[start];
        for (std::int64_t i = 1; i < kStretch; ++i) newest = std::max(newest, frame[start + i]);
        if (newest > oldest) break;
    }
    return start;
}

}  // namespace

std::size_t newest_scratch(std::int64_t count) {
    Carver sizes;
    sizes.take<std::int32_t>(count);
    return sizes.bytes();
}

void newest_frames(const Plane<std::int32_t>& frame, const Mask& among, std::int64_t count, bool* out, Carver memory) {
    std::int32_t* const newest = memory.take<std::int32_t>(count);  // rising
    std::int64_t found = 0;
    for (std::int64_t head = 0; head < frame.heads; ++head) {
        const std::int32_t* const frames = frame.of(head);
        const std::uint8_t* const wanted = among.of(head);
        for (std::int64_t i = 0; i < frame.rows && count; ++i) {
            if (i % kStretch == 0 && found == count) i = skip_old(frames, i, frame.rows, newest[0]);
            if (i == frame.rows) break;
            const std::int32_t t = frames[i];
            if (!wanted[i] || (found == count && t <= newest[0])) continue;
            std::int32_t* const place = std::lower_bound(newest, newest + found, t);
            if (place < newest + found && *place == t) continue;
            if (found < count) {
                std::copy_backward(place, newest + found, newest + found + 1);
                ++found;
                *place = t;
            } else {
                std::copy(newest + 1, place, newest);
                *(place - 1) = t;
            }
        }
    }
    for (std::int64_t head = 0; head < frame.heads; ++head) {
        const std::int32_t* const frames = frame.of(head);
        const std::uint8_t* const wanted = among.of(head);
        const std::int32_t oldest = found ? newest[0] : 0;
        for (std::int64_t i = 0; i < frame.rows; ++i) out[i] = (found != 0) & (wanted[i] != 0) & (frames[i] >= oldest);
        out += frame.rows;
    }
}

}  // namespace edgevlm
