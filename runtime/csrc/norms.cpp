#include "norms.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace edgevlm {

template <typename T>
float norm_of(const T* row, float square, std::int64_t width) {
    if (trusted(square)) return std::sqrt(square);
    double exact = 0;
    for (std::int64_t d = 0; d < width; ++d) {
        float x;
        simd().rows<T>().load(row + d, 1, &x);
        exact += static_cast<double>(x) * x;
    }
    return static_cast<float>(std::sqrt(exact));
}

template <typename T>
void value_norms(const Volume<T>& value, std::int64_t head, float* out) {
    const RowKernels<T>& kernels = simd().rows<T>();
    for (std::int64_t i = 0; i < value.rows; ++i) {
        value.prefetch_behind(head, i);
        const T* const row = value.at(head, i);
        out[i] = norm_of(row, kernels.square(row, value.width), value.width);
    }
}

template float norm_of(const float*, float, std::int64_t);
template float norm_of(const Half*, float, std::int64_t);
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
