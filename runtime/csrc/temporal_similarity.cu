// InfiniPot-V, eq. 4 (TaR), before the negation: how alike a past token is to the recent ones of its own patch.
//
// The mean of a key's cosines with the recent keys of its patch is its unit vector times the mean of theirs, all turned to where
// the patch's latest stands: each key is read once. Means are summed in integers of 2^-40, so that they are the same bits in
// whatever order the rows come.
#include "unit.cuh"

namespace edgevlm {

struct SimilarityCall {
    Rows rows;
    Turns how;
    const std::int32_t* position;  // [H, n, axes] of each layer
    const std::int16_t *row, *col;  // [H, n]
    const std::uint8_t *recent, *valid;  // [H, n]
    float* out;                    // [H, n]
    // Of each layer and head, zero at the start:
    std::int32_t *slots, *patch, *count;  // [slot_count]: a recent row of the patch, its number, its recent rows
    std::uint64_t* latest;         // [slot_count]: of those the one of the highest position, then the lowest row
    std::int32_t* patches;         // [1]
    std::int64_t* sum;             // [most_patches, D], in 2^-40
    float* mean;                   // [most_patches, D]
    std::int32_t slot_count, most_patches;
};

constexpr float kWhole = 0x1p40f;

// One layer's and head's part of a call.
struct PatchTable {
    const SimilarityCall& at;
    const LayerRows& layer;
    std::int64_t base, task;
    Slots slots;

    __device__ explicit PatchTable(const SimilarityCall& call)
        : at(call), layer(call.rows.layers[blockIdx.z]), base(layer.first + std::int64_t{blockIdx.y} * layer.rows),
          task(std::int64_t{blockIdx.z} * call.rows.heads + blockIdx.y),
          slots{call.slots + task * call.slot_count, static_cast<std::uint32_t>(call.slot_count)} {}

    __device__ std::uint64_t key(std::int64_t i) const {
        return std::uint64_t{static_cast<std::uint16_t>(at.row[base + i])} << 16 | static_cast<std::uint16_t>(at.col[base + i]);
    }
    __device__ auto same(std::int64_t i) const {
        const std::uint64_t own = key(i);
        return [this, own](std::int32_t other) { return key(other) == own; };
    }
    __device__ bool is_recent(std::int64_t i) const { return at.valid[base + i] && at.recent[base + i]; }
    __device__ bool is_past(std::int64_t i) const { return at.valid[base + i] && !at.recent[base + i]; }
    __device__ std::int64_t slot_of(std::int64_t i) const { return slots.find(key(i), same(i)); }
    __device__ std::int64_t mean_of(std::int64_t slot) const {
        return (task * at.most_patches + at.patch[task * at.slot_count + slot]) * 2 * at.rows.pairs;
    }
    __device__ const std::int32_t* position(std::int64_t i) const { return at.position + (base + i) * at.how.axes; }
    __device__ const std::int32_t* latest(std::int64_t slot) const {
        return position(kAll - static_cast<std::uint32_t>(at.latest[task * at.slot_count + slot]));
    }
    template <typename T>
    __device__ const T* key_row(std::int64_t i) const {
        return static_cast<const T*>(layer.key) + (blockIdx.y * layer.capacity + i) * 2 * at.rows.pairs;
    }
};

// A thread a recent row: its patch, how many there are of it, and the latest.
__device__ inline void find_patches(const SimilarityCall& at) {
    const PatchTable table(at);
    const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= table.layer.rows || !table.is_recent(i)) return;
    const std::uint32_t slot = table.slots.claim(table.key(i), static_cast<std::int32_t>(i), table.same(i));
    const std::int64_t own = table.task * at.slot_count + slot;
    if (atomicAdd(at.count + own, 1) == 0) at.patch[own] = atomicAdd(at.patches + table.task, 1);
    const std::uint64_t place = std::uint64_t{static_cast<std::uint32_t>(table.position(i)[0])} << 32 | (kAll - static_cast<std::uint32_t>(i));
    atomicMax(reinterpret_cast<unsigned long long*>(at.latest + own), static_cast<unsigned long long>(place));
}

EDGEVLM_KERNEL(find_patches, SimilarityCall, find_patches(at))

