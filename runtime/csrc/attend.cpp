#include "attend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "arena.h"
#include "simd.h"
#include "threads.h"

namespace edgevlm {

namespace {

constexpr std::int64_t kKeys = TileKernels::kKeys;
constexpr std::int64_t kRows = 128;   // query rows of a KV head that share a tile
constexpr std::int64_t kFew = 64;     // query rows of a KV head, up to which the held rows are split in spans
constexpr std::int64_t kSpan = 1024;  // held rows of a span
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// The softmax of rows so far: out [rows, columns] is divided by weight [rows] in the end.
struct State {
    float *out, *highest, *weight;

    State(BumpAllocator& memory, std::int64_t rows, std::int64_t columns)
        : out(memory.take<float>(rows * columns)), highest(memory.take<float>(rows)), weight(memory.take<float>(rows)) {}
};

struct Slot {
    float *query, *turned, *value, *scores, *factor;  // [kRows, D], [D, kKeys], [kKeys, columns], [kRows, kKeys], [kRows]

    Slot(BumpAllocator& memory, std::int64_t width, std::int64_t columns)
        : query(memory.take<float>(kRows * width)), turned(memory.take<float>(width * kKeys)),
          value(memory.take<float>(kKeys * columns)), scores(memory.take<float>(kRows * kKeys)), factor(memory.take<float>(kRows)) {}
};

// Grows to the largest call of its thread, and is kept: a token needs it once a layer.
std::byte* workspace(std::size_t bytes) {
    thread_local Block block;
    thread_local std::size_t size = 0;
    if (bytes > size) {
        block.reset();
        size = 0;
        block = loose_heap().allocate(bytes);
        size = bytes;
    }
    return block.get();
}

template <typename T>
class Attention {
public:
    explicit Attention(const AttendCall<T>& call)
        : call_(call), width_(call.key.width), columns_((width_ + simd().tiles.lanes - 1) / simd().tiles.lanes * simd().tiles.lanes),
          heads_(call.key.heads), rows_(call.rows * call.group) {}

    void run() {
        append();
        const std::int64_t blocks = (rows_ + kRows - 1) / kRows, most = std::min(rows_, kRows);
        std::int64_t spans = 1;  // the last one is the call's own rows
        for (std::int64_t head = 0; rows_ <= kFew && head < heads_; ++head) spans = std::max(spans, 1 + (seen(head) + kSpan - 1) / kSpan);
        const std::int64_t tasks = heads_ * blocks * spans;
        const auto workers = static_cast<int>(std::min<std::int64_t>(call_.threads, tasks));
        BumpAllocator slot_sizes, state_sizes;
        Slot(slot_sizes, width_, columns_);
        State(state_sizes, most, columns_);
        const std::size_t slot = slot_sizes.bytes(), state = state_sizes.bytes();
        std::byte* const memory = workspace(slot * workers + state * tasks);
        const auto state_of = [&](std::int64_t task) {
            BumpAllocator of(memory + slot * workers + state * task);
            return State(of, most, columns_);
        };
        parallel_for(tasks, workers, [&](std::int64_t task, int worker) {
            BumpAllocator of(memory + slot * worker);
            const std::int64_t span = task % spans, first = task / spans % blocks * kRows;
            Part part{Slot(of, width_, columns_), state_of(task), task / (blocks * spans), first, std::min(kRows, rows_ - first)};
            begin(part);
            if (span + 1 < spans) return see_held(part, span * kSpan, std::min(seen(part.head), (span + 1) * kSpan));
            if (spans == 1) see_held(part, 0, seen(part.head));
            see_own(part);
            if (spans == 1) finish(part.head, part.first, part.count, part.state);
        });
        for (std::int64_t task = 0; spans > 1 && task < tasks; task += spans) {
            const State all = state_of(task);
            for (std::int64_t span = 1; span < spans; ++span) join(state_of(task + span), all);
            finish(task / spans, 0, rows_, all);
        }
    }

private:
    struct Part {  // rows [first, first + count) of a KV head: row r is token r / group, query head r % group
        Slot slot;
        State state;
        std::int64_t head, first, count;
    };

