// newer_similarity as Python sees it: a layer of a cache, its heads shared out over the threads.

#include <pybind11/numpy.h>

#include <type_traits>

#include "arrays.h"
#include "cache.h"
#include "cache_rows.h"
#include "errors.h"
#include "kernels_api.h"
#include "newer_similarity.h"
#include "threads.h"

namespace py = pybind11;
using namespace py::literals;

namespace edgevlm {

namespace {

template <typename T>
py::array_t<float> newer_similarity_of(Cache& cache, std::int64_t number, py::handle valid, std::int64_t since,
                                      const Rotary* rotary) {
    Call call;
    call.reads(cache);
    const LayerRows<T> layer = rows_of<T>(cache, cache.layer(number));
    const std::int64_t heads = layer.key.heads, rows = layer.key.rows;
    const Mask is_valid = call.mask(valid, "valid", heads, rows);
    const DatedKeys<T> tokens{layer.key, layer.position, layer.seq, is_valid, since};
    py::array_t<float> out({heads, rows});
    float* const first = out.mutable_data();
    {
        const py::gil_scoped_release unlocked;
        const Lease memory(&cache.scratch(), newer_similarity_scratch(rows, layer.key.width), heads);
        parallel_for(heads, memory.workers(), [&](std::int64_t head, int worker) {
            newer_similarity(tokens, head, rotary, first + head * rows, memory.of(worker));
        });
    }
    return out;
}

py::array_t<float> call_newer_similarity(Cache& cache, std::int64_t layer, Bools valid, std::int64_t since, bool rotated) {
    if (layer < 0 || layer >= cache.layers()) refuse("there is no layer ", layer, " in a cache of ", cache.layers(), " layers");
    const Rotary* const rotary = rotary_of(cache, rotated, layer);
    return by_dtype(cache.dtype(), [&](auto* type) {
        return newer_similarity_of<std::remove_pointer_t<decltype(type)>>(cache, layer, valid, since, rotary);
    });
}

}  // namespace

void bind_newer_similarity(py::module_& module) {
    module.def("newer_similarity", &call_newer_similarity, "cache"_a, "layer"_a, "valid"_a, "since"_a = 0, py::kw_only(),
               "rotated"_a = false,
               R"(Return each token's similarity to the most similar newer token of its layer and head, float32 [H, n_l].

The similarity is the highest cosine between the token's key and the key of a newer token whose seq is at least `since`; -1 if
there is none. A zero key has cosine 0 with all keys. valid: the rows to compare, bool [H, n_l]; other rows get 0.
rotated: whether to compare keys as stored instead of un-rotated. Takes O(n m D) time for m tokens from `since` on. Raises
CacheError if the layer does not exist, or if the cache has 3 position axes but no sections, which un-rotating needs.)");
}

}  // namespace edgevlm
