#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace edgevlm {

namespace {

constexpr std::int64_t kMostRows = 32;  // lanes of two vectors of the widest instruction set
constexpr std::int64_t kKeys = 64;      // scored at a time, while they and their scores are in the first-level cache
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// A batch of query rows, as many as there are lanes, and its working memory.
struct Batch {
    float* scores;            // [keys, lanes]
    float *query, *loaded;    // [width, lanes], [kKeys, width]
    float *highest, *weight;  // [lanes]
    std::int64_t seq[kMostRows], count, oldest;

    Batch(BumpAllocator& memory, std::int64_t keys, std::int64_t width) {
        scores = memory.take<float>(keys * kMostRows);
        query = memory.take<float>(width * kMostRows);
        loaded = memory.take<float>(kKeys * width);
        for (float** vector : {&highest, &weight}) *vector = memory.take<float>(kMostRows);
    }
};

// Keys [first, first + count) as float32: as they lie, or converted.
const float* keys_of(const Volume<float>& key, std::int64_t head, std::int64_t first, std::int64_t, float*) {
    return key.at(head, first);
}
template <typename T>
const float* keys_of(const Volume<T>& key, std::int64_t head, std::int64_t first, std::int64_t count, float* loaded) {
    for (std::int64_t i = 0; i < count; ++i) simd().rows<T>().load(key.row(head, first + i), key.width, loaded + i * key.width);
    return loaded;
}
std::int64_t stride_of(const Volume<float>& key) { return key.row_stride / static_cast<std::int64_t>(sizeof(float)); }
template <typename T>
std::int64_t stride_of(const Volume<T>& key) { return key.width; }

// Rows [first, first + count) of a KV head, [group, w] of them, turned on their side and scaled; lanes past the last are zero.
template <typename T>
void lay_out(const Attended<T>& tokens, std::int64_t head, std::int64_t first, std::int64_t lanes, Batch& at) {
    const std::int64_t width = tokens.key.width, all = tokens.group * tokens.queries;
    const float scale = 1 / std::sqrt(static_cast<float>(width));
    at.count = std::min(lanes, all - first);
    std::fill_n(at.query, width * lanes, 0.0f);
    for (std::int64_t r = 0; r < at.count; ++r) {
        const float* const row = tokens.query + (head * all + first + r) * width;
        for (std::int64_t d = 0; d < width; ++d) at.query[d * lanes + r] = row[d] * scale;
        at.seq[r] = tokens.query_seq[(first + r) % tokens.queries];
    }
    at.oldest = *std::min_element(at.seq, at.seq + at.count);
    std::fill_n(at.highest, lanes, std::numeric_limits<float>::lowest());  // not infinite: a row may see nothing
    std::fill_n(at.weight, lanes, 0.0f);
}

// scores [rows, lanes] of all keys, a block at a time, and the highest of them.
template <typename T>
void score(const Volume<T>& key, const std::int64_t* seq, std::int64_t head, Batch& at, float* scores) {
    const AttentionKernels& kernels = simd().attention;
    const std::int64_t lanes = kernels.rows;
    for (std::int64_t first = 0; first < key.rows; first += kKeys, scores += kKeys * lanes) {
        const std::int64_t count = std::min(kKeys, key.rows - first);
        kernels.scores(keys_of(key, head, first, count, at.loaded), stride_of(key), count, at.query, key.width, scores);
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t place = seq[first + i];
            for (std::int64_t r = 0; place > at.oldest && r < at.count; ++r) {
                if (place > at.seq[r]) scores[i * lanes + r] = kUnseen;
            }
        }
        kernels.peak(scores, count, at.highest);
    }
}

}  // namespace

std::size_t attention_scratch(std::int64_t rows, std::int64_t head_dim) {
    BumpAllocator sizes;
    Batch(sizes, rows, head_dim);
    return sizes.bytes();
}

template <typename T>
void attention_mass(const Attended<T>& tokens, std::int64_t head, float* mass, BumpAllocator memory) {
    const AttentionKernels& kernels = simd().attention;
    const std::int64_t keys = tokens.key.rows, all = keys + tokens.own.rows, lanes = kernels.rows;
    Batch at(memory, all, tokens.key.width);
    std::fill_n(mass, keys, 0.0f);
    for (std::int64_t first = 0; first < tokens.group * tokens.queries; first += lanes) {
        lay_out(tokens, head, first, lanes, at);
        score(tokens.key, tokens.seq.of(head), head, at, at.scores);
        score(tokens.own, tokens.own_seq, head, at, at.scores + keys * lanes);
        kernels.exponents(at.scores, all, at.highest, at.weight);
        for (std::int64_t r = 0; r < lanes; ++r) at.weight[r] = r < at.count && at.weight[r] > 0 ? 1 / at.weight[r] : 0;
        kernels.weigh(at.scores, keys, at.weight, mass);
    }
}

template void attention_mass(const Attended<float>&, std::int64_t, float*, BumpAllocator);
template void attention_mass(const Attended<Half>&, std::int64_t, float*, BumpAllocator);
template void attention_mass(const Attended<Int8>&, std::int64_t, float*, BumpAllocator);

}  // namespace edgevlm
