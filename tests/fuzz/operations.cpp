// Random operations on caches, clusters, memory and calls at work on it, each beside a plain account of the same, compared after
// each. Without Python, so that ten million take minutes: `tests/sanitize.sh operations [count] [seed]` builds and runs it.
// What keys and values become by turning and rounding is the Python tests' to say: here their bytes are taken as they come.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "access.h"
#include "cache.h"
#include "cache_rows.h"
#include "hash_clusters.h"
#include "index_of.h"
#include "kinds.h"
#include "threads.h"

using namespace edgevlm;
using i64 = std::int64_t;

static i64 seed = 0, sequence = 0;
static std::map<std::string, i64> done;
static std::mt19937_64 source;

#define CHECK(holds) \
    if (!(holds)) std::fprintf(stderr, "line %d, sequence %ld of seed %ld: not %s\n", __LINE__, sequence, seed, #holds), std::abort()

static i64 below(i64 count) { return static_cast<i64>(source() % static_cast<std::uint64_t>(count)); }
static bool one_in(i64 count) { return below(count) == 0; }
static float number() { return static_cast<float>(below(2001) - 1000) / 500; }
static std::int32_t place() { return static_cast<std::int32_t>(below(one_in(9) ? i64{1} << 31 : 60)); }

template <typename F>
static bool refused(F&& f) {
    try {
        f();
    } catch (const Misuse&) {
        return true;
    }
    return false;
}

struct Token {  // one row of one head
    std::vector<std::byte> key, value;
    std::uint8_t kind;
    i64 seq;
    std::int32_t frame, confirmed;
    std::int16_t row, col;
    std::vector<std::int32_t> position;

    bool operator==(const Token& o) const {
        return std::tie(key, value, kind, seq, frame, confirmed, row, col, position) ==
               std::tie(o.key, o.value, o.kind, o.seq, o.frame, o.confirmed, o.row, o.col, o.position);
    }
};

struct Coming {  // rows, in arrays no longer than they must be
    std::vector<std::uint8_t> kind;
    std::vector<i64> seq;
    std::vector<std::int32_t> frame, confirmed, position;
    std::vector<std::int16_t> row, col;
    bool wrong = false;

    Coming(i64 count, i64 axes) {
        for (i64 i = 0; i < count; ++i) {
            kind.push_back(one_in(4) ? kPrefix : kVision), seq.push_back(below(200)), frame.push_back(below(9));
            row.push_back(below(5) - 1), col.push_back(below(5) - 1), confirmed.push_back(below(9));
            for (i64 a = 0; a < axes; ++a) position.push_back(place());
        }
        if ((wrong = count && one_in(30))) position[below(count * axes)] = -1;
    }
    Rows rows() const {
        return {static_cast<i64>(seq.size()), kind.data(), seq.data(), frame.data(), row.data(), col.data(), position.data()};
    }
};

class Beside {  // a cache and, for each layer and head, its rows
public:
    Beside() : shape_(some_shape()), cache_(shape_), held_(layers() * heads()) {}

    void step() {
        using Step = void (Beside::*)();
        constexpr std::array<Step, 12> all{&Beside::add,     &Beside::add,    &Beside::mark,  &Beside::rollback,
                                           &Beside::evict,   &Beside::evict,  &Beside::shift, &Beside::reindex,
                                           &Beside::confirm, &Beside::append, &Beside::load,  &Beside::spoil};
        (this->*all[below(all.size())])();
        CHECK(cache_.allocations() == 1);
        for (i64 l = 0; l < layers(); ++l) {
            for (i64 head = 0; head < heads(); ++head) CHECK(now(l, head) == held(l, head));
        }
        const std::array<const char*, 3> names{"fp32", "fp16", "int8"};
        ++done[std::string("cache ") + names[static_cast<int>(shape_.dtype)]];
    }

private:
    static Shape some_shape() {
        Shape shape{1 + below(3), 2 * (1 + below(6)), one_in(2) ? 1 : 3, {}, {}, {}, static_cast<DType>(below(3)), 2, {}, {}};
        for (i64 l = 1 + below(3); l > 0; --l) shape.capacities.push_back(1 + below(24));
        const auto pairs = static_cast<std::int32_t>(shape.head_dim / 2);
        for (std::int32_t p = 0; p < pairs; ++p) shape.inv_freq.push_back(1.0 / (1 + 9 * p));
        if (!one_in(10)) shape.runs = {{0, 0, pairs / 2}, {static_cast<std::int32_t>(shape.axes - 1), pairs / 2, pairs}};
        if (shape.dtype == DType::int8) shape.value_scale.assign(shape.capacities.size() * shape.kv_heads * shape.head_dim, 0.1f);
        shape.key_scale = shape.value_scale;
        return shape;
    }

    i64 layers() const { return static_cast<i64>(shape_.capacities.size()); }
    i64 heads() const { return shape_.kv_heads; }
    std::vector<Token>& held(i64 l, i64 head) { return held_[l * heads() + head]; }
    i64 length(i64 l) { return static_cast<i64>(held(l, 0).size()); }
    void restructured() { stale_.insert(stale_.end(), marks_.begin(), marks_.end()), marks_.clear(); }
    std::size_t bytes() const { return shape_.head_dim * element_size(shape_.dtype); }
    std::vector<std::byte> random_bytes(i64 rows) {
        std::vector<std::byte> all(rows * bytes());
        all.reserve(1);  // memcpy wants an address of nothing, too
        for (auto& one : all) one = static_cast<std::byte>(below(60));  // in floating point, too, small numbers
        return all;
    }
    Token token(const Coming& from, i64 i, std::int32_t confirmed, const std::byte* key, const std::byte* value) const {
        const auto at = from.position.begin() + i * shape_.axes;
        return {{key, key + bytes()}, {value, value + bytes()}, from.kind[i], from.seq[i], from.frame[i], confirmed, from.row[i], from.col[i], {at, at + shape_.axes}};
    }
    std::vector<Token> now(i64 l, i64 head) const {  // what the cache holds
        const Layer& layer = cache_.layer(l);
        std::vector<Token> rows;
        for (i64 at = head * layer.capacity; at < head * layer.capacity + layer.length; ++at) {
            const std::byte *const key = layer.key + at * bytes(), *const value = layer.value + at * bytes();
            const std::int32_t* const position = layer.position + at * shape_.axes;
            rows.push_back({{key, key + bytes()}, {value, value + bytes()}, layer.kind[at], layer.seq[at], layer.frame[at],
                            layer.confirmed[at], layer.row[at], layer.col[at], {position, position + shape_.axes}});
        }
        return rows;
    }
    // Adds rows to the account, keys and values as the cache has them behind its own.
    void take(i64 l, const Coming& coming) {
        const Layer& layer = cache_.layer(l);
        for (i64 head = 0; head < heads(); ++head) {
            for (i64 i = 0; i < static_cast<i64>(coming.seq.size()); ++i) {
                const std::size_t at = (head * layer.capacity + held(l, head).size()) * bytes();
                const std::byte *const key = layer.key + at, *const value = layer.value + at;
                held(l, head).push_back(token(coming, i, coming.frame[i], key, value));
            }
        }
    }

    void add() {
        const i64 n = below(7);
        bool fits = true;
        for (i64 l = 0; l < layers(); ++l) fits = fits && length(l) + n <= shape_.capacities[l];
        CHECK(refused([&] { cache_.reserve(n); }) == !fits);
        if (!fits) return;
        CHECK(refused([&] { cache_.mark(); }));
        spoil();  // what an engine writes
        const Coming coming(n, shape_.axes);
        if (one_in(5) || refused([&] { cache_.commit(coming.rows()); })) return cache_.abort();
        CHECK(!coming.wrong);
        for (i64 l = 0; l < layers(); ++l) take(l, coming);
    }
    void spoil() {  // rows that are free are anybody's
        for (i64 l = 0; l < layers(); ++l) {
            const Layer& layer = cache_.layer(l);
            for (i64 head = 0; head < heads(); ++head) {
                const i64 at = head * layer.capacity + layer.length, free = layer.capacity - layer.length;
                for (std::byte* part : {layer.key, layer.value}) {
                    const auto some = random_bytes(free);
                    std::copy(some.begin(), some.end(), part + at * bytes());
                }
            }
        }
    }
    void mark() {
        marks_.push_back({cache_.mark(), {}});
        for (const auto& rows : held_) marks_.back().second.push_back(rows.size());
    }
    void rollback() {
        if (!stale_.empty()) CHECK(refused([&] { cache_.rollback(stale_[below(stale_.size())].first); }));
        if (marks_.empty()) return;
        const auto [chosen, then] = marks_[below(marks_.size())];
        cache_.rollback(chosen);
        for (std::size_t i = 0; i < held_.size(); ++i) held_[i].resize(then[i]);
        const auto stands = [&](const auto& other) { return other.second[0] <= held_[0].size(); };
        const auto gone = std::stable_partition(marks_.begin(), marks_.end(), stands);
        stale_.insert(stale_.end(), gone, marks_.end()), marks_.erase(gone, marks_.end());
    }
    void evict() {
        std::vector<std::vector<std::uint8_t>> masks(layers());
        std::vector<std::optional<Mask>> keep(layers());
        bool wrong = false;
        for (i64 l = 0; l < layers(); ++l) {
            const i64 n = length(l), kept = below(n + 1);
            if (one_in(3)) continue;
            for (i64 head = 0; head < heads(); ++head) {
                const bool uneven = head && kept < n && one_in(20);
                std::vector<std::uint8_t> one(n);
                std::fill_n(one.begin(), kept + uneven, 1 + below(255));
                std::shuffle(one.begin(), one.end(), source);
                masks[l].insert(masks[l].end(), one.begin(), one.end()), wrong = wrong || uneven;
            }
            keep[l] = Mask{reinterpret_cast<const std::byte*>(masks[l].data()), n, heads(), n};
        }
        i64 gone = 0, evicted = 0;
        CHECK(refused([&] { evicted = cache_.evict(keep); }) == wrong);
        for (i64 l = 0; l < layers() && !wrong; ++l) {
            for (i64 head = 0; head < heads() && keep[l]; ++head) {  // the first hole takes the first survivor behind what stays
                auto& rows = held(l, head);
                const i64 n = static_cast<i64>(rows.size());
                const auto mask = masks[l].begin() + head * n;
                const i64 kept = n - std::count(mask, mask + n, 0);
                for (i64 hole = 0, survivor = kept; hole < kept; ++hole) {
                    if (mask[hole]) continue;
                    while (!mask[survivor]) ++survivor;
                    rows[hole] = rows[survivor++];
                }
                rows.resize(kept), gone += head ? 0 : n - kept;
            }
        }
        CHECK(gone == evicted);
        if (gone) restructured();
    }

    // Layer l has new positions, head by head [n, axes]: keys that moved are taken as they are.
    void turned(i64 l, const std::vector<std::int32_t>& to) {
        auto next = to.begin();
        bool moved = false;
        for (i64 head = 0; head < heads(); ++head) {
            const auto rows = now(l, head);
            for (std::size_t i = 0; i < rows.size(); ++i, next += shape_.axes) {
                Token& one = held(l, head)[i];
                if (std::equal(one.position.begin(), one.position.end(), next)) continue;
                one.position.assign(next, next + shape_.axes), one.key = rows[i].key, moved = true;
            }
        }
        if (moved) restructured();
    }
    void shift() {
        const i64 l = below(layers()), n = length(l), axes = shape_.axes;
        std::vector<std::int32_t> to(heads() * n * axes);
        std::generate(to.begin(), to.end(), place);
        const bool wrong = !to.empty() && one_in(20);
        if (wrong) to[below(to.size())] = -3;
        const bool no = refused([&] {
            cache_.shift(l, {reinterpret_cast<const std::byte*>(to.data()), n * axes * 4, axes * 4, heads(), n, axes});
        });
        CHECK(no == (wrong || shape_.runs.empty()));
        if (!no) turned(l, to);
    }
    void reindex() {
        const i64 prefix = below(12);
        i64 next = 0, following = 0;
        std::vector<std::vector<std::int32_t>> to(layers());
        for (std::size_t i = 0; i < held_.size(); ++i) {
            std::array<std::set<i64>, 3> later;
            for (const bool known : {false, true}) {
                for (const Token& one : held_[i]) {
                    for (i64 a = 0; a < shape_.axes; ++a) {
                        i64 at = one.position[a];
                        if (!known && at >= prefix) later[a].insert(at);
                        if (!known) continue;
                        if (at >= prefix) at = prefix + std::distance(later[a].begin(), later[a].find(at));
                        to[i / heads()].push_back(static_cast<std::int32_t>(at)), next = std::max(next, at + 1);
                    }
                }
            }
        }
        const bool no = refused([&] { following = cache_.reindex(prefix); });
        CHECK(no == shape_.runs.empty() && (no || following == next));
        for (i64 l = 0; l < layers() && !no; ++l) turned(l, to[l]);
    }
    void confirm() {
        const i64 high = 1 + below(4), wide = 1 + below(4);
        const auto frame = static_cast<std::int32_t>(below(99));
        std::vector<i64> seq(high * wide);
        std::generate(seq.begin(), seq.end(), [] { return below(200); });
        cache_.confirm({reinterpret_cast<const std::byte*>(seq.data()), wide * 8, high, wide}, frame);
        for (auto& rows : held_) {
            for (Token& one : rows) {
                const bool inside = one.row >= 0 && one.row < high && one.col >= 0 && one.col < wide;
                if (one.kind == kVision && inside && seq[one.row * wide + one.col] == one.seq) one.confirmed = frame;
            }
        }
    }
    void append() {
        const i64 l = below(layers()), n = below(3), gap = shape_.head_dim + below(3);
        const Coming coming(n, shape_.axes);
        std::vector<float> rows(heads() * n * gap);
        std::generate(rows.begin(), rows.end(), number);
        const Volume<float> both{reinterpret_cast<const std::byte*>(rows.data()), n * gap * 4, gap * 4, heads(), n, shape_.head_dim};
        const bool no = refused([&] { cache_.append(l, both, both, coming.rows()); });
        CHECK(no == (coming.wrong || length(l) + n > shape_.capacities[l]));
        if (no || !n) return;
        take(l, coming), restructured();
    }
    void load() {
        const i64 l = below(layers()), n = below(shape_.capacities[l] + 2);
        const Coming coming(heads() * n, shape_.axes);
        const auto key = random_bytes(heads() * n), value = random_bytes(heads() * n);
        const Rows rows = coming.rows();
        const bool no = refused([&] {
            cache_.load(l, {n, key.data(), value.data(), rows.kind, rows.seq, rows.frame, rows.row, rows.col, rows.position,
                            coming.confirmed.data()});
        });
        CHECK(no == (coming.wrong || n > shape_.capacities[l]));
        for (i64 i = 0; i < heads() * n && !no; ++i) {
            auto& at = held(l, i / n);
            if (i % n == 0) at.clear();
            at.push_back(token(coming, i, coming.confirmed[i], &key[i * bytes()], &value[i * bytes()]));
        }
        for (i64 head = 0; head < heads() && !no && !n; ++head) held(l, head).clear();
        if (!no) restructured();
    }

    Shape shape_;
    Cache cache_;
    std::vector<std::vector<Token>> held_;
    std::vector<std::pair<Mark, std::vector<std::size_t>>> marks_, stale_;
};

class Joined {  // hash clusters of one head, and what each token's cluster is
public:
    Joined() : slots_(4 + below(30)), key_(slots_ * kWidth), place_(slots_), planes_(kWidth * kPlanes), bits_(slots_), count_(slots_),
               home_(2 * slots_), open_(slots_) {
        std::generate(planes_.begin(), planes_.end(), number);
    }

    void step() {
        const ClusterTable table{slots_, kWidth, 1, key_.data(), bits_.data(), count_.data(), open_.data(), place_.data()};
        const Lease memory(nullptr, cluster_scratch(table), 1);
        Clusters clusters(table, planes_.data(), home_.data(), memory.of(0));
        one_in(4) ? seal(clusters) : join(clusters);
        i64 open = 0;
        for (i64 s = 0; s < slots_; ++s) {
            std::array<double, kWidth> sum{};
            i64 count = 0;
            for (const One& one : tokens_) {
                if (one.slot != s) continue;
                ++count;
                for (i64 d = 0; d < kWidth; ++d) sum[d] += one.key[d];
            }
            CHECK(count == count_[s]);
            for (i64 d = 0; d < kWidth && count; ++d) CHECK(std::abs(sum[d] / count - key_[s * kWidth + d]) < 1e-3);
            CHECK(!count || bits_[s] == hash_bits(&key_[s * kWidth], planes_.data(), kWidth));
            open += count && open_[s];
        }
        CHECK(open <= slots_ / 2 && std::count(count_.begin(), count_.end(), 0) > 0);
        ++done["clusters"];
    }

private:
    static constexpr i64 kWidth = 5;
    struct One {
        std::array<float, kWidth> key;
        float place;
        std::int32_t slot;
    };

    void join(Clusters& clusters) {
        One one{{}, number(), 0};
        std::generate(one.key.begin(), one.key.end(), number);
        const i64 distance = below(14) - 1;
        const std::uint32_t bits = hash_bits(one.key.data(), planes_.data(), kWidth);
        i64 best = -1, least = 99, open = 0;
        for (i64 s = 0; s < slots_; ++s) {
            const i64 far = __builtin_popcount(bits ^ bits_[s]);
            if (!count_[s] || !open_[s]) continue;
            ++open;
            if (far < least) least = far, best = s;
        }
        if (least > distance && open < slots_ / 2) best = std::find(count_.begin(), count_.end(), 0) - count_.begin();
        one.slot = clusters.join(one.key.data(), &one.place, distance);
        CHECK(one.slot == best);
        for (One& other : tokens_) {
            if (home_[other.slot] >= 0) other.slot = home_[other.slot];  // sealed before, perhaps merged now
        }
        tokens_.push_back(one);
    }
    void seal(Clusters& clusters) {
        std::vector<float> keys, places;
        std::vector<std::int32_t> slot;
        std::vector<std::uint8_t> leaving;
        for (const One& one : tokens_) {
            keys.insert(keys.end(), one.key.begin(), one.key.end()), places.push_back(one.place);
            slot.push_back(open_[one.slot] ? one.slot : -1), leaving.push_back(open_[one.slot] && one_in(2));
        }
        clusters.seal(keys.data(), places.data(), slot.data(), leaving.data(), static_cast<i64>(slot.size()));
        for (std::size_t i = 0; i < tokens_.size(); ++i) {
            if (slot[i] < 0 || leaving[i]) tokens_[i].slot = home_[tokens_[i].slot + (leaving[i] ? slots_ : 0)];
        }
    }

    i64 slots_;
    std::vector<float> key_, place_, planes_;
    std::vector<std::uint32_t> bits_;
    std::vector<std::int32_t> count_, home_;
    std::vector<std::uint8_t> open_;
    std::vector<One> tokens_;
};

class Calls {  // at work on parts of one memory: refused where two meet and one of them changes it
public:
    void step() {
        Working& call = calls_[below(calls_.size())];
        if (one_in(5)) call = Working();
        const i64 first = below(60), size = 1 + below(12);
        const bool changes = one_in(3);
        bool meets = false;
        for (const Working& other : calls_) {
            for (const auto& [begin, end, changed] : other.ranges)
                meets = meets || ((changed || changes) && first < end && begin < first + size);
        }
        const bool no = refused([&] { changes ? call.access->changes(memory_ + first, size, "it") : call.access->reads(memory_ + first, size, "it"); });
        CHECK(no == meets);
        if (!no) call.ranges.push_back({first, first + size, changes});
        ++done["calls"];
    }

private:
    struct Range {
        i64 begin, end;
        bool changed;
    };
    struct Working {
        std::unique_ptr<Access> access = std::make_unique<Access>();
        std::vector<Range> ranges;
    };
    std::byte memory_[80];
    std::array<Working, 4> calls_;
};

static void carve() {  // a block cut into arrays, each filled to its last byte
    std::vector<std::size_t> sizes(1 + below(9));
    for (auto& size : sizes) size = below(300);
    std::vector<std::byte*> parts;
    const auto cut = [&](BumpAllocator memory) {
        parts.clear();
        for (const std::size_t size : sizes) parts.push_back(memory.take_rows(size, 3));
        return memory.bytes();
    };
    Heap heap;
    const Block block = heap.allocate(cut(BumpAllocator()));
    cut(BumpAllocator(block.get()));
    for (std::size_t i = 0; i < sizes.size(); ++i) std::fill_n(parts[i], 3 * sizes[i], static_cast<std::byte>(i + 1));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        CHECK(reinterpret_cast<std::uintptr_t>(parts[i]) % kAlignment == 0);
        CHECK(std::count(parts[i], parts[i] + 3 * sizes[i], static_cast<std::byte>(i + 1)) == static_cast<i64>(3 * sizes[i]));
    }
    ++done["blocks"];
}

