#include "rotary.h"

#include <algorithm>
#include <cmath>

namespace edgevlm {

std::size_t Rotary::scratch_bytes(std::int64_t pairs) {
    Carver sizes;
    sizes.take<double>(kDigits * kBase * pairs);
    sizes.take<double>(kDigits * kBase * pairs);
    return sizes.bytes();
}

Rotary::Rotary(const double* inv_freq, std::int64_t pairs, Lease& memory)
    : inv_freq_(inv_freq),
      pairs_(pairs),
      cosine_(memory.take<double>(kDigits * kBase * pairs)),
      sine_(memory.take<double>(kDigits * kBase * pairs)) {
    for (int digit = 0; digit < kDigits; ++digit) {
        for (std::int64_t value = 0; value < kBase; ++value) {
            const std::int64_t at = (digit * kBase + value) * pairs;
            const double position = static_cast<double>(value << (kBits * digit));
            for (std::int64_t d = 0; d < pairs; ++d) {
                cosine_[at + d] = std::cos(position * inv_freq[d]);
                sine_[at + d] = std::sin(position * inv_freq[d]);
            }
        }
    }
}

void Rotary::angles(std::int64_t position, double* cosine, double* sine) const {
    std::int64_t rest = std::abs(position);
    if (rest >> (kBits * kDigits)) {
        for (std::int64_t d = 0; d < pairs_; ++d) {
            cosine[d] = std::cos(static_cast<double>(position) * inv_freq_[d]);
            sine[d] = std::sin(static_cast<double>(position) * inv_freq_[d]);
        }
        return;
    }
    const std::int64_t lowest = (rest % kBase) * pairs_;
    std::copy_n(cosine_ + lowest, pairs_, cosine);
    std::copy_n(sine_ + lowest, pairs_, sine);
    for (int digit = 1; rest >>= kBits; ++digit) {
        const double* c = cosine_ + (digit * kBase + rest % kBase) * pairs_;
        const double* s = sine_ + (digit * kBase + rest % kBase) * pairs_;
        for (std::int64_t d = 0; d < pairs_; ++d) {
            const double turned = cosine[d] * c[d] - sine[d] * s[d];
            sine[d] = sine[d] * c[d] + cosine[d] * s[d];
            cosine[d] = turned;
        }
    }
    if (position < 0) std::transform(sine, sine + pairs_, sine, [](double s) { return -s; });
}

void rotate(float* row, const double* cosine, const double* sine, std::int64_t pairs) {
    for (std::int64_t d = 0; d < pairs; ++d) {
        const float c = static_cast<float>(cosine[d]), s = static_cast<float>(sine[d]);
        const float first = row[d], second = row[d + pairs];
        row[d] = first * c - second * s;
        row[d + pairs] = second * c + first * s;
    }
}

void unrotate(const float* row, const double* cosine, const double* sine, std::int64_t pairs, double* out) {
    for (std::int64_t d = 0; d < pairs; ++d) {
        out[d] = row[d] * cosine[d] + row[d + pairs] * sine[d];
        out[d + pairs] = row[d + pairs] * cosine[d] - row[d] * sine[d];
    }
}

}  // namespace edgevlm
