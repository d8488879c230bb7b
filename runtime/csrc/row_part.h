// One row's way through the dense part between two layers' attention, with matrices of 8-bit codes.
#pragma once

#include <cstdint>
#include <vector>

namespace edgevlm {

// [in, out], a scale a column; bias null or [out].
struct CodedMatrix {
    const std::int8_t* codes;
    const float *scales, *bias;
    std::int64_t in, out;
};

// The end of a layer and the projections of the next. Gains are null or [width]; those of q and k of a head.
struct RowPart {
    CodedMatrix output, gate_up, down, qkv;
    const float *mlp_gain, *input_gain, *query_gain, *key_gain;
    float epsilon;                         // of the norms
    std::int64_t heads, kv_heads, width;   // width: of a head
    std::int64_t block;                    // down reads rows in Hadamard blocks of this size, a power of two

    // attention [heads width], residual [E], cosine and sine [width / 2] to query, key, value and the new residual.
    void run(const float* attention, const float* residual, const float* cosine, const float* sine, float* query, float* key,
             float* value, float* next, int workers) const;
};

// Whether this processor multiplies codes at all, and a matrix of this size.
bool multiplies_codes();
bool multiplies_codes(std::int64_t in, std::int64_t out);

}  // namespace edgevlm
