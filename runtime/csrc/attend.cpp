#include "attend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "arena.h"
#include "simd.h"
#include "threads.h"

namespace edgevlm {

namespace {

constexpr std::int64_t kKeys = TileKernels::kKeys;
constexpr std::int64_t kRows = 256;   // query rows of a KV head that share a tile, at most
constexpr std::int64_t kFew = 128;    // query rows of a KV head, up to which keys are lanes and the held rows split in spans
constexpr std::int64_t kSpan = 1024;  // held rows of a span
constexpr std::int64_t kMany = 128;   // keys of a tile for more rows than kFew, which are lanes themselves
constexpr float kUnseen = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;  // scores are powers of 2

// The softmax of rows so far: out, laid out as queries are, is divided by weight [rows] in the end.
struct State {
    float *out, *highest, *weight;

    State(BumpAllocator& memory, std::int64_t rows, std::int64_t columns)
        : out(memory.take<float>(rows * columns)), highest(memory.take<float>(rows)), weight(memory.take<float>(rows)) {}
};

struct Slot {
    float *query, *key, *value, *scores, *factor;  // [kRows, columns], a tile's keys and values, its scores, [kRows]

    Slot(BumpAllocator& memory, std::int64_t columns)
        : query(memory.take<float>(kRows * columns)), key(memory.take<float>(kMany * columns)),
          value(memory.take<float>(kMany * columns)), scores(memory.take<float>(kMany * kKeys)), factor(memory.take<float>(kRows)) {}
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
          heads_(call.key.heads), rows_(call.rows * call.group), lanes_(rows_ > kFew ? simd().attention.rows : 1),
          keys_(rows_ > kFew ? kMany : kKeys) {}