    std::int64_t seen(std::int64_t head) const {
        if (call_.frame) return call_.shared;
        return call_.listed ? call_.listed[head].rows : call_.held[head];
    }
    std::int64_t token(const Part& part, std::int64_t r) const { return (part.first + r) / call_.group; }
    std::int64_t frame_of(std::int64_t token) const { return call_.frame ? token / call_.frame * call_.frame : 0; }
    std::int64_t place(std::int64_t head, std::int64_t row) const {  // of a row of query and out
        return ((row / call_.group * heads_ + head) * call_.group + row % call_.group) * width_;
    }

    void append() {
        const auto store = simd().rows<T>().store;
        const auto at = [](const Volume<T>& memory, std::int64_t head, std::int64_t row) { return const_cast<T*>(memory.at(head, row)); };
        for (std::int64_t s = 0; s < call_.rows; ++s) {
            for (std::int64_t head = 0; head < heads_; ++head) {
                const std::int64_t from = (s * heads_ + head) * width_, row = call_.held[head] + s;
                store(call_.new_key + from, call_.key.row(head, row).scale, width_, at(call_.key, head, row));
                store(call_.new_value + from, call_.value.row(head, row).scale, width_, at(call_.value, head, row));
            }
        }
    }

    void begin(const Part& part) const {
        const float scale = 1 / std::sqrt(static_cast<float>(width_));
        for (std::int64_t r = 0; r < part.count; ++r) {
            const float* const row = call_.query + place(part.head, part.first + r);
            std::transform(row, row + width_, part.slot.query + r * width_, [=](float x) { return x * scale; });
        }
        std::fill_n(part.state.out, part.count * columns_, 0.0f);
        std::fill_n(part.state.highest, part.count, std::numeric_limits<float>::lowest());  // not infinite: a row may see nothing
        std::fill_n(part.state.weight, part.count, 0.0f);
    }

    // Held rows [first, last) of those seen.
    void see_held(const Part& part, std::int64_t first, std::int64_t last) const {
        const std::int32_t* const listed = call_.listed ? call_.listed[part.head].of(0) : nullptr;
        for (; first < last; first += kKeys) {
            const std::int64_t count = std::min(kKeys, last - first);
            const T* keys[kKeys];
            const T* values[kKeys];
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int64_t row = listed ? listed[first + i] : first + i;
                keys[i] = call_.key.at(part.head, row);
                values[i] = call_.value.at(part.head, row);
            }
            see(part, keys, values, count, 0, part.count, [&](std::int64_t, float* scores) {
                for (std::int64_t i = 0; call_.bias.data && i < count; ++i)
                    scores[i] += call_.bias.at(part.head, listed ? listed[first + i] : first + i);
                std::fill(scores + count, scores + kKeys, kUnseen);
            });
        }
    }

    // The rows of the call, each up to itself; then those of the frame before.
    void see_own(const Part& part) const {
        const std::int64_t last = token(part, part.count - 1) + 1, held = call_.held[part.head];
        for (std::int64_t first = frame_of(token(part, 0)) / kKeys * kKeys; first < last; first += kKeys) {
            const std::int64_t count = std::min(kKeys, last - first);
            const T* keys[kKeys];
            const T* values[kKeys];
            for (std::int64_t i = 0; i < count; ++i) {
                keys[i] = call_.key.at(part.head, held + first + i);
                values[i] = call_.value.at(part.head, held + first + i);
            }
            const std::int64_t from = std::max<std::int64_t>(0, first * call_.group - part.first);  // rows before see none of these
            see(part, keys, values, count, from, part.count, [&](std::int64_t r, float* scores) {
                const std::int64_t own = token(part, r), start = std::clamp<std::int64_t>(frame_of(own) - first, 0, kKeys);
                std::fill(scores, scores + start, kUnseen);
                std::fill(scores + std::min(kKeys, own + 1 - first), scores + kKeys, kUnseen);
            });
        }
        for (std::int64_t r = 0; call_.frame && r < part.count; ++r) see_previous(part, r);
    }

