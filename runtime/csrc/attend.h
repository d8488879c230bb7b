// A decoder layer's attention on the memory of the cache: new rows are appended, then every row of the call attends.
#pragma once

#include <cstdint>

#include "strided.h"

namespace edgevlm {

// One layer's call of S new rows. Query heads [h * group, (h + 1) * group) share KV head h.
template <typename T>
struct AttendCall {
    Volume<T> key, value;               // the memory [Hkv, capacity, D]; rows [held, held + S) are written
    const std::int32_t* held;           // [Hkv], rows valid before
    std::int64_t rows, group;           // S
    int threads;
    const float* query;                 // [S, Hkv * group, D], rotated
    const float *new_key, *new_value;   // [S, Hkv, D], keys rotated
    const Plane<std::int32_t>* listed;  // [Hkv]: planes of one head, the held rows that are seen; null: all
    Plane<float> bias;                  // [Hkv, capacity], added to the scores of held rows; without data: none
    // PureKV's pattern of frames of `frame` rows: a row sees held rows [0, shared), its own frame up to itself, and one row of
    // the frame before, for the first frame previous [Hkv, frame] (-1: none). frame 0: no pattern.
    std::int64_t frame, shared;
    const std::int64_t* previous;
    // Rows of a frame see one another: row s sees the call's rows [0, until[s]), which does not fall; null: up to itself. window
    // above 0: of those before it, it sees rows at positions above place[s] - window. position: of held rows, place [S] rises.
    std::int64_t window;
    Plane<std::int32_t> position;  // [Hkv, held]
    const std::int32_t *place, *until;
    float* out;                         // [S, Hkv * group, D]
};

// softmax(q K^T / sqrt(D) + bias) V, causal among the new rows, over what the memory holds of the rows after rounding. Keys and
// values are read once for up to 256 query rows of a KV head; no more than a tile's scores are held. The same bits whatever the
// number of threads.
template <typename T>
void attend(const AttendCall<T>& call);

}  // namespace edgevlm
