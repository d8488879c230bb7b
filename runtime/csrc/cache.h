// The ring cache of one stream: keys, values and what is known of every row, in one block of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "arena.h"
#include "rotary.h"
#include "simd.h"
#include "strided.h"

namespace edgevlm {

enum class DType : std::uint8_t { fp32, fp16, int8 };  // of keys and values
std::size_t element_size(DType dtype);

struct Shape {
    std::int64_t kv_heads;
    std::int64_t head_dim;
    std::int64_t axes;                     // of a position: 1, or 3 for M-RoPE
    std::vector<std::int64_t> capacities;  // rows, one a layer
    std::vector<double> inv_freq;          // [head_dim / 2], and with local as many more, theirs
    std::vector<Run> runs;                 // which axis turns which pairs; none: not known, keys cannot be turned
    DType dtype;
    int threads;  // that kernels may use at most
    std::vector<float> key_scale, value_scale;  // [L, H, D] of int8, one for both halves of a key's rotary pair; else none
    std::vector<std::uint8_t> local;  // [L], layers that turn by the second; none: all by the first
};

// What is known of n new rows, the same for every layer and head; dense.
struct Rows {
    std::int64_t count;
    const std::uint8_t* kind;      // [n]
    const std::int64_t* seq;       // [n]
    const std::int32_t* frame;     // [n]
    const std::int16_t* row;       // [n]
    const std::int16_t* col;       // [n]
    const std::int32_t* position;  // [n, axes]
};

// All rows of one layer as a snapshot holds them, head by head; dense.
struct StoredRows {
    std::int64_t count;            // n
    const std::byte* key;          // [H, n, D] of the cache's dtype, rotated
    const std::byte* value;        // [H, n, D]
    const std::uint8_t* kind;      // [H, n]
    const std::int64_t* seq;       // [H, n]
    const std::int32_t* frame;     // [H, n]
    const std::int16_t* row;       // [H, n]
    const std::int16_t* col;       // [H, n]
    const std::int32_t* position;  // [H, n, axes]
    const std::int32_t* confirmed;  // [H, n]
};

// One layer. Rows [0, length) are valid, in no order. Rows [length, capacity) are free and read by nobody: they are zero, or
// what an eviction has left there, but finite, unless they are reserved.
struct Layer {
    std::int64_t capacity;
    std::int64_t length;
    std::byte* key;          // [H, capacity, D] of dtype, stored rotated
    std::byte* value;        // [H, capacity, D] of dtype
    std::uint8_t* kind;      // [H, capacity]
    std::int64_t* seq;       // [H, capacity]
    std::int32_t* frame;     // [H, capacity]
    std::int16_t* row;       // [H, capacity]
    std::int16_t* col;       // [H, capacity]
    std::int32_t* position;  // [H, capacity, axes]
    std::int32_t* confirmed; // [H, capacity]: the frame that last showed what the row shows; its own to begin with
    float *key_scale, *value_scale;  // [H, D] of int8; else null
    float* norm;             // [H, capacity]: the value's, from when it is first asked for, or kUnknownNorm until then
};

// What lies in a cache's block besides the layers' own arrays.
struct Parts {
    Layer* layer = nullptr;           // [L]
    double* inv_freq = nullptr;       // [D / 2]
    std::int64_t* serials = nullptr;  // [smallest capacity]: the commit that brought each row since the last restructuring
    Run* runs = nullptr;              // [Shape::runs]
    double* rotary = nullptr;         // [Rotary::table_size]
    float* rounded = nullptr;         // the same
    std::byte* scratch = nullptr;     // [threads, scratch_bytes]
    std::size_t scratch_bytes = 0;
};

// Working memory of a re-indexing of `rows` rows, and of a shift (0 rows).
std::size_t reindex_scratch(std::int64_t rows, std::int64_t pairs, std::int64_t axes);

// A moment to roll back to. Between two restructurings (evict, shift, append) all layers grow and shrink alike, so
// the rows `grown` since the last one and the serial number of the newest commit tell whether everything below still stands.
struct Mark {
    std::int64_t cache;
    std::int64_t epoch;
    std::int64_t grown;
    std::int64_t serial;
};

// cache.cpp: the block and how it is laid out; cache_int8.cpp: rows of int8; cache_append.cpp, cache_evict.cpp, cache_load.cpp, cache_positions.cpp: what changes rows.
class Cache {
public:
    explicit Cache(const Shape& shape);
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    static std::size_t bytes_for(const Shape& shape);

