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
#include "cache_rows.h"
#include "errors.h"
#include "kernels_api.h"
#include "kinds.h"
#include "norms.h"
#include "threads.h"
#include "simd.h"

namespace py = pybind11;
using namespace py::literals;

namespace edgevlm {
namespace {

using Unlocked = py::gil_scoped_release;

// ---- the cache ----

DType dtype_named(const std::string& name) {
    if (name == "fp32") return DType::fp32;
    if (name == "fp16") return DType::fp16;
    if (name == "int8") return DType::int8;
    refuse("dtype must be fp32, fp16 or int8, not ", name);
}

std::vector<float> scale_of(Call& call, py::handle scale, const char* name, const Shape& shape) {
    const auto layers = static_cast<std::int64_t>(shape.capacities.size());
    const auto numbers = call.dense<float>(scale, name, {layers, shape.kv_heads, shape.head_dim});
    return {numbers.data(), numbers.data() + numbers.size()};
}

// pair_axis [head_dim / 2]: the position axis that each pair turns by; None with one axis, or where keys are never turned.
// local [layers]: those that turn by the second half of inv_freq.
Shape make_shape(Call& call, std::vector<std::int64_t> capacities, std::int64_t kv_heads, std::int64_t head_dim, py::handle inv_freq,
                 std::int64_t axes, const std::string& dtype, py::handle pair_axis, py::handle local) {
    const DType stored = dtype_named(dtype);
    const auto frequencies = call.dense<double>(inv_freq, "inv_freq", {-1});
    const double* first = frequencies.data();
    std::vector<double> values(first, first + frequencies.size());
    auto runs = runs_of(call, pair_axis, axes, head_dim / 2);
    std::vector<std::uint8_t> second;
    if (!local.is_none()) {
        const auto layers = call.dense<std::uint8_t>(local, "local", {static_cast<std::int64_t>(capacities.size())});
        second.assign(layers.data(), layers.data() + layers.size());
    }
    return {kv_heads, head_dim, axes, std::move(capacities), std::move(values), std::move(runs), stored, threads(), {}, {}, std::move(second)};
}

// Part of a cache's memory, read-only; it keeps the cache alive.
py::array view(const Cache& cache, const py::dtype& dtype, std::vector<py::ssize_t> shape, std::vector<py::ssize_t> strides,
               const void* start) {
    py::array array(dtype, std::move(shape), std::move(strides), start, py::cast(cache, py::return_value_policy::reference));
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    return array;
}

// The valid rows of a layer, `width` numbers a row (0: one, and no axis for it).
py::array view(const Cache& cache, const Layer& layer, const py::dtype& dtype, const void* start, std::int64_t width) {
    Call call;
    call.reads(cache);
    const auto item = static_cast<py::ssize_t>(dtype.itemsize());
    const auto row = item * std::max<std::int64_t>(width, 1);
    std::vector<py::ssize_t> shape{cache.kv_heads(), layer.length}, strides{row * layer.capacity, row};
    if (width) {
        shape.push_back(width);
        strides.push_back(item);
    }
    return view(cache, dtype, std::move(shape), std::move(strides), start);
}

template <typename T>
auto view_of(T* Layer::* field) {
    return [field](const Cache& self, std::int64_t layer) -> Array<T> {
        const Layer& held = self.layer(layer);
        return view(self, held, py::dtype::of<T>(), held.*field, 0);
    };
}

auto stored_view_of(std::byte* Layer::* field) {
    return [field](const Cache& self, std::int64_t index) -> Array<Number> {
        const Layer& layer = self.layer(index);
        const py::dtype dtype = by_dtype(self.dtype(), [](auto* type) { return dtype_of<std::remove_pointer_t<decltype(type)>>(); });
        return view(self, layer, dtype, layer.*field, self.head_dim());
    };
}

// float32 [H, D], or None where numbers are not kept as codes.
auto scale_view_of(float* Layer::* field) {
    return [field](const Cache& self, std::int64_t index) -> MaybeArray<float> {
        const float* const scale = self.layer(index).*field;
        if (!scale) return py::none();
        const py::ssize_t row = self.head_dim() * static_cast<py::ssize_t>(sizeof(float));
        return view(self, py::dtype::of<float>(), {self.kv_heads(), self.head_dim()}, {row, sizeof(float)}, scale);
    };
}

void check_kinds(const std::uint8_t* kind, std::int64_t count) {
    if (const auto* const last = std::max_element(kind, kind + count); count && *last > kLast)
        refuse("kind must be 0..", int{kLast}, ", not ", int{*last});
}

struct PyRows {
    py::array_t<std::uint8_t> kind;
    py::array_t<std::int64_t> seq;
    py::array_t<std::int32_t> frame;
    py::array_t<std::int16_t> row, col;
    py::array_t<std::int32_t> position;