    void see_previous(const Part& part, std::int64_t r) const {
        const std::int64_t own = token(part, r), held = call_.held[part.head], before = own - call_.frame;
        const std::int64_t row = before < 0 ? call_.previous[part.head * call_.frame + own] : held + before;
        if (row < 0) return;
        const T *const key = call_.key.at(part.head, row), *const value = call_.value.at(part.head, row);
        see(part, &key, &value, 1, r, r + 1, [&](std::int64_t, float* scores) {
            if (call_.bias.data && row < held) scores[0] += call_.bias.at(part.head, row);
            std::fill(scores + 1, scores + kKeys, kUnseen);
        });
    }

    // Rows [from, to) of a part meet a tile; mask(r, scores [kKeys]) changes the scores of row r.
    template <typename Mask>
    void see(const Part& part, const T* const* keys, const T* const* values, std::int64_t count, std::int64_t from, std::int64_t to,
             Mask&& mask) const {
        const auto& tiles = simd().tiles;
        const Slot& slot = part.slot;
        const std::int64_t ahead = call_.listed ? 0 : kKeys * call_.key.row_stride;
        simd().rows<T>().turn(keys, call_.key.row(part.head, 0).scale, ahead, count, width_, slot.turned);
        const float* value = slot.value;
        std::int64_t stride = columns_;
        if constexpr (std::is_same_v<T, float>) {
            const std::int64_t apart = count > 1 ? values[1] - values[0] : columns_;
            if (columns_ == width_ && values[count - 1] - values[0] == (count - 1) * apart && !call_.listed) value = values[0], stride = apart;
        }
        if (value == slot.value)
            simd().rows<T>().load_rows(values, call_.value.row(part.head, 0).scale, ahead, count, width_, slot.value, columns_);
        const std::int64_t columns = (count + tiles.lanes - 1) / tiles.lanes * tiles.lanes;
        for (std::int64_t r = from; r < to; r += tiles.rows) {
            const std::int64_t rows = std::min(tiles.rows, to - r);
            tiles.multiply(slot.query + r * width_, width_, rows, slot.turned, kKeys, width_, columns, nullptr, slot.scores, kKeys);
            for (std::int64_t i = 0; i < rows; ++i) {
                mask(r + i, slot.scores + i * kKeys);
                slot.factor[i] = tiles.soften(slot.scores + i * kKeys, part.state.highest + r + i, part.state.weight + r + i);
            }
            tiles.multiply(slot.scores, kKeys, rows, value, stride, count, columns_, slot.factor, part.state.out + r * columns_, columns_);
        }
    }

    void join(const State& part, const State& all) const {
        for (std::int64_t r = 0; r < rows_; ++r) {
            const float highest = std::max(part.highest[r], all.highest[r]);
            const float ours = std::exp(all.highest[r] - highest), theirs = std::exp(part.highest[r] - highest);
            all.highest[r] = highest;
            all.weight[r] = all.weight[r] * ours + part.weight[r] * theirs;
            for (std::int64_t d = r * columns_; d < r * columns_ + width_; ++d) all.out[d] = all.out[d] * ours + part.out[d] * theirs;
        }
    }

    void finish(std::int64_t head, std::int64_t first, std::int64_t count, const State& state) const {
        for (std::int64_t r = 0; r < count; ++r) {
            const float inverse = 1 / state.weight[r];
            const float* const row = state.out + r * columns_;
            std::transform(row, row + width_, call_.out + place(head, first + r), [=](float x) { return x * inverse; });
        }
    }

    const AttendCall<T>& call_;
    std::int64_t width_, columns_, heads_, rows_;
};

}  // namespace

template <typename T>
void attend(const AttendCall<T>& call) {
    if (call.rows) Attention<T>(call).run();
}

template void attend(const AttendCall<float>&);
template void attend(const AttendCall<Half>&);
template void attend(const AttendCall<Int8>&);

}  // namespace edgevlm
