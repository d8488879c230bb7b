// Rows' way through the dense part between two layers' attention, with matrices of codes.
#pragma once

#include <cstdint>
#include <vector>

namespace edgevlm {

// codes [in, out], a scale a column; or, if those are null, pairs [out, in / 2] of 4 bits, scales [out, in / 32]. bias null or [out].
struct CodedMatrix {
    const std::int8_t* codes;
    const std::uint8_t* pairs;
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

    // Of each of `rows`: attention [heads width], residual [E], cosine and sine [width / 2] to query, key, value and the new residual.
    void run(std::int64_t rows, const float* attention, const float* residual, const float* cosine, const float* sine, float* query, float* key,
             float* value, float* next, int workers) const;
};

// Whether this processor multiplies codes at all, and such a matrix.
bool multiplies_codes();
bool multiplies_codes(const CodedMatrix& matrix);

}  // namespace edgevlm
