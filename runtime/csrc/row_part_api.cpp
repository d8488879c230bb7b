// RowPart as Python sees it: checked once, then called with one row after another.

#include <pybind11/numpy.h>

#include <array>
#include <cstdint>
#include <vector>

#include "arrays.h"
#include "errors.h"
#include "kernels_api.h"
#include "row_part.h"
#include "threads.h"

namespace py = pybind11;
using namespace py::literals;

namespace edgevlm {

using Arrays = const py::sequence&;

struct HeldPart {
    RowPart part{};
    std::vector<py::array> held;

    HeldPart(Arrays codes, Arrays scales, Arrays biases, Arrays gains, float epsilon, std::int64_t kv_heads, std::int64_t width,
             std::int64_t block) {
        if (!multiplies_codes()) refuse("this processor does not support products of codes");
        for (const py::sequence& each : {codes, scales, biases, gains})
            if (py::len(each) != 4) refuse("codes, scales, biases and gains must each have 4 entries, not ", py::len(each));
        Call call;
        const auto take = [&](auto array) {
            held.push_back(array);
            return array.data();
        };
        const auto maybe = [&](py::handle object, const char* name, std::int64_t size) -> const float* {
            return object.is_none() ? nullptr : take(call.dense<float>(object, name, {size}));
        };
        const std::array<CodedMatrix*, 4> matrices{&part.output, &part.gate_up, &part.down, &part.qkv};
        for (std::size_t i = 0; i < matrices.size(); ++i) {
            CodedMatrix& matrix = *matrices[i];
            const bool four = is_array_of<std::uint8_t>(codes[i]);
            const auto all = four ? call.array<std::uint8_t>(py::object(codes[i]), "codes", {any, any, 16})
                                  : call.array<Int8>(py::object(codes[i]), "codes", {any, any});
            if (!(all.flags() & py::array::c_style)) refuse("codes must be C-contiguous");
            matrix.in = four ? 32 * all.shape(1) : all.shape(0), matrix.out = all.shape(four ? 0 : 1);
            if (four) matrix.pairs = static_cast<const std::uint8_t*>(all.data());
            else matrix.codes = static_cast<const std::int8_t*>(all.data());
            if (!multiplies_codes(matrix)) refuse("codes must be int8 [16 n, 64 m] or uint8 [32 m, n > 3, 16], not codes of a matrix with ", matrix.in, " inputs and ", matrix.out, " outputs");
            held.push_back(all);
            const std::vector<std::int64_t> scaled = four ? std::vector{matrix.out, matrix.in / 32} : std::vector{matrix.out};
            matrix.scales = take(call.dense<float>(py::object(scales[i]), "scales", scaled));
            matrix.bias = maybe(py::object(biases[i]), "biases", matrix.out);
        }
        const std::int64_t inner = part.down.in, hidden = part.output.out, query = part.output.in;
        if (width < 2 || width % 2 || kv_heads < 1 || kv_heads > query || query % width)
            refuse("unsupported heads: ", kv_heads, " KV heads with head_dim ", width);
        if (part.gate_up.in != hidden || part.gate_up.out != 2 * inner || part.down.out != hidden || part.qkv.in != hidden ||
            part.qkv.out != query + 2 * kv_heads * width)
            refuse("the shapes of the matrices do not match");
        if (block < 1 || block & (block - 1) || inner % block) refuse("block must be a power of two that divides ", inner, ", not ", block);
        if (!(epsilon >= 0)) refuse("epsilon must not be below 0");
        part.heads = query / width, part.kv_heads = kv_heads, part.width = width, part.block = block, part.epsilon = epsilon;
        part.mlp_gain = maybe(py::object(gains[0]), "gains", hidden), part.input_gain = maybe(py::object(gains[1]), "gains", hidden);
        part.query_gain = maybe(py::object(gains[2]), "gains", width), part.key_gain = maybe(py::object(gains[3]), "gains", width);
    }

    bool any_rows() const { return part.output.pairs && part.gate_up.pairs && part.down.pairs && part.qkv.pairs; }

    void run(Floats attention, Floats residual, Floats cosine, Floats sine, Floats query, Floats key, Floats value, Floats next,
             int workers) const {
        if (workers < 0 || workers > kMaxThreads) refuse("threads must be 0 to ", kMaxThreads, ", not ", workers);
        Call call;
        const std::int64_t hidden = part.output.out, kv = part.kv_heads * part.width;
        const std::int64_t rows = call.array<float>(attention, "attention", {any, part.output.in}).shape(0);
        const auto from = [&](Floats object, const char* name, std::int64_t size) {
            const auto found = call.dense<float>(object, name, {rows, size});
            call.keep(found);
            return found.data();
        };
        const float *const a = from(attention, "attention", part.output.in), *const r = from(residual, "residual", hidden);
        const float *const c = from(cosine, "cosine", part.width / 2), *const s = from(sine, "sine", part.width / 2);
        float *const q = call.in_place<float>(query, "query", {rows, part.output.in}), *const k = call.in_place<float>(key, "key", {rows, kv});
        float *const v = call.in_place<float>(value, "value", {rows, kv}), *const n = call.in_place<float>(next, "next", {rows, hidden});
        const py::gil_scoped_release unlocked;
        part.run(rows, a, r, c, s, q, k, v, n, workers ? workers : threads());
    }
};

}  // namespace edgevlm

namespace pybind11::detail {
template <>
struct type_caster<edgevlm::HeldPart> : made_by_init<edgevlm::HeldPart> {};
}  // namespace pybind11::detail

namespace edgevlm {

void bind_row_part(py::module_& module) {
    module.def("multiplies_codes", py::overload_cast<>(&multiplies_codes),
               "Return whether this processor has the 8-bit dot products that RowPart needs (AVX-512 VNNI or NEON's).");
    py::class_<HeldPart>(module, "RowPart", R"(The operations from one decoder layer's attention to the next layer's query, key and value, with quantized matrices.

codes, scales and biases each have four arrays, for the matrices output, gate and up, down, and q, k and v. codes are not copied.
8-bit codes are int8 [in, out] with scales [out], meant for one row at a time; in is a multiple of 16, and out a multiple of 64.
4-bit codes are uint8 [out, in / 32, 16], two per byte, where 8 stands for 0, with scales [out, in / 32]; in is at least 128, and
out a multiple of 32. A bias is [out] or None. gains: the weights of the norms after output, after down, of a head's query and of
its key; None for no norm. block: the size of the Hadamard blocks of down's input. Before each product, rows are rounded to codes
of -127 to 127, for 4-bit matrices in blocks of 32.)")
        .def(py::init<Arrays, Arrays, Arrays, Arrays, float, std::int64_t, std::int64_t, std::int64_t>(), "codes"_a, "scales"_a, "biases"_a,
             "gains"_a, "epsilon"_a, "kv_heads"_a, "width"_a, "block"_a)
        .def_property_readonly("any_rows", &HeldPart::any_rows, "Whether run suits any number of rows, because all matrices have 4-bit codes.")
        .def("run", &HeldPart::run, "attention"_a, "residual"_a, "cosine"_a, "sine"_a, "query"_a, "key"_a, "value"_a, "next"_a,
             "threads"_a = 0, "Compute query, key, value and next (the new residual) of S rows. attention: [S, Hq D]. residual: [S, E]. cosine, sine: [S, D / 2].");
}

}  // namespace edgevlm