    void reserve(std::int64_t count);
    void commit(const Rows& rows);
    void abort();

    Mark mark() const;
    void rollback(const Mark& mark);

    // keep[l] is [H, n_l], or nothing for a layer left as it is. Returns the rows evicted, summed over layers.
    std::int64_t evict(const std::vector<std::optional<Mask>>& keep);
    void append(std::int64_t layer, const Volume<float>& key, const Volume<float>& value, const Rows& rows);
    void shift(std::int64_t layer, const Volume<std::int32_t>& position);
    std::int64_t reindex(std::int64_t prefix);
    // seq [rows, columns] of a grid of patches: vision rows that are these tokens of the stream were last confirmed in `frame`.
    void confirm(const Plane<std::int64_t>& seq, std::int32_t frame);
    void load(std::int64_t layer, const StoredRows& rows);  // in the place of all that the layer holds

    const Layer& layer(std::int64_t index) const;  // throws when there is no such layer
    std::int64_t layers() const { return layers_; }
    std::int64_t kv_heads() const { return heads_; }
    std::int64_t head_dim() const { return head_dim_; }
    std::int64_t axes() const { return axes_; }
    std::size_t nbytes() const { return nbytes_; }
    const std::byte* data() const { return block_.get(); }
    DType dtype() const { return dtype_; }
    const Rotary* rotary(std::int64_t layer) const {  // null when it is not known what turns which pair
        const auto& found = rotary_[!local_.empty() && local_[layer]];
        return found ? &*found : nullptr;
    }
    std::int64_t allocations() const { return heap_.allocations(); }
    std::int64_t rows_moved() const { return rows_moved_; }
    // Of all numbers added to an int8 cache: values saturated at the range of codes, and rotary pairs of keys that were
    // saturated, or would be by some turn.
    std::int64_t saturated() const { return saturated_; }
    Scratch& scratch() { return scratch_; }

private:
    void require_settled(const char* action) const;
    void check_positions(const Rows& rows) const;
    void write_metadata(Layer& layer, const Rows& rows);
    void prefetch_row(const Layer& layer, std::int64_t at) const;
    void move_row(Layer& layer, std::int64_t from, std::int64_t to);  // indices over [H * capacity]
    void clear_rows(Layer& layer, std::int64_t head, std::int64_t first, std::int64_t last);
    std::int64_t fill_holes(Layer& layer, std::int64_t head, const Mask& keep, std::int64_t kept);  // returns rows moved
    const Rotary& turning(const char* action, std::int64_t layer = 0) const;
    class Turning;
    bool make_dense(std::int64_t index, std::int64_t head, std::int64_t prefix, BumpAllocator memory);
    void take_scales(const Shape& shape);
    std::int64_t saturated_in(const Layer& layer, std::int64_t first, std::int64_t last) const;
    void restructured();  // marks taken before are stale

    std::int64_t heads_, head_dim_, axes_, layers_;
    DType dtype_;
    std::size_t row_bytes_;  // of one key or value

    Heap heap_;
    Block block_;
    std::size_t nbytes_ = 0;
    Parts parts_;
    std::optional<Rotary> rotary_[2];
    std::vector<std::uint8_t> local_;
    Scratch scratch_;

    std::int64_t id_;
    std::int64_t reserved_ = -1;  // rows, or -1
    std::int64_t epoch_ = 0;
    std::int64_t grown_ = 0;
    std::int64_t commits_ = 0;
    std::int64_t rows_moved_ = 0;
    std::int64_t saturated_ = 0;
    bool large_;  // more than stays in the processor's caches: what an eviction writes goes past them
};

}  // namespace edgevlm
