// Small integers for keys as they come: patches, frames.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "arena.h"

namespace edgevlm {

class Groups {
public:
    static constexpr std::int32_t kNone = -1;

    static std::size_t slots(std::int64_t keys) {  // a power of two, at least twice as many
        std::size_t count = 2;
        while (count < 2 * static_cast<std::size_t>(keys)) count *= 2;
        return count;
    }

    Groups(BumpAllocator& memory, std::int64_t keys) : mask_(slots(keys) - 1) {  // room for `keys` different ones
        slot_ = memory.take<Slot>(mask_ + 1);
    }

    // For keys of [first, first + span): a table where that is short enough, else hashed.
    void clear(std::uint32_t first, std::uint64_t span) {
        first_ = first;
        direct_ = span <= mask_ + 1;
        std::fill_n(slot_, direct_ ? span : mask_ + 1, Slot{0, kNone});
        count_ = 0;
    }

    std::int32_t find(std::uint32_t key) const { return slot_[place(key)].id; }

    std::int32_t find_or_add(std::uint32_t key) {
        Slot& slot = slot_[place(key)];
        if (slot.id == kNone) slot = {key, count_++};
        return slot.id;
    }

    std::int32_t count() const { return count_; }

private:
    struct Slot {
        std::uint32_t key;
        std::int32_t id;
    };

    std::size_t place(std::uint32_t key) const {
        if (direct_) return key - first_;
        std::size_t at = (key * std::uint64_t{0x9E3779B97F4A7C15u}) >> 32 & mask_;
        while (slot_[at].id != kNone && slot_[at].key != key) at = (at + 1) & mask_;
        return at;
    }

    std::size_t mask_;
    Slot* slot_;
    std::uint32_t first_ = 0;
    bool direct_ = false;
    std::int32_t count_ = 0;
};

// The grid that holds every one of n patches.
struct Extent {
    std::int32_t row = 0, col = 0;  // its corner
    std::int64_t height = 0, width = 0;

    Extent(const std::int16_t* rows, const std::int16_t* cols, std::int64_t n) {
        if (n == 0) return;
        std::int16_t top = rows[0], bottom = top, left = cols[0], right = left;
        for (std::int64_t i = 0; i < n; ++i) {
            top = rows[i] < top ? rows[i] : top, bottom = rows[i] > bottom ? rows[i] : bottom;
            left = cols[i] < left ? cols[i] : left, right = cols[i] > right ? cols[i] : right;
        }
        row = top, col = left;
        height = bottom - top + 1, width = right - left + 1;
    }

    std::uint64_t cells() const { return static_cast<std::uint64_t>(height) * static_cast<std::uint64_t>(width); }

    std::uint32_t cell(std::int16_t r, std::int16_t c) const {
        return static_cast<std::uint32_t>(r - row) * static_cast<std::uint32_t>(width) + static_cast<std::uint32_t>(c - col);
    }
};

}  // namespace edgevlm
