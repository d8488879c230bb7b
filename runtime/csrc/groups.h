// Small whole numbers for keys as they come: patches, frames.
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

    Groups(Carver& memory, std::int64_t keys) : mask_(slots(keys) - 1) {  // room for `keys` different ones
        slot_ = memory.take<Slot>(mask_ + 1);
    }

    void clear() {
        std::fill_n(slot_, mask_ + 1, Slot{0, kNone});
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
        std::size_t at = (key * std::uint64_t{0x9E3779B97F4A7C15u}) >> 32 & mask_;
        while (slot_[at].id != kNone && slot_[at].key != key) at = (at + 1) & mask_;
        return at;
    }

    std::size_t mask_;
    Slot* slot_;
    std::int32_t count_ = 0;
};

inline std::uint32_t patch_key(std::int16_t row, std::int16_t col) {
    return static_cast<std::uint32_t>(static_cast<std::uint16_t>(row)) << 16 | static_cast<std::uint16_t>(col);
}

}  // namespace edgevlm
