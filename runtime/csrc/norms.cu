// InfiniPot-V's VaN: the L2 norm of each value. Reads each value once; rows whose norm is known are not read.
#include "unit.cuh"

namespace edgevlm {

struct NormsCall {
    Rows rows;
};

template <typename T, bool kWide>
__device__ void value_norms(const NormsCall& at) {
    const Group group(at.rows.lanes);
    const LayerRows& layer = at.rows.layers[blockIdx.z];
    const std::int64_t head = blockIdx.y, row = layer.known + std::int64_t{blockIdx.x} * group.count + group.index;
    const bool live = row < layer.rows;
    const T* const value = static_cast<const T*>(layer.value) + (head * layer.capacity + row) * 2 * at.rows.pairs;
    const float square = square_of<float, T, kWide>(value, live, at.rows.pairs, group);
    float norm = sqrtf(square);
    if (__any_sync(kAll, live && !trusted(square))) {
        const double exact = square_of<double, T, kWide>(value, live, at.rows.pairs, group);
        if (!trusted(square)) norm = static_cast<float>(sqrt(exact));
    }
    if (live && group.lane == 0) layer.norm[head * layer.norm_stride + row] = norm;
}

EDGEVLM_ROW_KERNEL(value_norms, NormsCall, value_norms)

}  // namespace edgevlm
