// Frames in levels, and how much each patch of one differs from another. For Python; a row of patches is a task.

#include <pybind11/numpy.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "arena.h"
#include "arrays.h"
#include "kernels_api.h"
#include "simd.h"
#include "threads.h"

namespace py = pybind11;
using namespace py::literals;

namespace edgevlm {

namespace {

using Bytes = std::uint8_t;

struct Grid {
    std::int64_t rows, columns, height, width;  // patches, and a patch's pixels; what is left of a frame belongs to none
};

Grid grid_of(std::int64_t rows, std::int64_t columns, std::int64_t height, std::int64_t width) {
    if (rows < 1 || columns < 1 || rows > height || columns > width)
        refuse("a frame of ", width, "x", height, " pixels cannot be divided into ", columns, "x", rows, " patches");
    return {rows, columns, height / rows, width / columns};
}

py::array_t<std::uint8_t> call_levels(Floats pixels, Floats scale, Floats offset) {
    Call call;
    const auto from = call.dense<float>(pixels, "pixels", {any, any, any});
    const std::int64_t planes = from.shape(0), size = from.shape(1) * from.shape(2);
    const auto by = call.dense<float>(scale, "scale", {planes}), more = call.dense<float>(offset, "offset", {planes});
    py::array_t<Bytes> out({planes, from.shape(1), from.shape(2)});
    const float *const in = from.data(), *const scales = by.data(), *const offsets = more.data();
    Bytes* const first = out.mutable_data();
    {
        const py::gil_scoped_release unlocked;
        parallel_for(planes, threads(), [&](std::int64_t plane, int) {
            simd().levels.levels(in + plane * size, scales[plane], offsets[plane], size, first + plane * size);
        });
    }
    return out;
}

py::array_t<float> call_patch_sums(edgevlm::Bytes levels, std::int64_t rows, std::int64_t columns) {
    Call call;
    const auto from = call.dense<Bytes>(levels, "levels", {any, any, any});
    const std::int64_t planes = from.shape(0), height = from.shape(1), width = from.shape(2);
    const Grid grid = grid_of(rows, columns, height, width);
    py::array_t<float> out(rows * columns);
    const Bytes* const in = from.data();
    float* const first = out.mutable_data();
    {
        const py::gil_scoped_release unlocked;
        const Lease memory(nullptr, aligned(width * sizeof(std::uint32_t)), rows);
        parallel_for(rows, memory.workers(), [&](std::int64_t row, int worker) {
            auto* const sums = memory.of(worker).take<std::uint32_t>(width);
            std::fill_n(sums, width, 0u);
            for (std::int64_t plane = 0; plane < planes; ++plane) {
                for (std::int64_t y = 0; y < grid.height; ++y)
                    simd().levels.add(in + (plane * height + row * grid.height + y) * width, width, sums);
            }
            for (std::int64_t column = 0; column < columns; ++column) {
                std::uint32_t sum = 0;
                for (std::int64_t x = 0; x < grid.width; ++x) sum += sums[column * grid.width + x];
                first[row * columns + column] = static_cast<float>(sum);
            }
        });
    }
    return out;
}

py::array_t<float> call_patch_distances(edgevlm::Bytes levels, edgevlm::Bytes low, edgevlm::Bytes high,
                                        std::int64_t rows, std::int64_t columns, MaybeFloats gain) {
    Call call;
    const auto of = call.dense<Bytes>(levels, "levels", {any, any, any});
    const std::int64_t planes = of.shape(0), height = of.shape(1), width = of.shape(2);
    const auto least = call.dense<Bytes>(low, "low", {planes, height, width});
    const auto most = call.dense<Bytes>(high, "high", {planes, height, width});
    const Grid grid = grid_of(rows, columns, height, width);
    const bool gained = !gain.is_none();
    const auto by = gained ? call.dense<float>(gain, "gain", {rows * columns}) : py::array_t<float, py::array::c_style>();
    py::array_t<float> out(rows * columns);
    const Bytes *const x = of.data(), *const from = least.data(), *const to = most.data();
    const float* const gains = gained ? by.data() : nullptr;
    if (gained && !std::all_of(gains, gains + by.size(), [](float gain) { return std::isfinite(gain); })) refuse("gain must be finite");
    float* const first = out.mutable_data();
    {
        const py::gil_scoped_release unlocked;
        constexpr std::int64_t kPiece = 16;  // bytes copied at once, beyond a patch's width too
        const std::int64_t numbers = planes * grid.height * grid.width, count = (numbers + 9) / 10;
        const std::int64_t blocks = (numbers + LevelKernels::kBlock - 1) / LevelKernels::kBlock;
        const std::int64_t stride = (blocks + 1) * LevelKernels::kBlock, line = grid.columns * grid.width;
        const std::size_t wanted = aligned(line + kPiece) + aligned(line * sizeof(std::uint16_t)) + aligned(columns * stride);
        const Lease memory(nullptr, wanted, rows);
        parallel_for(rows, memory.workers(), [&](std::int64_t row, int worker) {
            BumpAllocator own = memory.of(worker);
            auto* const apart = own.take<Bytes>(line + kPiece);
            auto* const factors = own.take<std::uint16_t>(line);
            auto* const patches = own.take<Bytes>(columns * stride);
            for (std::int64_t at = 0; gains && at < line; ++at) {
                const float factor = std::nearbyint(256 * gains[row * columns + at / grid.width]);
                factors[at] = static_cast<std::uint16_t>(std::clamp(factor, 0.0f, 65535.0f));
            }
            std::int64_t filled = 0;
            for (std::int64_t plane = 0; plane < planes; ++plane) {
                for (std::int64_t y = 0; y < grid.height; ++y, filled += grid.width) {
                    const std::int64_t at = (plane * height + row * grid.height + y) * width;
                    simd().levels.distances(x + at, from + at, to + at, gains ? factors : nullptr, line, apart);
                    for (std::int64_t column = 0; column < columns; ++column) {
                        Bytes* const patch = patches + column * stride + filled;
                        for (std::int64_t done = 0; done < grid.width; done += kPiece)
                            std::memcpy(patch + done, apart + column * grid.width + done, kPiece);
                    }
                }
            }
            for (std::int64_t column = 0; column < columns; ++column) {
                Bytes* const patch = patches + column * stride;
                std::fill(patch + numbers, patch + blocks * LevelKernels::kBlock, Bytes{0});
                first[row * columns + column] = simd().levels.largest(patch, blocks, count);
            }
        });
    }
    return out;
}

}  // namespace

void bind_patch_levels(py::module_& module) {
    module.def("levels", &call_levels, "pixels"_a, "scale"_a, "offset"_a,
               "Return pixels [planes, H, W] * scale [planes] + offset [planes], rounded and clipped to 0..255, uint8 [planes, H, W].");
    module.def("patch_sums", &call_patch_sums, "levels"_a, "rows"_a, "columns"_a,
               "Return the sum of each patch's levels, float32 [rows * columns]. levels: uint8 [planes, H, W].");
    module.def("patch_distances", &call_patch_distances, "levels"_a, "low"_a, "high"_a, "rows"_a, "columns"_a,
               "gain"_a = py::none(),
               R"(Return the mean of the largest tenth of each patch's distances from the range [low, high], float32 [rows * columns].

levels, low, high: uint8 [planes, H, W]. A patch is H // rows by W // columns pixels of all planes; pixels left over at the right
and bottom are ignored. gain: [rows * columns], the factor for each patch's low and high, rounded to a multiple of 1/256.)");
}

}  // namespace edgevlm
