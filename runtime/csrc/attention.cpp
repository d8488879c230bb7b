#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace edgevlm {

namespace {

constexpr std::int64_t kMostRows = 32;   // lanes of two vectors of the widest instruction set
constexpr std::int64_t kLeastLanes = 8;  // and of the narrowest
constexpr std::int64_t kKeys = 64;       // scored at a time, while they and their scores are in the first-level cache
constexpr std::int64_t kPart = 8;        // of those, while as many of the next are asked for
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// Query rows, one a lane, and their working memory.
struct Group {
    const AttentionKernels* kernels;
    float* scores;            // [keys, lanes]
    float* query;             // [width, lanes]
    float *highest, *weight;  // [lanes]
    std::int64_t seq[kMostRows], count, oldest;
};

// As many groups as make kMostRows rows, so that a block of keys is loaded once for all of them.
struct Batch {
    Group group[kMostRows / kLeastLanes];
    std::int64_t groups = 0;
    float* loaded;  // [kKeys, width]

    Batch(BumpAllocator& memory, std::int64_t keys, std::int64_t width, std::int64_t lanes) {
        float* const scores = memory.take<float>(keys * kMostRows);
        float* const query = memory.take<float>(width * kMostRows);
        loaded = memory.take<float>(kKeys * width);
        float *const highest = memory.take<float>(kMostRows), *const weight = memory.take<float>(kMostRows);
        for (std::int64_t g = 0; scores && g < kMostRows / lanes; ++g) {
            const std::int64_t row = g * lanes;
            group[g] = {nullptr, scores + row * keys, query + row * width, highest + row, weight + row, {}, 0, 0};
        }
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

// The second-level cache is asked for keys [first, last): else each would be waited for.
template <typename T>
void ask(const Volume<T>& key, std::int64_t head, std::int64_t first, std::int64_t last) {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    for (std::int64_t i = first; i < std::min(last, key.rows); ++i) {
        for (std::int64_t d = 0; d < key.width; d += kLine) __builtin_prefetch(key.at(head, i) + d, 0, 2);
    }
}

// Rows [first, first + count) of a KV head, [group, w] of them, turned on their side and scaled; lanes past the last are zero.
template <typename T>
void lay_out(const Attended<T>& tokens, std::int64_t head, std::int64_t first, Group& at) {
    const std::int64_t width = tokens.key.width, all = tokens.group * tokens.queries;
    at.kernels = all - first > simd().few.rows ? &simd().attention : &simd().few;
    const std::int64_t lanes = at.kernels->rows;
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

// scores [rows, lanes] of all keys, a block at a time, and the highest of them; they follow those of `before` other keys.
template <typename T>
void score(const Volume<T>& key, const std::int64_t* seq, std::int64_t head, std::int64_t before, Batch& at) {
    for (std::int64_t first = 0; first < key.rows; first += kKeys) {
        const std::int64_t count = std::min(kKeys, key.rows - first);
        const float* const keys = keys_of(key, head, first, count, at.loaded);
        for (Group* group = at.group; group < at.group + at.groups; ++group) {
            const AttentionKernels& kernels = *group->kernels;
            const std::int64_t lanes = kernels.rows;
            float* const scores = group->scores + (before + first) * lanes;
            for (std::int64_t i = 0; i < count; i += kPart) {
                if (group == at.group) ask(key, head, first + i + kKeys, first + i + kKeys + kPart);
                kernels.scores(keys + i * stride_of(key), stride_of(key), std::min(kPart, count - i), group->query, key.width,
                               scores + i * lanes);
            }
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int64_t place = seq[first + i];
                for (std::int64_t r = 0; place > group->oldest && r < group->count; ++r) {
                    if (place > group->seq[r]) scores[i * lanes + r] = kUnseen;
                }
            }
            kernels.peak(scores, count, group->highest);
        }
    }
}

}  // namespace

std::size_t attention_scratch(std::int64_t rows, std::int64_t head_dim) {
    BumpAllocator sizes;
    Batch(sizes, rows, head_dim, kLeastLanes);
    return sizes.bytes();
}

template <typename T>
void attention_mass(const Attended<T>& tokens, std::int64_t head, float* mass, BumpAllocator memory) {
    const std::int64_t keys = tokens.key.rows, all = keys + tokens.own.rows, lanes = simd().attention.rows;
    const std::int64_t rows = tokens.group * tokens.queries;
    Batch at(memory, all, tokens.key.width, lanes);
    std::fill_n(mass, keys, 0.0f);
    for (std::int64_t first = 0; first < rows;) {
        for (at.groups = 0; at.groups < kMostRows / lanes && first < rows; first += lanes)
            lay_out(tokens, head, first, at.group[at.groups++]);
        score(tokens.key, tokens.seq.of(head), head, 0, at);
        score(tokens.own, tokens.own_seq, head, keys, at);
        for (Group* group = at.group; group < at.group + at.groups; ++group) {
            const AttentionKernels& kernels = *group->kernels;
            float* const weight = group->weight;
            kernels.exponents(group->scores, all, group->highest, weight);
            for (std::int64_t r = 0; r < kernels.rows; ++r) weight[r] = r < group->count && weight[r] > 0 ? 1 / weight[r] : 0;
            kernels.weigh(group->scores, keys, weight, mass);
        }
    }
}

template void attention_mass(const Attended<float>&, std::int64_t, float*, BumpAllocator);
template void attention_mass(const Attended<Half>&, std::int64_t, float*, BumpAllocator);
template void attention_mass(const Attended<Int8>&, std::int64_t, float*, BumpAllocator);

}  // namespace edgevlm
