// Rotary position embedding, rotate-half pairs (d, d + D/2), as Hugging Face's llama and qwen2 have it; and M-RoPE, where
// each pair turns by one of three positions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace edgevlm {

// Pairs [begin, end) turn by position `axis`.
struct Run {
    std::int32_t axis, begin, end;
};

// cos and sin of position * inv_freq from a table of the position's base-64 digits: a complex product or two instead of D/2
// calls of sincos. Positions of 64^3 and beyond go the long way.
class Rotary {
public:
    static constexpr int kBits = 6, kDigits = 3, kBase = 1 << kBits, kAxes = 3;

    static std::size_t table_size(std::int64_t pairs) { return 2 * kDigits * kBase * static_cast<std::size_t>(pairs); }

    // inv_freq [pairs], runs [count] and the tables [table_size(pairs)] stay the caller's; the tables are filled here.
    Rotary(const double* inv_freq, std::int64_t pairs, const Run* runs, std::int64_t count, double* table, float* rounded);

    // Fills cosine [pairs] and sine [pairs] of position [axes], in double.
    void angles(const std::int64_t* position, double* cosine, double* sine) const;

    const double* inv_freq() const { return inv_freq_; }
    std::int64_t pairs() const { return pairs_; }
    const Run* runs() const { return runs_; }
    std::int64_t run_count() const { return count_; }
    int axes() const { return axes_; }  // that its runs name
    const float* digit(int place, std::int64_t value) const { return rounded_ + (place * kBase + value) * 2 * pairs_; }

private:
    const double* inv_freq_;
    std::int64_t pairs_;
    const Run* runs_;
    std::int64_t count_;
    int axes_ = 1;
    const double* table_;   // [kDigits, kBase, 2, pairs]: cosines, sines
    const float* rounded_;  // the same in float32
};

// The angles of one difference of positions after another, in float32; quick where they come again.
class Turner {
public:
    static constexpr int kBlock = 8;  // differences whose angles are wanted at the same time

    static std::size_t floats(std::int64_t pairs) { return 2 * (kHeld + kBlock) * static_cast<std::size_t>(pairs); }

    Turner(const Rotary& rotary, float* memory);  // [floats(pairs)]

    // Angles of to - from, both [axes]: cosines [pairs], then sines [pairs]. Good until the next block, of kBlock at most.
    const float* of(const std::int32_t* from, const std::int32_t* to) {
        const std::int64_t by = std::int64_t{to[0]} - from[0];
        if (axes_ != 1) return of_axes({by, std::int64_t{to[1]} - from[1], std::int64_t{to[2]} - from[2]});
        const std::int64_t place = place_of(static_cast<std::uint64_t>(by));
        Held& held = held_[place];
        if (!held.block || by != held.by[0]) return hold({by}, place);
        held.block = block_;
        return angles_ + place * 2 * pairs_;
    }
    void next_block();

private:
    static constexpr int kHeld = 256;
    using By = std::array<std::int64_t, Rotary::kAxes>;

    struct Held {
        By by = {};
        std::int64_t block = 0;  // the last that used it
    };

    static std::int64_t place_of(std::uint64_t mixed) { return static_cast<std::int64_t>(mixed * 0x9E3779B97F4A7C15u >> 56); }
    const float* of_axes(const By& by);
    const float* hold(const By& by, std::int64_t place);
    void fill(const By& by, float* angles) const;

    const Rotary& rotary_;
    float* angles_;  // [kHeld, 2, pairs]
    float* more_;    // [kBlock, 2, pairs], for those whose place is in use
    Held held_[kHeld];
    std::int64_t block_ = 1;
    int used_ = 0;  // of more_
    int axes_;
    std::int64_t pairs_;
};

// Writes row [2 * pairs], turned back by the angles, to out in double.
void unrotate(const double* row, const double* cosine, const double* sine, std::int64_t pairs, double* out);

}  // namespace edgevlm
