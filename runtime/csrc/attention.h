// How much attention each cached token gets from rows of queries: what the attention-scored policies rank by.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arena.h"
#include "strided.h"

namespace edgevlm {

template <typename T>
struct Attended {
    Volume<T> key;             // [Hkv, n, D], rotated
    Plane<std::int64_t> seq;   // [Hkv, n]
    const float* query;        // [Hkv * group, w, D], rotated, dense
    const std::int64_t* query_seq;  // [w]
    std::int64_t group, queries;
    Volume<float> own;                      // [Hkv, m, D]: keys that are attended to as well, and whose mass is not asked for
    const std::int64_t* own_seq = nullptr;  // [m]
};

std::size_t attention_scratch(std::int64_t rows, std::int64_t head_dim);

// mass [n], of one KV head: softmax(q K^T / sqrt(D)) over the tokens whose seq is not above the query's, summed over the
// queries of its group. Keys are scored against up to 32 query rows at a time, so that scores take 32 numbers a key; a row
// that sees no token adds nothing. Equal scores have equal mass, wherever they lie. memory: attention_scratch of n + m rows.
template <typename T>
void attention_mass(const Attended<T>& tokens, std::int64_t head, float* mass, BumpAllocator memory);

}  // namespace edgevlm
