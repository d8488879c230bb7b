#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace edgevlm {

namespace {

constexpr std::int64_t kMostRows = 32;  // lanes of two vectors of the widest instruction set
constexpr std::int64_t kKeys = 64;      // converted to float32 at a time
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// query [rows, width] of `count` rows, turned on its side and scaled; lanes past the last row are zero.
void lay_out(const float* const* row, std::int64_t count, std::int64_t rows, std::int64_t width, float* query) {
    const float scale = 1 / std::sqrt(static_cast<float>(width));
    std::fill_n(query, width * rows, 0.0f);
    for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t d = 0; d < width; ++d) query[d * rows + r] = row[r][d] * scale;
    }
}

}  // namespace

std::size_t attention_scratch(std::int64_t rows, std::int64_t head_dim) {
    Carver sizes;
    sizes.take<float>(rows * kMostRows);
    sizes.take<float>(head_dim * kMostRows);
    sizes.take<float>(kKeys * head_dim);
    for (int vector = 0; vector < 2; ++vector) sizes.take<float>(kMostRows);
    return sizes.bytes();
}

template <typename T>
void attention_mass(const Attended<T>& tokens, std::int64_t head, float* mass, Carver memory) {
    const AttentionKernels& kernels = simd().attention;
    const std::int64_t keys = tokens.key.rows, width = tokens.key.width, lanes = kernels.rows;
    float* const scores = memory.take<float>(keys * kMostRows);
    float* const query = memory.take<float>(width * kMostRows);
    float* const loaded = memory.take<float>(kKeys * width);
    float* const most = memory.take<float>(kMostRows);
    float* const weight = memory.take<float>(kMostRows);
    const float* row[kMostRows];
    std::int64_t seq[kMostRows];

    std::fill_n(mass, keys, 0.0f);
    const std::int64_t all = tokens.group * tokens.queries;  // [group, w], the rows of this head
    for (std::int64_t first = 0; first < all; first += lanes) {
        const std::int64_t count = std::min(lanes, all - first);
        for (std::int64_t r = 0; r < count; ++r) {
            row[r] = tokens.query + (head * all + first + r) * width;
            seq[r] = tokens.query_seq[(first + r) % tokens.queries];
        }
        const std::int64_t oldest = *std::min_element(seq, seq + count);
        lay_out(row, count, lanes, width, query);
        for (std::int64_t k = 0; k < keys; k += kKeys) {
            const std::int64_t block = std::min(kKeys, keys - k);
            for (std::int64_t i = 0; i < block; ++i) simd().rows<T>().load(tokens.key.at(head, k + i), width, loaded + i * width);
            kernels.scores(loaded, width, block, query, width, scores + k * lanes);
        }
        for (std::int64_t k = 0; k < keys; ++k) {
            const std::int64_t place = tokens.seq.at(head, k);
            for (std::int64_t r = 0; place > oldest && r < count; ++r) {
                if (place > seq[r]) scores[k * lanes + r] = kUnseen;
            }
        }
        std::fill_n(most, lanes, std::numeric_limits<float>::lowest());  // not infinite: a row that sees nothing stays defined
        kernels.peak(scores, keys, most);
        std::fill_n(weight, lanes, 0.0f);
        kernels.exponents(scores, keys, most, weight);
        for (std::int64_t r = 0; r < lanes; ++r) weight[r] = r < count && weight[r] > 0 ? 1 / weight[r] : 0;
        kernels.weigh(scores, keys, weight, mass);
    }
}

template void attention_mass(const Attended<float>&, std::int64_t, float*, Carver);
template void attention_mass(const Attended<Half>&, std::int64_t, float*, Carver);

}  // namespace edgevlm
