// Mosaic's online assignment (eqs. 3 to 5): keys of one KV head join the nearest cluster of their partition, one after another.

#include <pybind11/numpy.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "arrays.h"
#include "errors.h"
#include "kernels_api.h"

namespace py = pybind11;
using namespace py::literals;

namespace edgevlm {

namespace {

enum Event : int { kDone = 0, kFull = 1, kOver = 2 };

constexpr std::int64_t kMost = std::int64_t{1} << 53;  // rows of a cluster, each of which a double tells apart
constexpr std::int32_t kFree = -1;  // the partition of a slot that holds no cluster

// Sums are double, whatever the size of the numbers, in four chains so that they need not wait for one another.
double dot(const float* a, const float* b, std::int64_t width) {
    double sum[4] = {};
    std::int64_t d = 0;
    for (; d + 4 <= width; d += 4)
        for (int i = 0; i < 4; ++i) sum[i] += double{a[d + i]} * b[d + i];
    for (; d < width; ++d) sum[0] += double{a[d]} * b[d];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

double cosine(const float* a, const float* b, std::int64_t width) {  // 0 with a zero vector
    const double lengths = std::sqrt(dot(a, a, width)) * std::sqrt(dot(b, b, width));
    return lengths > 0 ? dot(a, b, width) / lengths : 0;
}

struct Clusters {  // of one head: K slots
    float* key;             // [K, width], means
    double* variance;       // [K]
    std::int64_t* size;     // [K]
    std::int32_t* partition;  // [K]
    std::int64_t slots, width;
};

struct Threshold {  // eq. 5
    double small, large, rate;
    std::int64_t least;  // a cluster of fewer is never over it

    bool over(double variance, std::int64_t size) const {
        return size >= least && variance > large - (large - small) * std::exp(-static_cast<double>(size) / rate);
    }
};

std::int64_t nearest(const Clusters& clusters, const float* key, std::int32_t partition) {
    std::int64_t best = -1;
    double highest = 0;
    for (std::int64_t slot = 0; slot < clusters.slots; ++slot) {
        if (clusters.partition[slot] != partition) continue;
        const double alike = cosine(clusters.key + slot * clusters.width, key, clusters.width);
        if (best < 0 || alike > highest) highest = alike, best = slot;
    }
    return best;
}

std::int64_t first_free(const Clusters& clusters) {
    for (std::int64_t slot = 0; slot < clusters.slots; ++slot)
        if (clusters.partition[slot] == kFree) return slot;
    return -1;
}

// Eqs. 3 and 4, in this order: the variance is about the mean that the newcomer has moved. False, and nothing changed, when
// that would take the cluster over its threshold.
bool join(const Clusters& clusters, std::int64_t slot, const float* key, const Threshold& threshold, float* moved) {
    const std::int64_t width = clusters.width, size = clusters.size[slot] + 1;
    float* const mean = clusters.key + slot * width;
    for (std::int64_t d = 0; d < width; ++d)
        moved[d] = static_cast<float>(mean[d] + (double{key[d]} - mean[d]) / static_cast<double>(size));
    const double apart = 1 - cosine(key, moved, width);
    const double variance = clusters.variance[slot] + (apart - clusters.variance[slot]) / static_cast<double>(size);
    if (threshold.over(variance, size)) return false;
    std::copy(moved, moved + width, mean);
    clusters.variance[slot] = variance;
    clusters.size[slot] = size;
    return true;
}

void found(const Clusters& clusters, std::int64_t slot, const float* key, std::int32_t partition) {
    std::copy(key, key + clusters.width, clusters.key + slot * clusters.width);
    clusters.variance[slot] = 0;
    clusters.size[slot] = 1;
    clusters.partition[slot] = partition;
}

py::typing::Tuple<py::int_, py::int_, py::int_> call_assign(Floats key, Ints partition, std::int64_t start, Floats means, Doubles variance, Longs size,
                      Ints partitions, double small, double large, double rate, std::int64_t least, Ints slots) {
    Call call;
    const auto rows = call.dense<float>(key, "key", {any, any});
    const std::int64_t count = rows.shape(0), width = rows.shape(1);
    const auto of_row = call.dense<std::int32_t>(partition, "partition", {count});
    py::array table = call.array<float>(means, "means", {any, width}, true);
    const std::int64_t capacity = table.shape(0);
    const Clusters clusters{static_cast<float*>(table.mutable_data()),
                            call.in_place<double>(variance, "variance", {capacity}),
                            call.in_place<std::int64_t>(size, "size", {capacity}),
                            call.in_place<std::int32_t>(partitions, "partitions", {capacity}), capacity, width};
    std::int32_t* const out = call.in_place<std::int32_t>(slots, "slots", {count});
    const Threshold threshold{small, large, rate, least};
    if (start < 0 || start > count) refuse("start must be 0 to ", count, ", not ", start);
    for (std::int64_t row = start; row < count; ++row) {
        if (of_row.data()[row] < 0) refuse("partition must be 0 or more, not ", of_row.data()[row]);
    }
    for (std::int64_t slot = 0; slot < capacity; ++slot) {
        if (clusters.size[slot] < 0 || clusters.size[slot] > kMost) refuse("a cluster cannot have ", clusters.size[slot], " rows");
    }
    std::vector<float> moved(static_cast<std::size_t>(width));
    for (std::int64_t row = start; row < count; ++row) {
        const float* const at = rows.data() + row * width;
        const std::int32_t where = of_row.data()[row];
        std::int64_t slot = nearest(clusters, at, where);
        if (slot < 0) {
            if ((slot = first_free(clusters)) < 0) return py::make_tuple(row, int{kFull}, -1);
            found(clusters, slot, at, where);
        } else if (!join(clusters, slot, at, threshold, moved.data())) {
            return py::make_tuple(row, int{kOver}, slot);
        }
        out[row] = static_cast<std::int32_t>(slot);
    }
    return py::make_tuple(count, int{kDone}, -1);
}

}  // namespace

void bind_mosaic(py::module_& module) {
    module.def("mosaic_assign", &call_assign, "key"_a, "partition"_a, "start"_a, "means"_a, "variance"_a, "size"_a, "partitions"_a,
               "small"_a, "large"_a, "rate"_a, "least"_a, "slots"_a,
               "Assign keys from `start` on to clusters until no slot is free or a cluster must split. Return (row, event, slot).");
}

}  // namespace edgevlm
