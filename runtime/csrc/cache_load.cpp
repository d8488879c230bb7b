// Rows that come back from a snapshot.
#include <algorithm>
#include <cstring>

#include "cache.h"
#include "errors.h"
#include "norms.h"

namespace edgevlm {

void Cache::load(std::int64_t index, const StoredRows& rows) {
    require_settled("load");
    const Layer& target = layer(index);
    if (rows.count > target.capacity)
        refuse<Full>("layer ", index, " has room for ", target.capacity, " rows and cannot hold ", rows.count);
    for (std::int64_t i = 0; i < heads_ * rows.count * axes_; ++i) {
        if (rows.position[i] < 0) refuse("positions must not be negative: found ", rows.position[i]);
    }
    Layer& layer = parts_.layer[index];
    for (std::int64_t head = 0; head < heads_; ++head) {
        const std::int64_t to = head * layer.capacity, from = head * rows.count;
        std::memcpy(layer.key + to * row_bytes_, rows.key + from * row_bytes_, rows.count * row_bytes_);
        std::memcpy(layer.value + to * row_bytes_, rows.value + from * row_bytes_, rows.count * row_bytes_);
        std::copy_n(rows.kind + from, rows.count, layer.kind + to);
        std::copy_n(rows.seq + from, rows.count, layer.seq + to);
        std::copy_n(rows.frame + from, rows.count, layer.frame + to);
        std::copy_n(rows.row + from, rows.count, layer.row + to);
        std::copy_n(rows.col + from, rows.count, layer.col + to);
        std::copy_n(rows.position + from * axes_, rows.count * axes_, layer.position + to * axes_);
        std::copy_n(rows.confirmed + from, rows.count, layer.confirmed + to);
        std::fill_n(layer.norm + to, rows.count, kUnknownNorm);
        if (rows.count < layer.length) clear_rows(layer, head, rows.count, layer.length);
    }
    layer.length = rows.count;
    restructured();
}

}  // namespace edgevlm
