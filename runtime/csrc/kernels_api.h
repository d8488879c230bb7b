// What bindings.cpp takes from kernels_api.cpp, the kernels' side of the Python module.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "arrays.h"
#include "rotary.h"

namespace edgevlm {

// The runs of pairs that turn by the same position axis. pair_axis: None or uint8 [pairs]; None means axis 0 where there is
// but one axis, and nothing known (no runs) where there are more.
std::vector<Run> runs_of(Call& call, pybind11::handle pair_axis, std::int64_t axes, std::int64_t pairs);

void check_window(int window);  // of VaN's pooling: 1, 3, 5 or 7

void bind_coreset(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_infinipot(pybind11::module_& module);
void bind_newer_similarity(pybind11::module_& module);
void bind_mosaic(pybind11::module_& module);
void bind_patch_levels(pybind11::module_& module);
void bind_resv(pybind11::module_& module);
void bind_row_part(pybind11::module_& module);

}  // namespace edgevlm