    PyRows(Call& call, const Cache& cache, py::handle kind_, py::handle seq_, py::handle frame_, py::handle row_, py::handle col_,
           py::handle position_)
        : kind(call.dense<std::uint8_t>(kind_, "kind", {-1})),
          seq(call.dense<std::int64_t>(seq_, "seq", {kind.size()})),
          frame(call.dense<std::int32_t>(frame_, "frame", {kind.size()})),
          row(call.dense<std::int16_t>(row_, "row", {kind.size()})),
          col(call.dense<std::int16_t>(col_, "col", {kind.size()})),
          position(call.dense<std::int32_t>(position_, "position", {kind.size(), cache.axes()})) {
        check_kinds(kind.data(), kind.size());
    }

    Rows rows() const {
        return {kind.size(), kind.data(), seq.data(), frame.data(), row.data(), col.data(), position.data()};
    }
};

// A dense array of keys or values, copied if it was not dense.
py::array dense_rows(Call& call, const Cache& cache, py::handle object, const char* name, std::int64_t rows) {
    const std::vector<std::int64_t> shape{cache.kv_heads(), rows, cache.head_dim()};
    const auto check = [&](auto* type) { return call.array<std::remove_pointer_t<decltype(type)>>(object, name, shape); };
    return py::array::ensure(by_dtype(cache.dtype(), check), py::array::c_style);
}

// [H, n] of everything that a layer holds.
void load(Cache& self, std::int64_t layer, Numbers key_, Numbers value_, Bytes kind_, Longs seq_, Ints frame_, Shorts row_,
          Shorts col_, Ints position_, Ints confirmed_) {
    Call call;
    call.changes(self);
    const std::int64_t heads = self.kv_heads();
    const auto kind = call.dense<std::uint8_t>(kind_, "kind", {heads, any});
    const std::int64_t rows = kind.shape(1);
    const py::array key = dense_rows(call, self, key_, "key", rows), value = dense_rows(call, self, value_, "value", rows);
    const auto seq = call.dense<std::int64_t>(seq_, "seq", {heads, rows});
    const auto frame = call.dense<std::int32_t>(frame_, "frame", {heads, rows});
    const auto row = call.dense<std::int16_t>(row_, "row", {heads, rows}), col = call.dense<std::int16_t>(col_, "col", {heads, rows});
    const auto position = call.dense<std::int32_t>(position_, "position", {heads, rows, self.axes()});
    const auto confirmed = call.dense<std::int32_t>(confirmed_, "confirmed", {heads, rows});
    const StoredRows stored{rows,
                            static_cast<const std::byte*>(key.data()),
                            static_cast<const std::byte*>(value.data()),
                            kind.data(),
                            seq.data(),
                            frame.data(),
                            row.data(),
                            col.data(),
                            position.data(),
                            confirmed.data()};
    check_kinds(kind.data(), kind.size());
    Unlocked unlocked;
    self.load(layer, stored);
}

// A method that reads the cache, or changes it.
template <typename Returned, typename... Parts>
auto reading(Returned (Cache::*method)(Parts...) const) {
    return [method](const Cache& self, Parts... parts) {
        Call call;
        call.reads(self);
        return (self.*method)(parts...);
    };
}

template <typename Returned, typename... Parts>
auto changing(Returned (Cache::*method)(Parts...)) {
    return [method](Cache& self, Parts... parts) {
        Call call;
        call.changes(self);
        return (self.*method)(parts...);
    };
}

template <typename Field>
py::array_t<std::int32_t> per_layer(const Cache& cache, Field field) {
    Call call;
    call.reads(cache);
    py::array_t<std::int32_t> out(cache.layers());
    for (std::int64_t l = 0; l < cache.layers(); ++l) out.mutable_at(l) = static_cast<std::int32_t>(field(cache.layer(l)));
    return out;
}

void bind_cache(py::module_& module) {
    py::class_<Mark>(module, "Mark", "A state of a cache that rollback can restore.");

    py::class_<Cache> cache(module, "Cache", "The keys, values and metadata of one stream; see edgevlm.runtime.cache.KVCache.");
    cache.def(py::init([](std::vector<std::int64_t> capacities, std::int64_t kv_heads, std::int64_t head_dim, Doubles inv_freq,
                          std::int64_t axes, const std::string& dtype, MaybeBytes pair_axis, MaybeBytes local, MaybeFloats key_scale,
                          MaybeFloats value_scale) {
                  Call call;
                  Shape shape = make_shape(call, std::move(capacities), kv_heads, head_dim, inv_freq, axes, dtype, pair_axis, local);
                  if (!key_scale.is_none()) shape.key_scale = scale_of(call, key_scale, "key scale", shape);
                  if (!value_scale.is_none()) shape.value_scale = scale_of(call, value_scale, "value scale", shape);
                  const Unlocked unlocked;  // zeroing gigabytes takes seconds
                  return new Cache(shape);  // pybind11 frees a unique_ptr's twice where it has no memory to note the instance
              }),
              "capacities"_a, "kv_heads"_a, "head_dim"_a, "inv_freq"_a, "axes"_a, "dtype"_a, "pair_axis"_a = py::none(),
              "local"_a = py::none(), "key_scale"_a = py::none(), "value_scale"_a = py::none());
    cache.def_static("_bytes_for",
                     [](std::vector<std::int64_t> capacities, std::int64_t kv_heads, std::int64_t head_dim, Doubles inv_freq,
                        std::int64_t axes, const std::string& dtype, MaybeBytes pair_axis, MaybeBytes local) {
                         Call call;
                         return Cache::bytes_for(make_shape(call, std::move(capacities), kv_heads, head_dim, inv_freq, axes, dtype, pair_axis, local));
                     },
                     "capacities"_a, "kv_heads"_a, "head_dim"_a, "inv_freq"_a, "axes"_a, "dtype"_a, "pair_axis"_a = py::none(),
                     "local"_a = py::none());
    cache.def_property_readonly("nbytes", &Cache::nbytes,
                                "The cache's size in bytes: rows, metadata and the kernels' working memory.");
    cache.def_property_readonly("allocations", &Cache::allocations, "The number of memory blocks that the cache has ever allocated: 1.");
    cache.def_property_readonly("rows_moved", reading(&Cache::rows_moved),
                                "The number of rows that evictions have moved, summed over layers and heads.");
    cache.def_property_readonly("saturated", reading(&Cache::saturated),
                                R"(The number of values and rotary pairs of keys that exceeded the range of int8 codes; 0 with other dtypes.

A rotary pair counts if it is longer than the largest code, because some rotations of the pair are clipped.)");
    cache.def_property_readonly("lengths", [](const Cache& self) { return per_layer(self, [](const Layer& l) { return l.length; }); },
                                "A copy of each layer's number of valid rows, [layers]. Reserved rows do not count.");
    cache.def_property_readonly("capacities", [](const Cache& self) { return per_layer(self, [](const Layer& l) { return l.capacity; }); },
                                "The number of rows that each layer has room for, [layers].");

    cache.def("key_address", [](const Cache& self, std::int64_t l) { return reinterpret_cast<std::uintptr_t>(self.layer(l).key); },
              "layer"_a);
    cache.def("value_address", [](const Cache& self, std::int64_t l) { return reinterpret_cast<std::uintptr_t>(self.layer(l).value); },
              "layer"_a);
    cache.def("key", stored_view_of(&Layer::key), "layer"_a,
              "A layer's rotated keys as stored, [kv_heads, n, head_dim]; codes if the dtype is int8.");
    cache.def("value", stored_view_of(&Layer::value), "layer"_a, "A layer's values as stored, [kv_heads, n, head_dim]; codes if the dtype is int8.");
    cache.def("key_scale", scale_view_of(&Layer::key_scale), "layer"_a,
              "The factor from int8 codes to keys in each channel, float32 [kv_heads, head_dim]; None with other dtypes.");
    cache.def("value_scale", scale_view_of(&Layer::value_scale), "layer"_a,
              "The factor from int8 codes to values in each channel, float32 [kv_heads, head_dim]; None with other dtypes.");
    cache.def("kind", view_of(&Layer::kind), "layer"_a, "Each row's Kind, [kv_heads, n].");
    cache.def("seq", view_of(&Layer::seq), "layer"_a, "Each row's place in the stream, [kv_heads, n].");
    cache.def("frame", view_of(&Layer::frame), "layer"_a, "The number of each row's frame, [kv_heads, n]; -1 outside frames.");
    cache.def("row", view_of(&Layer::row), "layer"_a, "The grid row of each token's patch, [kv_heads, n].");
    cache.def("col", view_of(&Layer::col), "layer"_a, "The grid column of each token's patch, [kv_heads, n].");
    cache.def("position", [](const Cache& self, std::int64_t index) -> Array<std::int32_t> {
        const Layer& layer = self.layer(index);
        return view(self, layer, py::dtype::of<std::int32_t>(), layer.position, self.axes());
    }, "layer"_a, "The rotary position that each key is rotated to, [kv_heads, n, axes].");
    cache.def("confirmed", view_of(&Layer::confirmed), "layer"_a,
              "The last frame in which each row's patch was unchanged, [kv_heads, n]; see confirm.");
    cache.def("value_norms", [](Cache& self, std::int64_t index) -> Array<float> {
        const Layer& layer = self.layer(index);
        {
            Call call;
            call.reads(self);
            const Unlocked unlocked;
            const Lease alone(&self.scratch(), 0, self.kv_heads());  // of two threads one completes them
            by_dtype(self.dtype(), [&](auto* type) {
                const auto rows = rows_of<std::remove_pointer_t<decltype(type)>>(self, layer);
                parallel_for(self.kv_heads(), alone.workers(),
                             [&](std::int64_t head, int) { complete_norms(rows.value, head, rows.norm.of(head)); });
            });
        }
        return view(self, layer, py::dtype::of<float>(), layer.norm, 0);
    }, "layer"_a, "Each value's L2 norm, [kv_heads, n], computed once and stored with the row.");
    cache.def_property_readonly("memory", [](const Cache& self) -> Array<std::uint8_t> {
        return view(self, py::dtype::of<std::uint8_t>(), {static_cast<py::ssize_t>(self.nbytes())}, {1}, self.data());
    }, "The cache's whole memory block, [nbytes], read-only.");

    cache.def("reserve", changing(&Cache::reserve), "n"_a,
              R"(Reserve the n rows after each layer's valid rows for an engine to write.

Raises CacheFull, and reserves nothing, if a layer has no room. Raises CacheError if rows are already reserved.)");
    cache.def("_commit", [](Cache& self, Bytes kind, Longs seq, Ints frame, Shorts row, Shorts col, Ints position) {
        Call call;
        call.changes(self);
        const PyRows rows(call, self, kind, seq, frame, row, col, position);
        self.commit(rows.rows());
    }, "kind"_a, "seq"_a, "frame"_a, "row"_a, "col"_a, "position"_a);
    cache.def("abort", changing(&Cache::abort), "Release the reserved rows, and ignore what an engine has written to them.");
    cache.def("mark", reading(&Cache::mark), "Return a mark of the current rows for rollback.");
    cache.def("rollback", changing(&Cache::rollback), "mark"_a,
              R"(Remove all rows committed since the mark was taken. The mark can be used again.

Raises CacheError if the mark is stale: rows have since been evicted, shifted or added to one layer, or the cache has been
rolled back to an earlier mark.)");
    cache.def("evict", [](Cache& self, const Sequence<MaybeArray<bool>>& keep) {
        Call call;
        call.changes(self);
        std::vector<std::optional<Mask>> masks;
        for (const py::handle mask : keep) {
            if (mask.is_none()) masks.emplace_back();
            else masks.emplace_back(call.mask(mask, "keep", any, any));
        }
        Unlocked unlocked;
        return self.evict(masks);
    }, "keep"_a, R"(Evict the rows that are False in the mask keep[layer], bool [kv_heads, n_l]. None keeps all rows of a layer.

Every head of a layer must keep the same number m of rows. The k-th evicted row among the first m rows is replaced by the k-th
kept row after the first m. Returns the number of evicted rows per head, summed over layers.)");
    cache.def("_append", [](Cache& self, std::int64_t layer, Floats key, Floats value, Bytes kind, Longs seq, Ints frame, Shorts row,
                            Shorts col, Ints position) {
        Call call;
        call.changes(self);
        const PyRows rows(call, self, kind, seq, frame, row, col, position);
        const auto keys = call.volume<float>(key, "key", self.kv_heads(), rows.kind.size(), self.head_dim());
        const auto values = call.volume<float>(value, "value", self.kv_heads(), rows.kind.size(), self.head_dim());
        self.append(layer, keys, values, rows.rows());
    }, "layer"_a, "key"_a, "value"_a, "kind"_a, "seq"_a, "frame"_a, "row"_a, "col"_a, "position"_a);
    cache.def("shift", [](Cache& self, std::int64_t layer, Ints position) {
        Call call;
        call.changes(self);
        const auto positions = call.volume<std::int32_t>(position, "position", any, any, any);
        Unlocked unlocked;
        self.shift(layer, positions);
    }, "layer"_a, "position"_a, R"(Set a layer's positions, int32 [kv_heads, n_l, axes], and rotate the keys to the new positions.

The rotary pairs (d, d + head_dim / 2) are rotated in float32 by the float64 angles (new - old) * inv_freq. With 3 axes, each
pair uses the positions on its own axis.)");
    cache.def("confirm", [](Cache& self, Longs seq, std::int32_t frame) {
        Call call;
        call.changes(self);
        const auto tokens = call.plane<std::int64_t>(seq, "seq", any, any);
        Unlocked unlocked;
        self.confirm(tokens, frame);
    }, "seq"_a, "frame"_a, R"(Record that the patches of these tokens are unchanged in `frame`. seq: one token per patch, [rows, columns], -1 for none.

Tokens that are no longer in the cache are skipped.)");
    cache.def("_load", &load, "layer"_a, "key"_a, "value"_a, "kind"_a, "seq"_a, "frame"_a, "row"_a, "col"_a, "position"_a,
              "confirmed"_a);
    cache.def("reindex", [](Cache& self, std::int64_t prefix) {
        Call call;
        call.changes(self);
        Unlocked unlocked;
        return self.reindex(prefix);
    }, "prefix"_a, R"(Close gaps between positions: in each layer and head, a position p >= `prefix` becomes `prefix` + the rank of p.

Equal positions stay equal, and positions below `prefix` do not change (InfiniPot-V App. B.4, HERMES App. F). With 3 axes, each
axis is treated separately. Returns the next free position: 1 + the largest position over all layers, heads and axes.)");
}

// Errors become edgevlm.errors.CacheError and CacheFull.
void raise(const char* name, const Misuse& error) {
    py::set_error(py::module_::import("edgevlm.errors").attr(name), error.what());
}

}  // namespace
}  // namespace edgevlm

PYBIND11_MODULE(_native, module) {
    using namespace edgevlm;
    module.doc() = "The ring cache and its kernels; use edgevlm.runtime.cache and edgevlm.runtime.kernels.";
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
    bind_coreset(module);
    bind_kernels(module);
    bind_infinipot(module);
    bind_newer_similarity(module);
    bind_mosaic(module);
    bind_patch_levels(module);
    bind_resv(module);
    bind_row_part(module);
    module.def("loose_allocations", [] { return loose_heap().allocations(); }, "Return the number of memory blocks allocated outside caches, for tests.");
}
