#include "hash_clusters.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "simd.h"

namespace edgevlm {

namespace {

constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();
constexpr int kCountAt = 24, kDistanceAt = 56;  // of a rank: bits of the slot, of the count, of the distance

}  // namespace

std::uint32_t hash_bits(const float* key, const float* planes, std::int64_t width) {
    double dot[kPlanes] = {};
    for (std::int64_t d = 0; d < width; ++d) {
        const double x = key[d];
        for (std::int64_t p = 0; p < kPlanes; ++p) dot[p] += x * planes[d * kPlanes + p];
    }
    std::uint32_t bits = 0;
    for (std::int64_t p = 0; p < kPlanes; ++p) bits |= static_cast<std::uint32_t>(dot[p] > 0) << p;
    return bits;
}

namespace {

struct Memory {
    std::uint64_t* near;
    std::uint32_t *distance, *open_bits;
    std::int32_t *open_slot, *gone;
    double *key, *place;

    Memory(const ClusterTable& table, BumpAllocator& memory) {
        near = memory.take<std::uint64_t>(table.slots);
        for (std::uint32_t** part : {&distance, &open_bits}) *part = memory.take<std::uint32_t>(table.slots);
        for (std::int32_t** part : {&open_slot, &gone}) *part = memory.take<std::int32_t>(table.slots);
        key = memory.take<double>(table.slots * table.width);
        place = memory.take<double>(table.slots * table.axes);
    }
};

}  // namespace

std::size_t cluster_scratch(const ClusterTable& table) {
    BumpAllocator sizes;
    Memory(table, sizes);
    return sizes.bytes();
}

Clusters::Clusters(const ClusterTable& table, const float* planes, std::int32_t* home, BumpAllocator memory)
    : table_(table), planes_(planes), home_(home) {
    const Memory parts(table, memory);
    near_ = parts.near, distance_ = parts.distance, open_bits_ = parts.open_bits, open_slot_ = parts.open_slot;
    gone_ = parts.gone, key_ = parts.key, place_ = parts.place;
    for (std::int64_t s = 0; s < table.slots; ++s) {
        home_[s] = sealed(s) ? static_cast<std::int32_t>(s) : -1;
        home_[table.slots + s] = -1;
        if (table.count[s] == 0) continue;
        ++used_;
        if (sealed(s)) continue;
        open_slot_[open_] = static_cast<std::int32_t>(s);
        open_bits_[open_++] = table.bits[s];
    }
}

std::int32_t Clusters::join(const float* key, const float* place, std::int64_t distance) {
    const std::uint32_t bits = hash_bits(key, planes_, table_.width);
    const std::uint32_t least = simd().hamming(open_bits_, open_, bits, distance_);
    const bool near = open_ > 0 && distance >= 0 && least <= static_cast<std::uint64_t>(distance), full = open_ >= table_.slots / 2;
    std::int64_t at;  // among the open ones
    if (near || full) {
        at = std::find(distance_, distance_ + open_, least) - distance_;
        counted.forced += !near;
    } else {
        const std::int64_t slot = free_slot();
        at = std::lower_bound(open_slot_, open_slot_ + open_, static_cast<std::int32_t>(slot)) - open_slot_;
        std::copy_backward(open_slot_ + at, open_slot_ + open_, open_slot_ + open_ + 1);
        std::copy_backward(open_bits_ + at, open_bits_ + open_, open_bits_ + open_ + 1);
        open_slot_[at] = static_cast<std::int32_t>(slot);
        ++open_;
        found(slot, true);
    }
    const std::int32_t slot = open_slot_[at];
    const double weight = 1.0 / ++table_.count[slot];
    float *const mean = table_.key + slot * table_.width, *const there = table_.place + slot * table_.axes;
    for (std::int64_t d = 0; d < table_.width; ++d)
        mean[d] = static_cast<float>(mean[d] + (static_cast<double>(key[d]) - mean[d]) * weight);
    for (std::int64_t a = 0; a < table_.axes; ++a)
        there[a] = static_cast<float>(there[a] + (static_cast<double>(place[a]) - there[a]) * weight);
    open_bits_[at] = table_.bits[slot] = hash_bits(mean, planes_, table_.width);
    if (used_ == table_.slots) merge_nearest();
    return slot;
}

void Clusters::seal(const float* keys, const float* places, const std::int32_t* slot, const std::uint8_t* leaving,
                    std::int64_t rows) {
    const std::int64_t slots = table_.slots;
    std::fill_n(gone_, slots, 0);
    for (std::int64_t i = 0; i < rows; ++i) {
        if (leaving[i] && slot[i] >= 0) ++gone_[slot[i]];
    }
    add_up(keys, places, slot, leaving, 1, rows);
    for (std::int64_t s = 0; s < slots; ++s) {
        if (!gone_[s]) continue;
        table_.count[s] -= gone_[s];
        if (table_.count[s] == 0) --used_, --open_;
    }
    for (std::int64_t s = 0; s < slots; ++s) {
        if (!gone_[s]) continue;
        const std::int64_t to = free_slot();
        found(to, false);
        set_mean(to, key_ + s * table_.width, place_ + s * table_.axes, gone_[s]);
        home_[slots + s] = static_cast<std::int32_t>(to);
        if (known_) meet(to);
        if (used_ == slots) merge_nearest();
    }
    add_up(keys, places, slot, leaving, 0, rows);  // what stays: means anew, so that no rounding adds up over months
    for (std::int64_t s = 0; s < slots; ++s) {
        if (gone_[s] && table_.count[s] > 0 && table_.open[s])
            set_mean(s, key_ + s * table_.width, place_ + s * table_.axes, table_.count[s]);
    }
}

std::int64_t Clusters::free_slot() const { return std::find(table_.count, table_.count + table_.slots, 0) - table_.count; }

void Clusters::found(std::int64_t slot, bool open) {
    table_.open[slot] = open;
    std::fill_n(table_.key + slot * table_.width, table_.width, 0.0f);
    std::fill_n(table_.place + slot * table_.axes, table_.axes, 0.0f);
    ++used_;
}

// key [width], place [axes]: sums of `count` tokens.
void Clusters::set_mean(std::int64_t slot, const double* key, const double* place, std::int64_t count) {
    table_.count[slot] = static_cast<std::int32_t>(count);
    for (std::int64_t d = 0; d < table_.width; ++d)
        table_.key[slot * table_.width + d] = static_cast<float>(key[d] / static_cast<double>(count));
    for (std::int64_t a = 0; a < table_.axes; ++a)
        table_.place[slot * table_.axes + a] = static_cast<float>(place[a] / static_cast<double>(count));
    table_.bits[slot] = hash_bits(table_.key + slot * table_.width, planes_, table_.width);
}

// key_, place_: the sums of each cluster's tokens that are leaving (wanted 1) or not (0), of clusters that lose some.
void Clusters::add_up(const float* keys, const float* places, const std::int32_t* slot, const std::uint8_t* mask,
                      std::uint8_t wanted, std::int64_t rows) {
    for (std::int64_t s = 0; s < table_.slots; ++s) {
        if (!gone_[s]) continue;
        std::fill_n(key_ + s * table_.width, table_.width, 0.0);
        std::fill_n(place_ + s * table_.axes, table_.axes, 0.0);
    }
    for (std::int64_t i = 0; i < rows; ++i) {
        const std::int32_t s = slot[i];
        if (s < 0 || !gone_[s] || (mask[i] != 0) != (wanted != 0)) continue;
        for (std::int64_t d = 0; d < table_.width; ++d) key_[s * table_.width + d] += keys[i * table_.width + d];
        for (std::int64_t a = 0; a < table_.axes; ++a) place_[s * table_.axes + a] += places[i * table_.axes + a];
    }
}

void Clusters::merge_nearest() {
    if (!known_) {
        for (std::int64_t s = 0; s < table_.slots; ++s) {
            if (sealed(s)) near_[s] = nearest(s);
        }
        known_ = true;
    }
    using Pair = std::tuple<std::uint64_t, std::int64_t, std::int64_t, std::int64_t>;  // distance, tokens, lower, higher slot
    Pair best{kNone, 0, 0, 0};
    for (std::int64_t s = 0; s < table_.slots; ++s) {
        if (!sealed(s) || near_[s] == kNone) continue;
        const auto other = static_cast<std::int64_t>(near_[s] & ((1u << kCountAt) - 1));
        const std::int64_t tokens = std::int64_t{table_.count[s]} + table_.count[other];
        best = std::min(best, Pair{near_[s] >> kDistanceAt, tokens, std::min(s, other), std::max(s, other)});
    }
    merge(std::get<2>(best), std::get<3>(best));
}

std::uint64_t Clusters::ranked(std::uint32_t distance, std::int64_t slot) const {
    return std::uint64_t{distance} << kDistanceAt | static_cast<std::uint64_t>(table_.count[slot]) << kCountAt |
           static_cast<std::uint64_t>(slot);
}

std::uint64_t Clusters::nearest(std::int64_t slot) {
    simd().hamming(table_.bits, table_.slots, table_.bits[slot], distance_);
    std::uint64_t best = kNone;
    for (std::int64_t s = 0; s < table_.slots; ++s) {
        if (s != slot && sealed(s)) best = std::min(best, ranked(distance_[s], s));
    }
    return best;
}

void Clusters::merge(std::int64_t into, std::int64_t from) {
    const double all = static_cast<double>(table_.count[into]) + table_.count[from], weight = table_.count[from] / all;
    float *const a = table_.key + into * table_.width, *const b = table_.key + from * table_.width;
    for (std::int64_t d = 0; d < table_.width; ++d) a[d] = static_cast<float>(a[d] + (static_cast<double>(b[d]) - a[d]) * weight);
    float *const here = table_.place + into * table_.axes, *const there = table_.place + from * table_.axes;
    for (std::int64_t x = 0; x < table_.axes; ++x)
        here[x] = static_cast<float>(here[x] + (static_cast<double>(there[x]) - here[x]) * weight);
    table_.count[into] += table_.count[from];
    table_.count[from] = 0;
    table_.bits[into] = hash_bits(a, planes_, table_.width);
    std::replace(home_, home_ + 2 * table_.slots, static_cast<std::int32_t>(from), static_cast<std::int32_t>(into));
    --used_;
    ++counted.merged;
    for (std::int64_t s = 0; s < table_.slots; ++s) {  // whose nearest is not what it was
        const auto other = static_cast<std::int64_t>(near_[s] & ((1u << kCountAt) - 1));
        if (s != into && sealed(s) && (other == into || other == from)) near_[s] = nearest(s);
    }
    meet(into);
}

// A sealed cluster that is new, or another than it was: the nearest of it, and of those that it is nearest to.
void Clusters::meet(std::int64_t slot) {
    near_[slot] = nearest(slot);  // leaves the distances of all
    for (std::int64_t s = 0; s < table_.slots; ++s) {
        if (s != slot && sealed(s)) near_[s] = std::min(near_[s], ranked(distance_[s], slot));
    }
}

}  // namespace edgevlm