static void find() {  // tokens by their place in the stream
    std::vector<i64> known(below(40)), asked(below(40));
    const i64 span = one_in(2) ? 50 : i64{1} << 62;
    for (auto* part : {&known, &asked}) std::generate(part->begin(), part->end(), [=] { return below(span) - span / 2; });
    std::copy_n(known.begin(), std::min(known.size(), asked.size()) / 2, asked.begin());
    std::vector<std::int32_t> found(asked.size());
    const Lease memory(nullptr, index_of_scratch(known.size()), 1);
    index_of(asked.data(), asked.size(), known.data(), known.size(), found.data(), memory.of(0));
    for (std::size_t i = 0; i < asked.size(); ++i) {
        const auto at = std::find(known.begin(), known.end(), asked[i]);
        CHECK(found[i] == (at == known.end() ? -1 : at - known.begin()));
    }
    ++done["searches"];
}

int main(int argc, char** argv) {
    const i64 operations = argc > 1 ? std::atol(argv[1]) : 100000;
    seed = argc > 2 ? std::atol(argv[2]) : 0;
    std::vector<const Simd*> sets;
    for (const char* name : {"scalar", "neon", "avx2", "avx512"}) {
        if (const Simd* found = simd_named(name)) sets.push_back(found);
    }
    i64 all = 0;
    for (; all < operations; ++sequence) {
        std::seed_seq mixed{seed, sequence};
        source.seed(mixed);
        use_simd(*sets[below(sets.size())]);
        set_threads(one_in(16) ? 2 : 1);
        Beside cache;
        Joined clusters;
        Calls calls;
        for (int i = 0; i < 100; ++i) cache.step(), clusters.step(), calls.step();
        for (int i = 0; i < 20; ++i) carve(), find();
        all = 0;
        for (const auto& [name, count] : done) all += count;
    }
    std::printf("%ld operations, none wrong:", all);
    for (const auto& [name, count] : done) std::printf(" %s %ld", name.c_str(), count);
    std::printf("\n");
}
