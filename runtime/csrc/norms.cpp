#include "norms.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace edgevlm {

template <typename T>
void value_norms(const Volume<T>& value, std::int64_t head, float* out) {
    const RowKernels<T>& kernels = simd().rows<T>();
    for (std::int64_t i = 0; i < value.rows; ++i) {
        value.prefetch_behind(head, i);
        const T* row = value.at(head, i);
        const float square = kernels.square(row, value.width);
        if (square > 1e-24f && square < 1e30f) {
            out[i] = std::sqrt(square);
            continue;
        }
        double exact = 0;  // some square overflowed, or all of them may have underflowed
        for (std::int64_t d = 0; d < value.width; ++d) {
            float x;
            kernels.load(row + d, 1, &x);
            exact += static_cast<double>(x) * x;
        }
        out[i] = static_cast<float>(std::sqrt(exact));
    }
}

template void value_norms(const Volume<float>&, std::int64_t, float*);
template void value_norms(const Volume<Half>&, std::int64_t, float*);

std::size_t newest_scratch(std::int64_t count) {
    Carver sizes;
    sizes.take<std::int32_t>(count);
    return sizes.bytes();
}

void newest_frames(const Plane<std::int32_t>& frame, const Mask& among, std::int64_t count, bool* out, Carver memory) {
    std::int32_t* const newest = memory.take<std::int32_t>(count);  // rising
    std::int64_t found = 0;
    for (std::int64_t head = 0; head < frame.heads; ++head) {
        for (std::int64_t i = 0; i < frame.rows && count; ++i) {
            const std::int32_t t = frame.at(head, i);
            if (!among.at(head, i) || (found == count && t <= newest[0])) continue;
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
        for (std::int64_t i = 0; i < frame.rows; ++i)
            *out++ = found && among.at(head, i) && frame.at(head, i) >= newest[0];
    }
}

}  // namespace edgevlm
