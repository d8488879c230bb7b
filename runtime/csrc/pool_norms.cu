// InfiniPot-V's VaN pooling: the mean norm of the patches around a token, in its own frame.
#include "device.cuh"

namespace edgevlm {

struct PoolCall {
    Rows rows;                           // their norms
    const std::int32_t* frame;           // [H, n] of each layer
    const std::int16_t *row, *col;       // [H, n]
    const std::uint8_t* valid;           // [H, n]
    const std::int32_t* window;          // [layers]: 1, 3, 5 or 7
    float* out;                          // [H, n]
    std::int32_t *slots, *count;         // [layers, H, slot_count], zero at the start: a row of the patch, and how many it has
    std::int32_t slot_count;
};

struct FrameTable {
    const PoolCall& at;
    const LayerRows& layer;
    std::int64_t base, task;
    Slots slots;

    __device__ explicit FrameTable(const PoolCall& call)
        : at(call), layer(call.rows.layers[blockIdx.z]), base(layer.first + std::int64_t{blockIdx.y} * layer.rows),
          task(std::int64_t{blockIdx.z} * call.rows.heads + blockIdx.y),
          slots{call.slots + task * call.slot_count, static_cast<std::uint32_t>(call.slot_count)} {}

    __device__ static std::uint64_t key(std::int32_t frame, int row, int col) {
        return std::uint64_t{static_cast<std::uint32_t>(frame)} << 32 | std::uint64_t{static_cast<std::uint16_t>(row)} << 16 |
               static_cast<std::uint16_t>(col);
    }
    __device__ std::uint64_t key(std::int64_t i) const { return key(at.frame[base + i], at.row[base + i], at.col[base + i]); }
    __device__ auto same(std::uint64_t own) const {
        return [this, own](std::int32_t other) { return key(other) == own; };
    }
    __device__ float norm(std::int64_t i) const { return layer.norm[blockIdx.y * layer.norm_stride + i]; }
};

// A sum that keeps what float32 rounds off.
struct Exact {
    float sum = 0, rest = 0;

    __device__ void add(float x) {
        const float next = sum + x, back = next - sum;
        rest += (sum - (next - back)) + (x - back);
        sum = next;
    }
};

// A thread a valid row: who is where.
__device__ inline void place_patches(const PoolCall& at) {
    const FrameTable table(at);
    const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= table.layer.rows || !at.valid[table.base + i]) return;
    const std::uint64_t own = table.key(i);
    const std::uint32_t slot = table.slots.claim(own, static_cast<std::int32_t>(i), table.same(own));
    atomicAdd(at.count + table.task * at.slot_count + slot, 1);
}

EDGEVLM_KERNEL(place_patches, PoolCall, place_patches(at))

// A thread a row. Where two rows have one patch, which is rare, it is looked for among all rows, in their order.
__device__ inline void pool_norms(const PoolCall& at) {
    const FrameTable table(at);
    const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= table.layer.rows) return;
    float* const out = at.out + table.base + i;
    *out = 0;
    if (!at.valid[table.base + i]) return;
    const int reach = at.window[blockIdx.z] / 2;
    const std::int32_t frame = at.frame[table.base + i];
    const int row = at.row[table.base + i], col = at.col[table.base + i];
    Exact norms;
    std::int32_t present = 0;
    for (int down = row - reach; down <= row + reach; ++down) {
        for (int across = col - reach; across <= col + reach; ++across) {
            if (down != static_cast<std::int16_t>(down) || across != static_cast<std::int16_t>(across)) continue;
            const std::uint64_t key = FrameTable::key(frame, down, across);
            const std::int64_t slot = table.slots.find(key, table.same(key));
            if (slot < 0) continue;
            const std::int32_t there = at.count[table.task * at.slot_count + slot];
            present += there;
            if (there == 1) norms.add(table.norm(table.slots.row[slot] - 1));
            for (std::int32_t other = 0; there > 1 && other < table.layer.rows; ++other) {
                if (at.valid[table.base + other] && table.key(other) == key) norms.add(table.norm(other));
            }
        }
    }
    *out = static_cast<float>((static_cast<double>(norms.sum) + norms.rest) / present);
}

EDGEVLM_KERNEL(pool_norms, PoolCall, pool_norms(at))

}  // namespace edgevlm
