#include "similarity.h"

#include <algorithm>
#include <cmath>

namespace edgevlm {

namespace {

double dot(const double* a, const double* b, std::int64_t size) {
    double lanes[4] = {0, 0, 0, 0};
    std::int64_t d = 0;
    for (; d + 4 <= size; d += 4) {
        for (int lane = 0; lane < 4; ++lane) lanes[lane] += a[d + lane] * b[d + lane];
    }
    for (; d < size; ++d) lanes[0] += a[d] * b[d];
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

// A token as one sortable number: its patch, then recent before past, then its row.
constexpr std::uint64_t kPast = std::uint64_t{1} << 31;
constexpr std::uint64_t kRow = kPast - 1;

std::uint64_t sort_key(std::int16_t row, std::int16_t col, bool past, std::int64_t index) {
    const std::uint64_t patch = (std::uint64_t{static_cast<std::uint16_t>(row)} << 16) | static_cast<std::uint16_t>(col);
    return (patch << 32) | (past ? kPast : 0) | static_cast<std::uint64_t>(index);
}

}  // namespace

std::size_t similarity_scratch(std::int64_t rows, std::int64_t head_dim) {
    Carver sizes;
    sizes.take<std::uint64_t>(rows);
    for (int vector = 0; vector < 4; ++vector) sizes.take<double>(head_dim);
    return sizes.bytes();
}

void temporal_similarity(const PatchedKeys& tokens, const Rotary* rotary, float* out, Scratch* scratch) {
    const std::int64_t heads = tokens.key.heads, rows = tokens.key.rows, width = tokens.key.width;
    Lease memory(scratch, similarity_scratch(rows, width));
    std::uint64_t* const order = memory.take<std::uint64_t>(rows);
    double* const key = memory.take<double>(width);
    double* const mean = memory.take<double>(width);
    double* const cosine = memory.take<double>(width);
    double* const sine = memory.take<double>(width);

    for (std::int64_t head = 0; head < heads; ++head, out += rows) {
        std::fill_n(out, rows, 0.0f);
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < rows; ++i) {
            if (!tokens.valid.at(head, i)) continue;
            const bool past = !tokens.recent.at(head, i);
            order[count++] = sort_key(tokens.row.at(head, i), tokens.col.at(head, i), past, i);
        }
        std::sort(order, order + count);

        // Loads a token's key, un-rotated, and returns its length.
        const auto load = [&](std::int64_t i) {
            const float* stored = tokens.key.at(head, i);
            if (rotary) {
                rotary->angles(*tokens.position.at(head, i), cosine, sine);
                unrotate(stored, cosine, sine, width / 2, key);
            } else {
                std::copy_n(stored, width, key);
            }
            return std::sqrt(dot(key, key, width));
        };

        // One patch after the other: the mean of its recent unit keys, then each past key against that mean.
        for (std::int64_t at = 0; at < count;) {
            const std::uint64_t patch = order[at] >> 32;
            const std::int64_t first = at;
            std::fill_n(mean, width, 0.0);
            for (; at < count && order[at] >> 32 == patch && !(order[at] & kPast); ++at) {
                const double length = load(static_cast<std::int64_t>(order[at] & kRow));
                if (length == 0) continue;
                for (std::int64_t d = 0; d < width; ++d) mean[d] += key[d] / length;
            }
            const auto recent = static_cast<double>(at - first);
            for (; at < count && order[at] >> 32 == patch; ++at) {
                const auto i = static_cast<std::int64_t>(order[at] & kRow);
                if (recent == 0) {
                    out[i] = -1.0f;
                    continue;
                }
                const double length = load(i);
                out[i] = length == 0 ? 0.0f : static_cast<float>(dot(key, mean, width) / (length * recent));
            }
        }
    }
}

}  // namespace edgevlm