// A group a recent row: its unit vector, turned to where the patch's latest stands, is added to the patch's sum.
template <typename T, bool kWide>
__device__ void add_recent(const SimilarityCall& at) {
    const Group group(at.rows.lanes);
    const PatchTable table(at);
    const std::int64_t i = std::int64_t{blockIdx.x} * group.count + group.index;
    const bool live = i < table.layer.rows && table.is_recent(i);
    const T* const row = table.key_row<T>(i);
    const Inverse inverse = inverse_length<T, kWide>(row, live, at.rows.pairs, group);
    if (!live) return;
    const std::int64_t slot = table.slot_of(i);
    auto* const sum = reinterpret_cast<unsigned long long*>(at.sum + table.mean_of(slot));
    const std::int32_t *const here = table.position(i), *const there = table.latest(slot);
    each_pair<T, kWide>(row, at.rows.pairs, group, [&](const auto& first, const auto& second, int d) {
        for (int j = 0; j < kEach<T, kWide>; ++j) {
            float u = inverse.of(first[j]), v = inverse.of(second[j]);
            if (at.how.on) turn_back(at.how, here, there, d + j, u, v);
            atomicAdd(sum + d + j, static_cast<unsigned long long>(__float2ll_rn(u * kWhole)));
            atomicAdd(sum + at.rows.pairs + d + j, static_cast<unsigned long long>(__float2ll_rn(v * kWhole)));
        }
    });
}

EDGEVLM_ROW_KERNEL(add_recent, SimilarityCall, add_recent)

// A block a slot, strided: sums become means.
__device__ inline void finish_means(const SimilarityCall& at) {
    const PatchTable table(at);
    for (std::int64_t slot = blockIdx.x; slot < at.slot_count; slot += gridDim.x) {
        const std::int32_t count = at.count[table.task * at.slot_count + slot];
        if (count == 0) continue;
        const std::int64_t first = table.mean_of(slot);
        for (int d = threadIdx.x; d < 2 * at.rows.pairs; d += kThreads)
            at.mean[first + d] = static_cast<float>(at.sum[first + d]) / kWhole / static_cast<float>(count);
    }
}

EDGEVLM_KERNEL(finish_means, SimilarityCall, finish_means(at))

// A group a row: past keys meet the mean of their patch; what has none, and all others, get their number here as well.
template <typename T, bool kWide>
__device__ void temporal_similarity(const SimilarityCall& at) {
    const Group group(at.rows.lanes);
    const PatchTable table(at);
    const std::int64_t i = std::int64_t{blockIdx.x} * group.count + group.index;
    const bool there = i < table.layer.rows, past = there && table.is_past(i);
    const std::int64_t slot = past ? table.slot_of(i) : -1;
    const bool live = slot >= 0;
    const T* const row = table.key_row<T>(i);
    const float* const mean = live ? at.mean + table.mean_of(slot) : nullptr;
    const std::int32_t *const to = live ? table.latest(slot) : nullptr, *const from = live ? table.position(i) : nullptr;
    float dot = 0, square = 0;
    const auto meet = [&](auto& total, auto& length) {
        using X = std::remove_reference_t<decltype(total)>;
        each_pair<T, kWide>(row, at.rows.pairs, group, [&](const auto& first, const auto& second, int d) {
            for (int j = 0; j < kEach<T, kWide>; ++j) {
                const float u = first[j], v = second[j], m = mean[d + j], n = mean[at.rows.pairs + d + j];
                length += X{u} * u + X{v} * v;
                if (at.how.on) {
                    const int axis = at.how.axes == 1 ? 0 : at.how.axis[d + j];
                    float cosine, sine;
                    angle_of(std::int64_t{from[axis]} - to[axis], at.how.turns[d + j], cosine, sine);
                    total += cosine * (X{u} * m + X{v} * n) + sine * (X{v} * m - X{u} * n);
                } else {
                    total += X{u} * m + X{v} * n;
                }
            }
        });
    };
    if (live) meet(dot, square);
    dot = group.sum(dot);
    square = group.sum(square);
    float cosine = dot * rsqrtf(square);
    if (__any_sync(kAll, live && !trusted(square))) {
        double exact = 0, length = 0;
        if (live) meet(exact, length);
        exact = group.sum(exact);
        length = group.sum(length);
        if (!trusted(square)) cosine = length == 0 ? 0 : static_cast<float>(exact / sqrt(length));
    }
    if (there && group.lane == 0) at.out[table.base + i] = live ? cosine : past ? -1.0f : 0.0f;
}

EDGEVLM_ROW_KERNEL(temporal_similarity, SimilarityCall, temporal_similarity)

}  // namespace edgevlm
