// What Python sees. Arrays are checked here, down to dtype and shape, before anything below runs; long work releases the GIL.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "cache.h"
#include "errors.h"
#include "norms.h"
#include "select.h"
#include "similarity.h"

namespace py = pybind11;

namespace edgevlm {
namespace {

using Unlocked = py::gil_scoped_release;

// ---- the cache ----

Shape make_shape(std::vector<std::int64_t> capacities, std::int64_t kv_heads, std::int64_t head_dim, py::handle inv_freq,
                 std::int64_t axes, const std::string& dtype) {
    if (dtype != "fp32") refuse("dtype must be fp32 for now, not ", dtype);
    const auto frequencies = dense<double>(inv_freq, "inv_freq", {-1});
    const double* first = frequencies.data();
    return {kv_heads, head_dim, axes, std::move(capacities), {first, first + frequencies.size()}, DType::fp32};
}

// Part of a layer's memory as a read-only array that keeps the cache alive.
template <typename T>
py::array view(const py::object& self, std::int64_t index, T* (*start)(const Layer&), std::int64_t width, bool has_width) {
    const auto& cache = self.cast<const Cache&>();
    const Layer& layer = cache.layer(index);
    std::vector<py::ssize_t> shape{cache.kv_heads(), layer.length}, strides;
    const auto item = static_cast<py::ssize_t>(sizeof(T));
    strides = {item * width * layer.capacity, item * width};
    if (has_width) {
        shape.push_back(width);
        strides.push_back(item);
    }
    py::array array(py::dtype::of<T>(), shape, strides, start(layer), self);
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return array;
}

struct PyRows {
    py::array_t<std::uint8_t> kind;
    py::array_t<std::int64_t> seq;
    py::array_t<std::int32_t> frame;
    py::array_t<std::int16_t> row, col;
    py::array_t<std::int32_t> position;

    PyRows(const Cache& cache, py::handle kind_, py::handle seq_, py::handle frame_, py::handle row_, py::handle col_,
           py::handle position_)
        : kind(dense<std::uint8_t>(kind_, "kind", {-1})),
          seq(dense<std::int64_t>(seq_, "seq", {kind.size()})),
          frame(dense<std::int32_t>(frame_, "frame", {kind.size()})),
          row(dense<std::int16_t>(row_, "row", {kind.size()})),
          col(dense<std::int16_t>(col_, "col", {kind.size()})),
          position(dense<std::int32_t>(position_, "position", {kind.size(), cache.axes()})) {}

