// Rotary position embedding, rotate-half pairs (d, d + D/2), as Hugging Face's llama and qwen2 have it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgevlm {

// cos and sin of position * inv_freq, in double, from a table of the position's base-64 digits: a complex product or two
// instead of D/2 calls of sincos. Positions of 64^3 and beyond go the long way.
class Rotary {
public:
    static constexpr int kBits = 6, kDigits = 3, kBase = 1 << kBits;

    static std::size_t table_size(std::int64_t pairs) { return 2 * kDigits * kBase * static_cast<std::size_t>(pairs); }

    // inv_freq [pairs] and table [table_size(pairs)] stay the caller's; the table is filled here.
    Rotary(const double* inv_freq, std::int64_t pairs, double* table);

    // Fills cosine [pairs] and sine [pairs].
    void angles(std::int64_t position, double* cosine, double* sine) const;

    const double* inv_freq() const { return inv_freq_; }
    std::int64_t pairs() const { return pairs_; }

private:
    const double* inv_freq_;
    std::int64_t pairs_;
    const double* table_;  // [kDigits, kBase, 2, pairs]: cosines, sines
};

// Turns row [2 * pairs] by the angles, in float32.
void rotate(float* row, const double* cosine, const double* sine, std::int64_t pairs);

// Writes row [2 * pairs], turned back by the angles, to out in double.
void unrotate(const float* row, const double* cosine, const double* sine, std::int64_t pairs, double* out);

}  // namespace edgevlm
