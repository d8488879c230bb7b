// ReSV's hash clusters (V-Rex, sec. IV-B): tokens of one KV head whose keys lie on the same side of most hyperplanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"

namespace edgevlm {

constexpr std::int64_t kPlanes = 32;  // one for each bit of a word; of fewer the last are zero, and so are their bits

// Of one KV head. A slot whose count is 0 is free. At rest at least one is.
struct ClusterTable {
    std::int64_t slots, width, axes;
    float* key;           // [slots, width], the mean of its tokens
    std::uint32_t* bits;  // [slots], of that mean
    std::int32_t* count;  // [slots], tokens
    std::uint8_t* open;   // [slots], 0 or not, while tokens join
    float* place;         // [slots, axes], the mean of its tokens' positions
};

struct Counted {
    std::int64_t merged = 0;  // clusters that joined another for want of slots
    std::int64_t forced = 0;  // tokens that joined one beyond the distance, for want of slots
};

// key [width] against planes [width, kPlanes]: bit p is set where the dot is above 0. Sums are double.
std::uint32_t hash_bits(const float* key, const float* planes, std::int64_t width);

std::size_t cluster_scratch(const ClusterTable& table);

// Changes a table, and knows where what was in it goes. At most half of the slots are open clusters'; when the last slot is
// taken, the two nearest sealed clusters merge: of the fewest bits that differ, then of the fewest tokens, then the lowest slots.
class Clusters {
public:
    // home [2 * slots]: see `home`. planes [width, kPlanes].
    Clusters(const ClusterTable& table, const float* planes, std::int32_t* home, BumpAllocator memory);

    // A token joins the nearest open cluster that differs in `distance` bits at most, of equally near ones that of the lowest
    // slot; else it founds one in the lowest free slot. Where half of the slots are open, it joins the nearest all the same.
    // Returns the slot.
    std::int32_t join(const float* key, const float* place, std::int64_t distance);

    // Tokens leave their open clusters: those of one cluster are sealed as a cluster of their own. keys [rows, width],
    // places [rows, axes]; slot [rows]: of each token's cluster, -1 of others; leaving [rows].
    void seal(const float* keys, const float* places, const std::int32_t* slot, const std::uint8_t* leaving, std::int64_t rows);

    Counted counted;

private:
    bool sealed(std::int64_t slot) const { return table_.count[slot] > 0 && !table_.open[slot]; }
    std::int64_t free_slot() const;
    void found(std::int64_t slot, bool open);
    void set_mean(std::int64_t slot, const double* key, const double* place, std::int64_t count);
    void add_up(const float* keys, const float* places, const std::int32_t* slot, const std::uint8_t* mask, std::uint8_t wanted,
                std::int64_t rows);
    void merge_nearest();
    std::uint64_t nearest(std::int64_t slot);
    std::uint64_t ranked(std::uint32_t distance, std::int64_t slot) const;
    void merge(std::int64_t into, std::int64_t from);
    void meet(std::int64_t slot);

    ClusterTable table_;
    const float* planes_;
    std::int32_t* home_;  // of what was sealed in slot s before, and of what was sealed from the open cluster in slot s: the slot
    std::int64_t used_ = 0, open_ = 0;
    bool known_ = false;  // whether near_ holds
    std::uint64_t* near_;           // [slots], of sealed ones: the nearest other, as `ranked` has it
    std::uint32_t *distance_, *open_bits_;  // [slots]
    std::int32_t *open_slot_, *gone_;       // [slots]: open ones, lowest first; tokens that leave each
    double *key_, *place_;          // [slots, width], [slots, axes]: sums
};

}  // namespace edgevlm
