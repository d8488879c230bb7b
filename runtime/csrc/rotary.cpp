#include "rotary.h"

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace edgevlm {

Rotary::Rotary(const double* inv_freq, std::int64_t pairs, const Run* runs, std::int64_t count, double* table, float* rounded)
    : inv_freq_(inv_freq), pairs_(pairs), runs_(runs), count_(count), table_(table), rounded_(rounded) {
    for (std::int64_t run = 0; run < count; ++run) axes_ = std::max(axes_, runs[run].axis + 1);
    double* entry = table;
    for (int digit = 0; digit < kDigits; ++digit) {
        for (std::int64_t value = 0; value < kBase; ++value, entry += 2 * pairs) {
            const double position = static_cast<double>(value << (kBits * digit));
            for (std::int64_t d = 0; d < pairs; ++d) {
                entry[d] = std::cos(position * inv_freq[d]);
                entry[d + pairs] = std::sin(position * inv_freq[d]);
            }
        }
    }
    std::transform(table, entry, rounded, [](double x) { return static_cast<float>(x); });
}

void Rotary::angles(const std::int64_t* position, double* cosine, double* sine) const {
    for (const Run* run = runs_; run < runs_ + count_; ++run) {
        const std::int64_t place = position[run->axis];
        std::int64_t rest = std::abs(place);
        if (rest >> (kBits * kDigits)) {
            for (std::int64_t d = run->begin; d < run->end; ++d) {
                cosine[d] = std::cos(static_cast<double>(place) * inv_freq_[d]);
                sine[d] = std::sin(static_cast<double>(place) * inv_freq_[d]);
            }
            continue;
        }
        const double* const lowest = table_ + (rest % kBase) * 2 * pairs_;
        std::copy(lowest + run->begin, lowest + run->end, cosine + run->begin);
        std::copy(lowest + pairs_ + run->begin, lowest + pairs_ + run->end, sine + run->begin);
        for (int digit = 1; rest >>= kBits; ++digit) {
            const double* const c = table_ + (digit * kBase + rest % kBase) * 2 * pairs_;
            const double* const s = c + pairs_;
            for (std::int64_t d = run->begin; d < run->end; ++d) {
                const double turned = cosine[d] * c[d] - sine[d] * s[d];
                sine[d] = sine[d] * c[d] + cosine[d] * s[d];
                cosine[d] = turned;
            }
        }
        if (place < 0) std::transform(sine + run->begin, sine + run->end, sine + run->begin, [](double s) { return -s; });
    }
}

Turner::Turner(const Rotary& rotary, float* memory) : rotary_(rotary), memory_(memory) {}

void Turner::to(const std::int32_t* position) {
    const std::int64_t pairs = rotary_.pairs();
    float* const cosine = memory_;
    float* const sine = memory_ + pairs;
    float* const held = sine + pairs;
    std::int64_t now[Rotary::kAxes] = {-1, -1, -1};
    for (const Run* run = rotary_.runs(); run < rotary_.runs() + rotary_.run_count(); ++run) {
        const std::int64_t place = now[run->axis] = position[run->axis], last = last_[run->axis];
        if (place == last) continue;
        const std::int64_t begin = run->begin, size = run->end - begin, high = place >> Rotary::kBits;
        if (high >> (Rotary::kBits * (Rotary::kDigits - 1))) {
            for (std::int64_t d = begin; d < run->end; ++d) {
                cosine[d] = static_cast<float>(std::cos(static_cast<double>(place) * rotary_.inv_freq()[d]));
                sine[d] = static_cast<float>(std::sin(static_cast<double>(place) * rotary_.inv_freq()[d]));
            }
            continue;
        }
        const float* const low = rotary_.digit(0, place % Rotary::kBase) + begin;
        const float* middle = rotary_.digit(1, high % Rotary::kBase) + begin;
        if (high >= Rotary::kBase) {
            if (last < 0 || high != last >> Rotary::kBits) {
                const float* const top = rotary_.digit(2, high >> Rotary::kBits) + begin;
                simd().turn(middle, middle + pairs, top, top + pairs, size, held + begin, held + pairs + begin);
            }
            middle = held + begin;
        }
        simd().turn(low, low + pairs, middle, middle + pairs, size, cosine + begin, sine + begin);
    }
    std::copy_n(now, Rotary::kAxes, last_);
}

const float* Turner::upper(std::int64_t high) {
    const std::int64_t pairs = rotary_.pairs();
    if (high < Rotary::kBase) return rotary_.digit(1, high);
    float* const held = memory_ + 4 * pairs;
    if (high != high_) {
        const float* const middle = rotary_.digit(1, high % Rotary::kBase);
        const float* const top = rotary_.digit(2, high >> Rotary::kBits);
        simd().turn(middle, middle + pairs, top, top + pairs, pairs, held, held + pairs);
        high_ = high;
    }
    return held;
}

Turner::Two Turner::split(const std::int32_t* position) {
    const std::int64_t high = position[0] >> Rotary::kBits;
    if (rotary_.run_count() == 1 && rotary_.axes() == 1 && high >> (Rotary::kBits * (Rotary::kDigits - 1)) == 0)
        return {rotary_.digit(0, position[0] % Rotary::kBase), upper(high)};
    to(position);
    return {memory_, rotary_.digit(0, 0)};
}

void unrotate(const double* row, const double* cosine, const double* sine, std::int64_t pairs, double* out) {
    for (std::int64_t d = 0; d < pairs; ++d) {
        out[d] = row[d] * cosine[d] + row[d + pairs] * sine[d];
        out[d + pairs] = row[d + pairs] * cosine[d] - row[d] * sine[d];
    }
}

}  // namespace edgevlm
