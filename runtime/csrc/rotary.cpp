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

Turner::Turner(const Rotary& rotary, float* memory)
    : rotary_(rotary), angles_(memory), more_(memory + 2 * kHeld * rotary.pairs()), axes_(rotary.axes()),
      pairs_(rotary.pairs()) {}

const float* Turner::of_axes(const By& by) {
    std::uint64_t mixed = 0;
    for (const std::int64_t part : by) mixed = (mixed + static_cast<std::uint64_t>(part)) * 0xC2B2AE3D27D4EB4Fu;
    const std::int64_t place = place_of(mixed);
    Held& held = held_[place];
    if (!held.block || by != held.by) return hold(by, place);
    held.block = block_;
    return angles_ + place * 2 * pairs_;
}

const float* Turner::hold(const By& by, std::int64_t place) {
    static_assert(kHeld == 1 << (64 - 56));
    Held& held = held_[place];
    float* angles = angles_ + place * 2 * pairs_;
    if (held.block == block_) {
        angles = more_ + used_++ * 2 * pairs_;
    } else {
        held.by = by;
        held.block = block_;
    }
    fill(by, angles);
    return angles;
}

void Turner::next_block() {
    ++block_;
    used_ = 0;
}

void Turner::fill(const By& by, float* angles) const {
    const std::int64_t pairs = rotary_.pairs();
    for (const Run* run = rotary_.runs(); run < rotary_.runs() + rotary_.run_count(); ++run) {
        const std::int64_t place = by[run->axis], size = run->end - run->begin;
        std::int64_t rest = std::abs(place);
        float* const cosine = angles + run->begin;
        float* const sine = cosine + pairs;
        if (rest >> (Rotary::kBits * Rotary::kDigits)) {
            for (std::int64_t d = 0; d < size; ++d) {
                const double angle = static_cast<double>(rest) * rotary_.inv_freq()[run->begin + d];
                cosine[d] = static_cast<float>(std::cos(angle));
                sine[d] = static_cast<float>(std::sin(angle));
            }
        } else {
            const float* const low = rotary_.digit(0, rest % Rotary::kBase) + run->begin;
            const float* const middle = rotary_.digit(1, (rest >> Rotary::kBits) % Rotary::kBase) + run->begin;
            simd().turn(low, low + pairs, middle, middle + pairs, size, cosine, sine);
            if (const std::int64_t highest = rest >> (2 * Rotary::kBits)) {
                const float* const high = rotary_.digit(2, highest) + run->begin;
                simd().turn(cosine, sine, high, high + pairs, size, cosine, sine);
            }
        }
        if (place < 0) std::transform(sine, sine + size, sine, [](float s) { return -s; });
    }
}

void unrotate(const double* row, const double* cosine, const double* sine, std::int64_t pairs, double* out) {
    for (std::int64_t d = 0; d < pairs; ++d) {
        out[d] = row[d] * cosine[d] + row[d + pairs] * sine[d];
        out[d + pairs] = row[d + pairs] * cosine[d] - row[d] * sine[d];
    }
}

}  // namespace edgevlm
