#include "rotary.h"

#include <algorithm>
#include <cmath>

namespace edgevlm {

Rotary::Rotary(const double* inv_freq, std::int64_t pairs, double* table)
    : inv_freq_(inv_freq), pairs_(pairs), table_(table) {
    for (int digit = 0; digit < kDigits; ++digit) {
        for (std::int64_t value = 0; value < kBase; ++value, table += 2 * pairs) {
            const double position = static_cast<double>(value << (kBits * digit));
            for (std::int64_t d = 0; d < pairs; ++d) {
                table[d] = std::cos(position * inv_freq[d]);
                table[d + pairs] = std::sin(position * inv_freq[d]);
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
    const double* const lowest = table_ + (rest % kBase) * 2 * pairs_;
    std::copy_n(lowest, pairs_, cosine);
    std::copy_n(lowest + pairs_, pairs_, sine);
    for (int digit = 1; rest >>= kBits; ++digit) {
        const double* const c = table_ + (digit * kBase + rest % kBase) * 2 * pairs_;
        const double* const s = c + pairs_;
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