    Rows rows() const {
        return {kind.size(), kind.data(), seq.data(), frame.data(), row.data(), col.data(), position.data()};
    }
};

template <typename Field>
py::array_t<std::int32_t> per_layer(const Cache& cache, Field field) {
    py::array_t<std::int32_t> out(cache.layers());
    for (std::int64_t l = 0; l < cache.layers(); ++l) out.mutable_at(l) = static_cast<std::int32_t>(field(cache.layer(l)));
    return out;
}

void bind_cache(py::module_& module) {
    py::class_<Mark>(module, "Mark");

    py::class_<Cache> cache(module, "Cache");
    cache.def(py::init([](std::vector<std::int64_t> capacities, std::int64_t kv_heads, std::int64_t head_dim,
                          const py::object& inv_freq, std::int64_t axes, const std::string& dtype) {
        return std::make_unique<Cache>(make_shape(std::move(capacities), kv_heads, head_dim, inv_freq, axes, dtype));
    }));
    cache.def_static("bytes_for", [](std::vector<std::int64_t> capacities, std::int64_t kv_heads, std::int64_t head_dim,
                                     const py::object& inv_freq, std::int64_t axes, const std::string& dtype) {
        return Cache::bytes_for(make_shape(std::move(capacities), kv_heads, head_dim, inv_freq, axes, dtype));
    });
    cache.def_property_readonly("nbytes", &Cache::nbytes);
    cache.def_property_readonly("allocations", &Cache::allocations);
    cache.def_property_readonly("rows_moved", &Cache::rows_moved);
    cache.def_property_readonly("lengths",
                                [](const Cache& self) { return per_layer(self, [](const Layer& l) { return l.length; }); });
    cache.def_property_readonly("capacities",
                                [](const Cache& self) { return per_layer(self, [](const Layer& l) { return l.capacity; }); });

    cache.def("key_address",
              [](const Cache& self, std::int64_t l) { return reinterpret_cast<std::uintptr_t>(self.layer(l).key); });
    cache.def("value_address",
              [](const Cache& self, std::int64_t l) { return reinterpret_cast<std::uintptr_t>(self.layer(l).value); });
    cache.def("key", [](const py::object& self, std::int64_t l) {
        const std::int64_t width = self.cast<const Cache&>().head_dim();
        return view<float>(self, l, [](const Layer& layer) { return reinterpret_cast<float*>(layer.key); }, width, true);
    });
    cache.def("value", [](const py::object& self, std::int64_t l) {
        const std::int64_t width = self.cast<const Cache&>().head_dim();
        return view<float>(self, l, [](const Layer& layer) { return reinterpret_cast<float*>(layer.value); }, width, true);
    });
    cache.def("position", [](const py::object& self, std::int64_t l) {
        const std::int64_t width = self.cast<const Cache&>().axes();
        return view<std::int32_t>(self, l, [](const Layer& layer) { return layer.position; }, width, true);
    });
    cache.def("kind", [](const py::object& self, std::int64_t l) {
        return view<std::uint8_t>(self, l, [](const Layer& layer) { return layer.kind; }, 1, false);
    });
    cache.def("seq", [](const py::object& self, std::int64_t l) {
        return view<std::int64_t>(self, l, [](const Layer& layer) { return layer.seq; }, 1, false);
    });
    cache.def("frame", [](const py::object& self, std::int64_t l) {
        return view<std::int32_t>(self, l, [](const Layer& layer) { return layer.frame; }, 1, false);
    });
    cache.def("row", [](const py::object& self, std::int64_t l) {
        return view<std::int16_t>(self, l, [](const Layer& layer) { return layer.row; }, 1, false);
    });
    cache.def("col", [](const py::object& self, std::int64_t l) {
        return view<std::int16_t>(self, l, [](const Layer& layer) { return layer.col; }, 1, false);
    });
    cache.def_property_readonly("memory", [](const py::object& self) {
        const auto& block = self.cast<const Cache&>();
        py::array bytes(py::dtype::of<std::uint8_t>(), {static_cast<py::ssize_t>(block.nbytes())}, {1}, block.data(), self);
        py::detail::array_proxy(bytes.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
        return bytes;
    });

    cache.def("reserve", &Cache::reserve);
    cache.def("commit", [](Cache& self, py::handle kind, py::handle seq, py::handle frame, py::handle row, py::handle col,
                           py::handle position) {
        const PyRows rows(self, kind, seq, frame, row, col, position);
        self.commit(rows.rows());
    });
    cache.def("abort", &Cache::abort);
    cache.def("mark", &Cache::mark);
    cache.def("rollback", &Cache::rollback);
    cache.def("evict", [](Cache& self, const py::list& keep) {
        std::vector<std::optional<Mask>> masks;
        for (const py::handle mask : keep) {
            if (mask.is_none()) masks.emplace_back();
            else masks.emplace_back(as_mask(mask, "keep", any, any));
        }
        Unlocked unlocked;
        return self.evict(masks);
    });
    cache.def("append", [](Cache& self, std::int64_t layer, py::handle key, py::handle value, py::handle kind, py::handle seq,
                           py::handle frame, py::handle row, py::handle col, py::handle position) {
        const PyRows rows(self, kind, seq, frame, row, col, position);
        const auto keys = as_volume<float>(key, "key", self.kv_heads(), rows.kind.size(), self.head_dim());
        const auto values = as_volume<float>(value, "value", self.kv_heads(), rows.kind.size(), self.head_dim());
        self.append(layer, keys, values, rows.rows());
    });
    cache.def("shift", [](Cache& self, std::int64_t layer, py::handle position) {
        const auto positions = as_volume<std::int32_t>(position, "position", any, any, any);
        Unlocked unlocked;
        self.shift(layer, positions);
    });
    cache.def("reindex", [](Cache& self, std::int64_t prefix) {
        Unlocked unlocked;
        return self.reindex(prefix);
    });
}

// ---- the kernels ----

// The cache that an array is a view of, or null.
Cache* cache_of(py::handle array) {
    while (array && py::isinstance<py::array>(array)) array = py::detail::array_proxy(array.ptr())->base;
    return array && py::isinstance<Cache>(array) ? &array.cast<Cache&>() : nullptr;
}

Scratch* scratch_of(py::handle array) {
    Cache* const cache = cache_of(array);
    return cache ? &cache->scratch() : nullptr;
}

bool turns_alike(const Rotary& rotary, const py::array_t<double, py::array::c_style>& inv_freq) {
    const double* const first = inv_freq.data();
    return rotary.pairs() == inv_freq.size() && std::equal(first, first + inv_freq.size(), rotary.inv_freq());
}

py::array_t<float> call_temporal_similarity(py::handle key, py::handle position, py::handle row, py::handle col,
                                            py::handle recent, py::handle valid, py::handle inv_freq, bool rotated) {
    PatchedKeys tokens;
    tokens.key = as_volume<float>(key, "key", any, any, any);
    const std::int64_t heads = tokens.key.heads, rows = tokens.key.rows;
    tokens.position = as_volume<std::int32_t>(position, "position", heads, rows, any);
    tokens.row = as_plane<std::int16_t>(row, "row", heads, rows);
    tokens.col = as_plane<std::int16_t>(col, "col", heads, rows);
    tokens.recent = as_mask(recent, "recent", heads, rows);
    tokens.valid = as_mask(valid, "valid", heads, rows);
    const auto frequencies = dense<double>(inv_freq, "inv_freq", {-1});
    if (!rotated) {
        if (tokens.position.width != 1) refuse("un-rotating knows one position axis, not ", tokens.position.width);
        if (frequencies.size() * 2 != tokens.key.width)
            refuse("inv_freq must hold D / 2 numbers of a key's ", tokens.key.width, ", not ", frequencies.size());
    }
    Cache* const cache = cache_of(key);
    py::array_t<float> out({heads, rows});
    float* const first = out.mutable_data();
    const bool known = cache && turns_alike(cache->rotary(), frequencies);
    {
        Unlocked unlocked;
        std::optional<Lease> table;
        std::optional<Rotary> own;
        if (!rotated && !known) {
            const std::size_t size = Rotary::table_size(frequencies.size());
            table.emplace(nullptr, size * sizeof(double));
            own.emplace(frequencies.data(), frequencies.size(), table->take<double>(size));
        }
        const Rotary* const rotary = rotated ? nullptr : known ? &cache->rotary() : &*own;
        temporal_similarity(tokens, rotary, first, cache ? &cache->scratch() : nullptr);
    }
    return out;
}

py::array_t<float> call_value_norms(py::handle value) {
    const auto values = as_volume<float>(value, "value", any, any, any);
    py::array_t<float> out({values.heads, values.rows});
    float* const first = out.mutable_data();
    {
        Unlocked unlocked;
        value_norms(values, first);
    }
    return out;
}

py::array_t<float> call_pool_norms(py::handle norms, py::handle frame, py::handle row, py::handle col, py::handle valid,
                                   int window) {
    if (window != 1 && window != 3 && window != 5 && window != 7) refuse("window must be 1, 3, 5 or 7, not ", window);
    PatchedNorms tokens;
    tokens.norm = as_plane<float>(norms, "norms", any, any);
    const std::int64_t heads = tokens.norm.heads, rows = tokens.norm.rows;
    tokens.frame = as_plane<std::int32_t>(frame, "frame", heads, rows);
    tokens.row = as_plane<std::int16_t>(row, "row", heads, rows);
    tokens.col = as_plane<std::int16_t>(col, "col", heads, rows);
    tokens.valid = as_mask(valid, "valid", heads, rows);
    Scratch* const scratch = scratch_of(frame);
    py::array_t<float> out({heads, rows});
    float* const first = out.mutable_data();
    {
        Unlocked unlocked;
        pool_norms(tokens, window, first, scratch);
    }
    return out;
}

py::array_t<bool> call_top_k(py::handle scores, py::handle seq, py::handle candidates, std::int64_t k) {
    if (k < 0) refuse("cannot choose ", k, " rows");
    const auto score = as_plane<float>(scores, "scores", any, any);
    const auto age = as_plane<std::int64_t>(seq, "seq", score.heads, score.rows);
    const Mask mask = as_mask(candidates, "candidates", score.heads, score.rows);
    Scratch* const scratch = scratch_of(seq);
    py::array_t<bool> out({score.heads, score.rows});
    bool* const first = out.mutable_data();
    {
        Unlocked unlocked;
        top_k(score, age, mask, k, first, scratch);
    }
    return out;
}

// Errors become edgevlm.errors.CacheError and CacheFull.
void raise(const char* name, const Misuse& error) {
    py::set_error(py::module_::import("edgevlm.errors").attr(name), error.what());
}

}  // namespace
}  // namespace edgevlm

PYBIND11_MODULE(_native, module) {
    using namespace edgevlm;
    module.doc() = "The ring cache and its kernels; use edgevlm.runtime.cache and edgevlm.runtime.primitives.";
    py::register_local_exception_translator([](std::exception_ptr pending) {
        try {
            if (pending) std::rethrow_exception(pending);
        } catch (const Full& error) {
            raise("CacheFull", error);
        } catch (const Misuse& error) {
            raise("CacheError", error);
        }
    });
    bind_cache(module);
    module.def("temporal_similarity", &call_temporal_similarity);
    module.def("value_norms", &call_value_norms);
    module.def("pool_norms", &call_pool_norms);
    module.def("top_k", &call_top_k);
    module.def("loose_allocations", [] { return loose_heap().allocations(); });
}
