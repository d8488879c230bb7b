#include <algorithm>
#include <limits>

#include "groups.h"
#include "norms.h"
#include "simd.h"

namespace edgevlm {

namespace {

constexpr int kWidest = 7;
constexpr std::int64_t kCells = 4096;  // of one frame's grid with its margins; larger ones are sorted
constexpr std::int64_t kFull = 16;     // cells a token at which sums over all of the grid cost as much as windows one by one

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

// Any places at all: in reading order the window's rows only move forward, so each keeps its place in the list.
void pool_sorted(const PatchedNorms& tokens, std::int64_t head, int window, float* out, BumpAllocator memory) {
    constexpr int kLow = std::numeric_limits<std::int16_t>::min(), kHigh = std::numeric_limits<std::int16_t>::max();
    const std::int64_t rows = tokens.norm.rows;
    Patch* const patches = memory.take<Patch>(rows);
    const int reach = window / 2;
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
        if (!tokens.valid.at(head, i)) continue;
        const std::uint64_t at = place(tokens.frame.at(head, i), tokens.row.at(head, i), tokens.col.at(head, i));
        patches[count++] = {at, tokens.norm.at(head, i), static_cast<std::uint32_t>(i)};
    }
    std::sort(patches, patches + count, [](const Patch& a, const Patch& b) { return a.place < b.place; });

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

// Of one frame: the sum of the norms in each cell, and how many there are; then the same of lines and of whole windows.
struct Sums {
    double* norm;
    std::int32_t* present;

    explicit Sums(BumpAllocator& memory) : norm(memory.take<double>(kCells)), present(memory.take<std::int32_t>(kCells)) {}

    void clear(std::int64_t cells) {
        std::fill_n(norm, cells, 0.0);
        std::fill_n(present, cells, 0);
    }
};

// The valid tokens of a head, frame by frame.
class ByFrame {
public:
    ByFrame(BumpAllocator& memory, std::int64_t rows) : frames_(memory, rows) {
        group_ = memory.take<std::int32_t>(rows);
        end_ = memory.take<std::int32_t>(rows + 1);
        order_ = memory.take<std::int32_t>(rows);
    }

    void sort(const std::int32_t* frame, const std::uint8_t* valid, std::int64_t rows) {
        std::int32_t first = frame[0], last = first;
        for (std::int64_t i = 1; i < rows; ++i) first = std::min(first, frame[i]), last = std::max(last, frame[i]);
        frames_.clear(static_cast<std::uint32_t>(first), static_cast<std::uint64_t>(std::int64_t{last} - first + 1));
        std::fill_n(end_, rows + 1, 0);
        for (std::int64_t i = 0; i < rows; ++i) {
            group_[i] = valid[i] ? frames_.find_or_add(static_cast<std::uint32_t>(frame[i])) : Groups::kNone;
            ++end_[group_[i] + 1];
        }
        end_[0] = 0;
        for (std::int32_t g = 0; g < frames_.count(); ++g) end_[g + 1] += end_[g];
        for (std::int64_t i = 0; i < rows; ++i) {
            if (group_[i] != Groups::kNone) order_[end_[group_[i]]++] = static_cast<std::int32_t>(i);  // begin becomes end
        }
    }

    std::int32_t count() const { return frames_.count(); }
    const std::int32_t* begin(std::int32_t frame) const { return order_ + (frame ? end_[frame - 1] : 0); }
    const std::int32_t* end(std::int32_t frame) const { return order_ + end_[frame]; }

private:
    Groups frames_;
    std::int32_t *group_, *end_, *order_;
};

// A frame at a time on a grid with a margin: sums along lines, then across them, or token by token where few are left of it.
void pool_on_grid(const PatchedNorms& tokens, const Extent& extent, std::int64_t head, int window, float* out, BumpAllocator memory) {
    const std::int64_t rows = tokens.norm.rows, reach = window / 2;
    const std::int64_t width = extent.width + 2 * reach, cells = (extent.height + 2 * reach) * width;
    const std::int64_t lines = cells - 2 * reach, windows = lines - 2 * reach * width;
    const float* const norm = tokens.norm.of(head);
    const std::int16_t *const row = tokens.row.of(head), *const col = tokens.col.of(head);
    Sums sums(memory), along(memory), near(memory);
    std::int32_t* const cell = memory.take<std::int32_t>(rows);  // a window's first: its token is `centre` further on
    ByFrame frames(memory, rows);
    const std::int64_t centre = reach * width + reach;

    for (std::int64_t i = 0; i < rows; ++i)
        cell[i] = (row[i] - extent.row) * static_cast<std::int32_t>(width) + (col[i] - extent.col);
    frames.sort(tokens.frame.of(head), tokens.valid.of(head), rows);
    sums.clear(cells);
    for (std::int32_t frame = 0; frame < frames.count(); ++frame) {
        const std::int32_t *const first = frames.begin(frame), *const last = frames.end(frame);
        for (const std::int32_t* i = first; i < last; ++i) {
            sums.norm[cell[*i] + centre] += norm[*i];
            ++sums.present[cell[*i] + centre];
        }
        if ((last - first) * kFull > cells) {
            simd().box_sums(sums.norm, lines, 1, window, along.norm);
            simd().box_counts(sums.present, lines, 1, window, along.present);
            simd().box_sums(along.norm, windows, width, window, near.norm);
            simd().box_counts(along.present, windows, width, window, near.present);
            for (const std::int32_t* i = first; i < last; ++i)
                out[*i] = static_cast<float>(near.norm[cell[*i]] / near.present[cell[*i]]);
        } else {
            for (const std::int32_t* i = first; i < last; ++i) {
                double sum = 0;
                std::int32_t present = 0;
                for (std::int64_t line = cell[*i]; line < cell[*i] + window * width; line += width) {
                    for (std::int64_t c = line; c < line + window; ++c) sum += sums.norm[c], present += sums.present[c];
                }
                out[*i] = static_cast<float>(sum / present);
            }
        }
        for (const std::int32_t* i = first; i < last; ++i) sums.norm[cell[*i] + centre] = 0, sums.present[cell[*i] + centre] = 0;
    }
}

}  // namespace

std::size_t pool_scratch(std::int64_t rows) {
    BumpAllocator sorted, grid;
    sorted.take<Patch>(rows);
    for (int part = 0; part < 3; ++part) Sums sums(grid);
    grid.take<std::int32_t>(rows);
    ByFrame(grid, rows);
    return std::max(sorted.bytes(), grid.bytes());
}

void pool_norms(const PatchedNorms& tokens, std::int64_t head, int window, float* out, BumpAllocator memory) {
    const std::int64_t rows = tokens.norm.rows, margin = window - 1;
    std::fill_n(out, rows, 0.0f);
    if (rows == 0) return;
    const Extent extent(tokens.row.of(head), tokens.col.of(head), rows);
    if ((extent.height + margin) * (extent.width + margin) <= kCells) pool_on_grid(tokens, extent, head, window, out, memory);
    else pool_sorted(tokens, head, window, out, memory);
}

}  // namespace edgevlm
