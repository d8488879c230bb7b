#include "norms.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace edgevlm {

namespace {

constexpr int kWidest = 7;

struct Patch {
    std::uint64_t place;  // frame, row and column, so that sorted means in reading order
    float norm;
    std::uint32_t index;
};

std::uint64_t place(std::int32_t frame, int row, int col) {  // offsets make the smallest value 0
    const auto f = static_cast<std::uint64_t>(std::int64_t{frame} - std::numeric_limits<std::int32_t>::min());
    return f << 32 | static_cast<std::uint64_t>(row - std::numeric_limits<std::int16_t>::min()) << 16 |
           static_cast<std::uint64_t>(col - std::numeric_limits<std::int16_t>::min());
}

}  // namespace

void value_norms(const Volume<float>& value, float* out) {
    for (std::int64_t head = 0; head < value.heads; ++head) {
        for (std::int64_t i = 0; i < value.rows; ++i) {
            const float* row = value.at(head, i);
            double lanes[4] = {0, 0, 0, 0};
            std::int64_t d = 0;
            for (; d + 4 <= value.width; d += 4) {
                for (int lane = 0; lane < 4; ++lane) lanes[lane] += static_cast<double>(row[d + lane]) * row[d + lane];
            }
            for (; d < value.width; ++d) lanes[0] += static_cast<double>(row[d]) * row[d];
            *out++ = static_cast<float>(std::sqrt((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])));
        }
    }
}

std::size_t pool_scratch(std::int64_t rows) {
    Carver sizes;
    sizes.take<Patch>(rows);
    return sizes.bytes();
}

void pool_norms(const PatchedNorms& tokens, int window, float* out, Scratch* scratch) {
    constexpr int kLow = std::numeric_limits<std::int16_t>::min(), kHigh = std::numeric_limits<std::int16_t>::max();
    const std::int64_t heads = tokens.norm.heads, rows = tokens.norm.rows;
    Lease memory(scratch, pool_scratch(rows));
    Patch* patches = memory.take<Patch>(rows);
    const int reach = window / 2;

    for (std::int64_t head = 0; head < heads; ++head, out += rows) {
        std::fill_n(out, rows, 0.0f);
        std::int64_t count = 0;
        for (std::int64_t i = 0; i < rows; ++i) {
            if (!tokens.valid.at(head, i)) continue;
            const std::uint64_t at = place(tokens.frame.at(head, i), tokens.row.at(head, i), tokens.col.at(head, i));
            patches[count++] = {at, tokens.norm.at(head, i), static_cast<std::uint32_t>(i)};
        }
        std::sort(patches, patches + count, [](const Patch& a, const Patch& b) { return a.place < b.place; });

        // In reading order the window's rows only move forward, so each keeps its place in the list.
        std::int64_t start[kWidest] = {};
        for (std::int64_t p = 0; p < count; ++p) {
            const std::uint32_t i = patches[p].index;
            const std::int32_t frame = tokens.frame.at(head, i);
            const int row = tokens.row.at(head, i), col = tokens.col.at(head, i);
            double sum = 0;
            std::int64_t present = 0;
            for (int step = 0; step < window; ++step) {
                const int line = row + step - reach;
                if (line < kLow || line > kHigh) continue;
                const std::uint64_t from = place(frame, line, std::max(col - reach, kLow));
                const std::uint64_t to = place(frame, line, std::min(col + reach, kHigh));
                std::int64_t& q = start[step];
                while (q < count && patches[q].place < from) ++q;
                for (std::int64_t n = q; n < count && patches[n].place <= to; ++n, ++present) sum += patches[n].norm;
            }
            out[i] = static_cast<float>(sum / static_cast<double>(present));
        }
    }
}

}  // namespace edgevlm
