#include <algorithm>
#include <limits>

#include "groups.h"
#include "norms.h"

namespace edgevlm {

namespace {

constexpr int kWidest = 7;
constexpr std::int64_t kCells = 4096;  // of one frame's grid with its margins; larger ones are sorted

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
void pool_sorted(const PatchedNorms& tokens, std::int64_t head, int window, float* out, Carver memory) {
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

struct Cell {
    double sum, present;

    void operator+=(const Cell& other) {
        sum += other.sum;
        present += other.present;
    }
};

// The corner and size of the grid, with a margin of `reach`, that holds every valid token of a head.
struct Grid {
    int row = std::numeric_limits<int>::max(), col = std::numeric_limits<int>::max();
    std::int64_t height = 0, width = 0;

    Grid(const PatchedNorms& tokens, std::int64_t head, int reach) {
        int last_row = std::numeric_limits<int>::min(), last_col = last_row;
        for (std::int64_t i = 0; i < tokens.norm.rows; ++i) {
            if (!tokens.valid.at(head, i)) continue;
            const int r = tokens.row.at(head, i), c = tokens.col.at(head, i);
            row = std::min(row, r), last_row = std::max(last_row, r);
            col = std::min(col, c), last_col = std::max(last_col, c);
        }
        if (last_row < row) return;
        height = std::int64_t{last_row} - row + 1 + 2 * reach;
        width = std::int64_t{last_col} - col + 1 + 2 * reach;
        row -= reach, col -= reach;
    }
    std::int64_t cells() const { return height * width; }
};

// A frame at a time on a grid: sums along lines, then across them, or token by token where few are left of a frame.
void pool_on_grid(const PatchedNorms& tokens, const Grid& grid, std::int64_t head, int window, float* out, Carver memory) {
    const std::int64_t rows = tokens.norm.rows, width = grid.width;
    const int reach = window / 2;
    Cell* const cell = memory.take<Cell>(kCells);
    Cell* const line = memory.take<Cell>(kCells);
    std::int32_t* const group = memory.take<std::int32_t>(rows);
    std::int32_t* const begin = memory.take<std::int32_t>(rows + 1);
    std::int32_t* const order = memory.take<std::int32_t>(rows);
    Groups frames(memory, rows);
    frames.clear();
    std::fill_n(cell, grid.cells(), Cell{0, 0});

    std::fill_n(begin, rows + 1, 0);
    std::int32_t id = Groups::kNone, frame = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
        group[i] = Groups::kNone;
        if (!tokens.valid.at(head, i)) continue;
        if (const std::int32_t t = tokens.frame.at(head, i); id == Groups::kNone || t != frame) {
            id = frames.find_or_add(static_cast<std::uint32_t>(t));
            frame = t;
        }
        group[i] = id;
        ++begin[id + 1];
    }
    for (std::int32_t g = 0; g < frames.count(); ++g) begin[g + 1] += begin[g];
    for (std::int64_t i = 0; i < rows; ++i) {
        if (group[i] != Groups::kNone) order[begin[group[i]]++] = static_cast<std::int32_t>(i);  // begin becomes end
    }

    const auto at = [&](std::int32_t i) {
        return (tokens.row.at(head, i) - grid.row) * width + (tokens.col.at(head, i) - grid.col);
    };
    for (std::int32_t g = 0; g < frames.count(); ++g) {
        const std::int32_t* const first = order + (g ? begin[g - 1] : 0);
        const std::int32_t* const last = order + begin[g];
        for (const std::int32_t* i = first; i < last; ++i) cell[at(*i)] += Cell{tokens.norm.at(head, *i), 1};
        const bool full = (last - first) * window * window > grid.cells() * (2 * window + 2);
        if (full) {
            std::fill_n(line, grid.cells(), Cell{0, 0});
            for (int step = -reach; step <= reach; ++step) {
                for (std::int64_t c = reach; c < grid.cells() - reach; ++c) line[c] += cell[c + step];
            }
        }
        for (const std::int32_t* i = first; i < last; ++i) {
            Cell near{0, 0};
            for (int down = -reach; down <= reach; ++down) {
                if (full) {
                    near += line[at(*i) + down * width];
                } else {
                    for (int across = -reach; across <= reach; ++across) near += cell[at(*i) + down * width + across];
                }
            }
            out[*i] = static_cast<float>(near.sum / near.present);
        }
        for (const std::int32_t* i = first; i < last; ++i) cell[at(*i)] = Cell{0, 0};
    }
}

}  // namespace

std::size_t pool_scratch(std::int64_t rows) {
    Carver sorted, grid;
    sorted.take<Patch>(rows);
    for (int cells = 0; cells < 2; ++cells) grid.take<Cell>(kCells);
    for (int list = 0; list < 3; ++list) grid.take<std::int32_t>(rows + 1);
    Groups(grid, rows);
    return std::max(sorted.bytes(), grid.bytes());
}

void pool_norms(const PatchedNorms& tokens, std::int64_t head, int window, float* out, Carver memory) {
    std::fill_n(out, tokens.norm.rows, 0.0f);
    const Grid grid(tokens, head, window / 2);
    if (grid.cells() <= kCells) pool_on_grid(tokens, grid, head, window, out, memory);
    else pool_sorted(tokens, head, window, out, memory);
}

}  // namespace edgevlm
