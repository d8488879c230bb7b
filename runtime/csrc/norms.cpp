#include "norms.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace edgevlm {

namespace {

template <typename T>
float exact_norm(Row<T> row, std::int64_t width) {
    double square = 0;
    for (std::int64_t d = 0; d < width; ++d) {
        float x;
        simd().rows<T>().load({row.at + d, row.scale ? row.scale + d : nullptr}, 1, &x);
        square += static_cast<double>(x) * x;
    }
    return static_cast<float>(std::sqrt(square));
}

template <typename T>
void norms_of(const Volume<T>& value, std::int64_t head, std::int64_t first, std::int64_t last, float* norm) {
    const auto stride = value.row_stride / static_cast<std::ptrdiff_t>(sizeof(T));
    simd().rows<T>().squares(value.row(head, first), stride, last - first, value.width, norm + first);
    for (std::int64_t i = first; i < last; ++i)
        norm[i] = trusted(norm[i]) ? std::sqrt(norm[i]) : exact_norm(value.row(head, i), value.width);
}

}  // namespace

template <typename T>
void value_norms(const Volume<T>& value, std::int64_t head, float* out) {
    norms_of(value, head, 0, value.rows, out);
}

template <typename T>
void complete_norms(const Volume<T>& value, std::int64_t head, float* norm) {
    float* const end = norm + value.rows;
    const auto unknown = [](float x) { return x == kUnknownNorm; };
    for (float* first = norm; (first = std::find_if(first, end, unknown)) != end;) {
        float* const last = std::find_if_not(first, end, unknown);
        norms_of(value, head, first - norm, last - norm, norm);
        first = last;
    }
}

template void value_norms(const Volume<float>&, std::int64_t, float*);
template void value_norms(const Volume<Half>&, std::int64_t, float*);
template void value_norms(const Volume<Int8>&, std::int64_t, float*);
template void complete_norms(const Volume<float>&, std::int64_t, float*);
template void complete_norms(const Volume<Half>&, std::int64_t, float*);
template void complete_norms(const Volume<Int8>&, std::int64_t, float*);

namespace {

constexpr std::int64_t kStretch = 64;

// Backwards from the last row of a stretch, the last row of the next that holds a frame newer than `oldest`, or where less than
// a stretch is left.
std::int64_t skip_old(const std::int32_t* frame, std::int64_t last, std::int32_t oldest) {
    for (; last + 1 >= kStretch; last -= kStretch) {
        std::int32_t newest = frame[last];
        for (std::int64_t i = 1; i < kStretch; ++i) newest = std::max(newest, frame[last - i]);
        if (newest > oldest) break;
    }
    return last;
}

}  // namespace

std::size_t newest_scratch(std::int64_t count) {
    BumpAllocator sizes;
    sizes.take<std::int32_t>(count);
    return sizes.bytes();
}

void newest_frames(const Plane<std::int32_t>& frame, const Mask& among, std::int64_t count, bool* out, BumpAllocator memory) {
    std::int32_t* const newest = memory.take<std::int32_t>(count);  // rising
    std::int64_t found = 0;
    const std::int32_t* last = nullptr;  // the row before, of those that were looked for
    for (std::int64_t head = 0; head < frame.heads; ++head) {
        const std::int32_t* const frames = frame.of(head);
        const std::uint8_t* const wanted = among.of(head);
        for (std::int64_t i = frame.rows - 1; i >= 0 && count; --i) {  // new rows come last
            if ((frame.rows - 1 - i) % kStretch == 0 && found == count) i = skip_old(frames, i, newest[0]);
            if (i < 0) break;
            const std::int32_t t = frames[i];
            if (!wanted[i] || (found == count && t <= newest[0]) || (last && t == *last)) continue;
            last = frames + i;
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