    void run() {
        append();
        std::int64_t blocks = (rows_ + kRows - 1) / kRows;
        for (const std::int64_t least = blocks; lanes_ > 1 && blocks < 2 * least && heads_ * blocks % call_.threads;) ++blocks;
        const std::int64_t most = ((rows_ + blocks - 1) / blocks + lanes_ - 1) / lanes_ * lanes_;  // rows of a task
        blocks = (rows_ + most - 1) / most;
        std::int64_t spans = 1;  // the last one is the call's own rows
        for (std::int64_t head = 0; rows_ <= kFew && head < heads_; ++head) spans = std::max(spans, 1 + (seen(head) + kSpan - 1) / kSpan);
        const std::int64_t tasks = heads_ * blocks * spans;
        const auto workers = static_cast<int>(std::min<std::int64_t>(call_.threads, tasks));
        BumpAllocator slot_sizes, state_sizes;
        Slot(slot_sizes, columns_);
        State(state_sizes, most, columns_);
        const std::size_t slot = slot_sizes.bytes(), state = state_sizes.bytes();
        std::byte* const memory = workspace(slot * workers + state * tasks);
        const auto state_of = [&](std::int64_t task) {
            BumpAllocator of(memory + slot * workers + state * task);
            return State(of, most, columns_);
        };
        parallel_for(tasks, workers, [&](std::int64_t task, int worker) {
            BumpAllocator of(memory + slot * worker);
            const std::int64_t span = task % spans, first = task / spans % blocks * most;
            Part part{Slot(of, columns_), state_of(task), task / (blocks * spans), first, std::min(most, rows_ - first)};
            begin(part);
            if (call_.frame && span + 1 == spans) see_previous(part);
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
    std::int64_t end_of(std::int64_t token) const { return call_.until ? call_.until[token] : token + 1; }
    std::int64_t frame_of(std::int64_t token) const { return call_.frame ? token / call_.frame * call_.frame : 0; }
    // Where a part's row begins, whose numbers are lanes_ apart: rows lie one by one, or as [columns, lanes] of lanes_ rows.
    std::int64_t at(std::int64_t r) const { return r / lanes_ * lanes_ * columns_ + r % lanes_; }
    std::int64_t offset(std::int64_t head, std::int64_t row) const {  // of a row of query and out
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
        const float scale = kLog2E / std::sqrt(static_cast<float>(width_));
        const std::int64_t all = (part.count + lanes_ - 1) / lanes_ * lanes_;
        std::fill_n(part.slot.query, all * columns_, 0.0f);
        for (std::int64_t r = 0; r < part.count; ++r) {
            const float* const row = call_.query + offset(part.head, part.first + r);
            for (std::int64_t d = 0; d < width_; ++d) part.slot.query[at(r) + d * lanes_] = row[d] * scale;
        }
        std::fill_n(part.state.out, all * columns_, 0.0f);
        std::fill_n(part.state.highest, all, std::numeric_limits<float>::lowest());  // not infinite: a row may see nothing
        std::fill_n(part.state.weight, all, 0.0f);
    }

    // The rows of the frame before, one each: what a softmax begins with.
    void see_previous(const Part& part) const {
        for (std::int64_t r = 0; r < part.count; ++r) {
            const std::int64_t own = token(part, r), held = call_.held[part.head], before = own - call_.frame;
            const std::int64_t row = before < 0 ? call_.previous[part.head * call_.frame + own] : held + before;
            if (row < 0) continue;
            simd().rows<T>().load(call_.key.row(part.head, row), width_, part.slot.key);
            simd().rows<T>().load(call_.value.row(part.head, row), width_, part.slot.value);
            float score = call_.bias.data && row < held ? call_.bias.at(part.head, row) * kLog2E : 0;
            for (std::int64_t d = 0; d < width_; ++d) {
                score += part.slot.query[at(r) + d * lanes_] * part.slot.key[d];
                part.state.out[at(r) + d * lanes_] = part.slot.value[d];
            }
            part.state.highest[r] = score;
            part.state.weight[r] = 1;
        }
    }

    // Held rows [first, last) of those seen.
    void see_held(const Part& part, std::int64_t first, std::int64_t last) const {
        const std::int32_t* const listed = call_.listed ? call_.listed[part.head].of(0) : nullptr;
        for (; first < last; first += keys_) {
            const std::int64_t count = std::min(keys_, last - first);
            const auto row = [=](std::int64_t i) { return listed ? listed[first + i] : first + i; };
            const auto old = [&](std::int64_t i, std::int64_t r) {
                return call_.position.at(part.head, row(i)) <= call_.place[token(part, std::min(r, part.count - 1))] - call_.window;
            };
            std::int64_t unseen = 0;
            while (call_.window && unseen < count && old(unseen, 0)) ++unseen;
            if (unseen == count) continue;
            see(part, row, count, 0, [&](std::int64_t at, std::int64_t rows, float* scores, std::int64_t across, std::int64_t along) {
                for (std::int64_t i = 0; call_.bias.data && i < count; ++i) {
                    const float bias = call_.bias.at(part.head, row(i)) * kLog2E;
                    for (std::int64_t r = 0; r < rows; ++r) scores[r * across + i * along] += bias;
                }
                for (std::int64_t i = 0; call_.window && i < count; ++i) {
                    for (std::int64_t r = 0; r < rows; ++r) {
                        if (old(i, at + r)) scores[r * across + i * along] = kUnseen;
                    }
                }
            });
        }
    }

    // The rows of the call, each up to itself or the end of its frame.
    void see_own(const Part& part) const {
        const std::int64_t last = end_of(token(part, part.count - 1)), held = call_.held[part.head];
        for (std::int64_t first = frame_of(token(part, 0)) / keys_ * keys_; first < last; first += keys_) {
            const std::int64_t count = std::min(keys_, last - first);
            std::int64_t from = std::max<std::int64_t>(0, first * call_.group - part.first);  // rows before see none of these
            while (from > 0 && end_of(token(part, from - 1)) > first) --from;
            const auto row = [=](std::int64_t i) { return held + first + i; };
            see(part, row, count, from, [&](std::int64_t at, std::int64_t rows, float* scores, std::int64_t across, std::int64_t along) {
                for (std::int64_t r = 0; r < rows; ++r) {
                    const std::int64_t own = token(part, std::min(at + r, part.count - 1)), start = frame_of(own) - first;
                    for (std::int64_t i = 0; i < std::min(start, count); ++i) scores[r * across + i * along] = kUnseen;
                    for (std::int64_t i = 0; call_.window && i < std::min(own - first, count); ++i) {
                        if (end_of(first + i) != end_of(own) && call_.place[first + i] <= call_.place[own] - call_.window)
                            scores[r * across + i * along] = kUnseen;
                    }
                    for (std::int64_t i = std::max<std::int64_t>(0, end_of(own) - first); i < count; ++i) scores[r * across + i * along] = kUnseen;
                }
            });
        }
    }

    // Rows [from, ..) of a part meet a tile, the memory's rows row(0 .. count - 1); mask(r, rows, scores, across, along) changes the
    // scores of rows [r, r + rows), which are `across` apart from row to row and `along` from key to key.
    template <typename Place, typename Mask>
    void see(const Part& part, Place&& row, std::int64_t count, std::int64_t from, Mask&& mask) const {
        const T* keys[kMany];
        const T* values[kMany];
        for (std::int64_t i = 0; i < count; ++i) {
            keys[i] = call_.key.at(part.head, row(i));
            values[i] = call_.value.at(part.head, row(i));
        }
        const Slot& slot = part.slot;
        const auto [value, stride] = floats(values, call_.value.row(part.head, 0).scale, count, slot.value);
        if (lanes_ > 1) {
            const auto& lanes = simd().attention;
            const auto [key, key_stride] = floats(keys, call_.key.row(part.head, 0).scale, count, slot.key);
            for (std::int64_t r = from / lanes_ * lanes_; r < part.count; r += lanes_) {
                lanes.scores(key, key_stride, count, slot.query + at(r), width_, slot.scores);
                mask(r, lanes_, slot.scores, 1, lanes_);
                lanes.soften(slot.scores, count, part.state.highest + r, part.state.weight + r, slot.factor);
                lanes.gather(value, stride, count, slot.scores, slot.factor, width_, part.state.out + at(r));
            }
            return;
        }
        const auto& tiles = simd().tiles;
        simd().rows<T>().turn(keys, call_.key.row(part.head, 0).scale, ahead(), count, width_, slot.key);
        const std::int64_t columns = (count + tiles.lanes - 1) / tiles.lanes * tiles.lanes;
        for (std::int64_t r = from; r < part.count; r += tiles.rows) {
            const std::int64_t rows = std::min(tiles.rows, part.count - r);
            tiles.multiply(slot.query + at(r), columns_, rows, slot.key, kKeys, width_, columns, nullptr, slot.scores, kKeys);
            mask(r, rows, slot.scores, kKeys, 1);
            for (std::int64_t i = 0; i < rows; ++i) {
                std::fill(slot.scores + i * kKeys + count, slot.scores + (i + 1) * kKeys, kUnseen);
                slot.factor[i] = tiles.soften(slot.scores + i * kKeys, part.state.highest + r + i, part.state.weight + r + i);
            }
            tiles.multiply(slot.scores, kKeys, rows, value, stride, count, columns_, slot.factor, part.state.out + at(r), columns_);
        }
    }

    std::int64_t ahead() const { return call_.listed ? 0 : keys_ * call_.key.row_stride; }

    // A tile's rows as float32 and their stride: as they lie, or converted.
    std::pair<const float*, std::int64_t> floats(const T* const* rows, const float* scale, std::int64_t count, float* converted) const {
        if constexpr (std::is_same_v<T, float>) {  // what many rows read is copied: that asks for the next tile
            const std::int64_t apart = count > 1 ? rows[1] - rows[0] : columns_;
            if (lanes_ == 1 && columns_ == width_ && !call_.listed) return {rows[0], apart};
        }
        simd().rows<T>().load_rows(rows, scale, ahead(), count, width_, converted, columns_);
        return {converted, columns_};
    }

    void join(const State& part, const State& all) const {
        for (std::int64_t r = 0; r < rows_; ++r) {
            const float highest = std::max(part.highest[r], all.highest[r]);
            const float ours = std::exp2(all.highest[r] - highest), theirs = std::exp2(part.highest[r] - highest);
            all.highest[r] = highest;
            all.weight[r] = all.weight[r] * ours + part.weight[r] * theirs;
            for (std::int64_t d = r * columns_; d < r * columns_ + width_; ++d) all.out[d] = all.out[d] * ours + part.out[d] * theirs;
        }
    }

    void finish(std::int64_t head, std::int64_t first, std::int64_t count, const State& state) const {
        for (std::int64_t r = 0; r < count; ++r) {
            const float inverse = 1 / state.weight[r];
            float* const row = call_.out + offset(head, first + r);
            for (std::int64_t d = 0; d < width_; ++d) row[d] = state.out[at(r) + d * lanes_] * inverse;
        }
    }

    const AttendCall<T>& call_;
    std::int64_t width_, columns_, heads_, rows_, lanes_, keys_;
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
