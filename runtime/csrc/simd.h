// The inner loops, compiled once per instruction set and chosen at run time. kernels.inc holds their one source.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "strided.h"

namespace edgevlm {

struct Half {  // IEEE binary16, a storage type
    std::uint16_t bits;
};

struct Int8 {  // int8: times the scale of its channel it is the number
    std::int8_t value;
};

struct Dots {
    float dot, square;  // row . other, |row|^2
};

// What one Dots is of. angle: cosines [pairs], then sines [pairs], that the row is turned back by, or nothing.
template <typename T>
struct Compared {
    Row<T> row;
    const float *other, *angle;
};

// Of rows stored as T. Sums are float32 in a fixed number of lanes: the same bits whenever the instruction set is the same.
// Rotary pairs are (d, d + pairs); cosine, sine [pairs]. "Turned back" is un-rotated by those angles.
template <typename T>
struct RowKernels {
    void (*load)(Row<T> row, std::int64_t size, float* out);
    void (*store)(const float* row, const float* scale, std::int64_t size, T* out);  // to nearest, ties to even; codes saturate
    // |row|^2 of `count` rows, `stride` numbers apart.
    void (*squares)(Row<T> row, std::int64_t stride, std::int64_t count, std::int64_t size, float* out);
    void (*dots)(const Compared<T>* rows, std::int64_t count, std::int64_t size, Dots* out);
    void (*turned_dots)(const Compared<T>* rows, std::int64_t count, std::int64_t size, Dots* out);
    void (*add)(Row<T> row, float factor, std::int64_t size, float* out);                 // out += factor row
    void (*add_turned)(Row<T> row, float factor, const float* cosine, const float* sine, std::int64_t pairs,
                       float* out);                                                       // the same, row turned back
    // In float32, then rounded to T. Codes turn as they are, whatever the scale: it is the same for both halves of a pair.
    void (*rotate)(T* row, const float* cosine, const float* sine, std::int64_t pairs);
    // turned [size, TileKernels::kKeys] = `count` rows on their side, which share a scale; columns past `count` are anything.
    // ahead: bytes from a row to what will be read next, which is asked for.
    void (*turn)(const T* const* rows, const float* scale, std::int64_t ahead, std::int64_t count, std::int64_t size, float* turned);
    // The same rows as they are, out [count, stride].
    void (*load_rows)(const T* const* rows, const float* scale, std::int64_t ahead, std::int64_t count, std::int64_t size, float* out,
                      std::int64_t stride);
};

// Softmax of many query rows at once: lanes are query rows, `rows` of them (a multiple of 4, 32 at most).
struct AttentionKernels {
    std::int64_t rows;
    // scores [keys, rows] = keys [keys, size] x query [size, rows]; stride: floats from key to key.
    void (*scores)(const float* keys, std::int64_t stride, std::int64_t count, const float* query, std::int64_t size,
                   float* scores);
    void (*peak)(const float* scores, std::int64_t count, float* most);                   // most[r] = max over keys
    void (*exponents)(float* scores, std::int64_t count, const float* most, float* sum);  // e^(s - most) in place; sum += e
    void (*weigh)(const float* scores, std::int64_t count, const float* weight, float* mass);  // mass[key] += e . weight
    // A further tile of rows' running softmax, in powers of 2: most and sum become those of all tiles, scores 2^(s - most), factor
    // what the earlier ones' weights must be multiplied by.
    void (*soften)(float* scores, std::int64_t count, float* most, float* sum, float* factor);
    // out [size, rows] = factor out + values [keys, size] turned x scores [keys, rows]; stride: floats from value to value.
    void (*gather)(const float* values, std::int64_t stride, std::int64_t count, const float* scores, const float* factor,
                   std::int64_t size, float* out);
};

// Products of small matrices and the softmax between them.
struct TileKernels {
    static constexpr std::int64_t kKeys = 64;
    std::int64_t lanes;  // that columns are a multiple of
    std::int64_t rows;   // that go together best
    // c [rows, columns] = factor [rows] c + a [rows, depth] b [depth, columns]; strides in floats, no factor: c is not read. With
    // a factor the rows of b that follow are asked for.
    void (*multiply)(const float* a, std::int64_t a_stride, std::int64_t rows, const float* b, std::int64_t b_stride,
                     std::int64_t depth, std::int64_t columns, const float* factor, float* c, std::int64_t c_stride);
    // The same as AttentionKernels', of one row's scores [kKeys]; returns the factor.
    float (*soften)(float* scores, float* most, float* sum);
};

// A row is about scale times its codes: `error` is the length of the difference. sum: of the codes.
struct Coded {
    float scale, error;
    std::int32_t sum;
};

// Rows as encode_blocks writes them, one after another.
struct BlockRows {
    const std::int8_t* codes;
    const float* scale;
    const std::int32_t* start;
    std::int64_t count;
};

// Products of rows of 8-bit codes, where the processor has them: several times as quick as floats', and near enough to tell
// which pairs cannot be the largest.
struct CodeKernels {
    static constexpr std::int64_t kKeys = 64;  // at a time, at most
    std::int64_t lanes;   // rows that meet a key at the same time, 16 at most; 0: there are no such instructions
    std::uint32_t flip;   // four of a row's codes are kept xor this; a key's as they are
    // code [size] of a row, from -127 to 127.
    Coded (*encode)(const float* row, std::int64_t size, std::int8_t* code);
    // Keys [count, width] meet rows [width / 4, lanes, 4], each row with its scale and error. least [lanes] becomes what a row's
    // largest product is at least; bit r of hit[k]: the product of key k and row r may be as large as that. Returns bit k for those
    // that have any.
    std::uint64_t (*likely)(const std::int8_t* keys, const Coded* key, std::int64_t count, std::int64_t width, const std::uint8_t* rows,
                            const float* scale, const float* error, float* least, std::uint32_t* hit) = nullptr;
    static constexpr std::int64_t kBlock = 64, kDepth = 16;  // that columns and depth of a matrix are multiples of
    // out [columns] = row [depth], codes as told about, times codes [depth, columns] with a scale a column, plus a bias unless null.
    // stride: from row to row of the matrix. sums [columns]: working memory. Null: as likely.
    void (*multiply)(const std::int8_t* row, Coded about, const std::int8_t* codes, std::int64_t stride, std::int64_t depth,
                     std::int64_t columns, const float* scale, const float* bias, std::int32_t* sums, float* out) = nullptr;
    // A row [depth] by blocks of 32: codes at even places [depth / 2], then at odd; scale [blocks]; start: four numbers a block, -8
    // times the sum of its codes and three zeros.
    void (*encode_blocks)(const float* row, std::int64_t depth, std::int8_t* codes, float* scale, std::int32_t* start) = nullptr;
    static constexpr std::int64_t kColumns = 32, kLeastDepth = 128;  // columns are a multiple of; depth is one of 32
    // out [rows.count, stride] = rows times a matrix [columns, depth / 2] of codes of 4 bits, 8 of them 0, with scales [columns, blocks],
    // plus a bias unless null. memory: kColumns (depth + depth / 8) bytes.
    void (*multiply_blocks)(const BlockRows& rows, const std::uint8_t* codes, const float* scale, std::int64_t depth, std::int64_t columns,
                            const float* bias, std::uint8_t* memory, float* out, std::int64_t stride) = nullptr;
};

// Pictures in levels of 0 to 255, a byte each.
struct LevelKernels {
    static constexpr std::int64_t kBlock = 64;  // a patch's bytes are padded with zeros to a multiple of it
    // out[i] = scale in[i] + offset, to nearest, from 0 to 255.
    void (*levels)(const float* in, float scale, float offset, std::int64_t size, std::uint8_t* out);
    void (*add)(const std::uint8_t* in, std::int64_t size, std::uint32_t* sums);  // sums[i] += in[i]
    // out[i]: how far x[i] lies outside [low[i], high[i]], where these are first multiplied by gain[i] / 256, unless it is null.
    void (*distances)(const std::uint8_t* x, const std::uint8_t* low, const std::uint8_t* high, const std::uint16_t* gain,
                      std::int64_t size, std::uint8_t* out);
    float (*largest)(const std::uint8_t* bytes, std::int64_t blocks, std::int64_t count);  // the mean of the `count` largest
};

struct Simd {
    const char* name;
    RowKernels<float> fp32;
    RowKernels<Half> fp16;
    RowKernels<Int8> int8;
    AttentionKernels attention, few;  // few: of half as many rows
    TileKernels tiles;
    LevelKernels levels;
    CodeKernels codes;
    // x [size] = x sigmoid(x) up [size].
    void (*gate)(float* x, const float* up, std::int64_t size);
    // out[c] = the sum of `window` (1, 3, 5 or 7) numbers, from in[c] on, `step` apart.
    void (*box_sums)(const double* in, std::int64_t count, std::int64_t step, int window, double* out);
    void (*box_counts)(const std::int32_t* in, std::int64_t count, std::int64_t step, int window, std::int32_t* out);
    std::int64_t (*at_least)(const std::int32_t* numbers, std::int64_t size, std::int32_t least);  // how many; size < 2^31
    // out[i] = how many bits of words[i] differ from those of `word`; returns the least of them, 33 of none.
    std::uint32_t (*hamming)(const std::uint32_t* words, std::int64_t count, std::uint32_t word, std::uint32_t* out);
    // (cos, sin) of the sum of two angles; n of each.
    void (*turn)(const float* cosine_a, const float* sine_a, const float* cosine_b, const float* sine_b, std::int64_t n,
                 float* cosine, float* sine);
    void (*copy)(const void* from, void* to, std::int64_t bytes);         // `to` written past the caches
    void (*drain)();                                                      // makes those writes seen by other threads
    // How many numbers of a row of codes are the largest or the smallest there is; how many of its pairs lie beyond the circle
    // that all turns of a pair stay within.
    std::int64_t (*saturated)(const Int8* row, std::int64_t size);
    std::int64_t (*outside)(const Int8* row, std::int64_t pairs);
    std::int64_t (*read)(const void* memory, std::int64_t bytes);         // the plain read that speeds are measured against

    template <typename T>
    const RowKernels<T>& rows() const;
};

template <>
inline const RowKernels<float>& Simd::rows<float>() const { return fp32; }
template <>
inline const RowKernels<Half>& Simd::rows<Half>() const { return fp16; }
template <>
inline const RowKernels<Int8>& Simd::rows<Int8>() const { return int8; }

const Simd& simd();                // the one in use
const Simd* simd_named(const char* name);  // scalar, avx2, avx512, neon; null if unknown or not for this processor
void use_simd(const Simd& table);

// Where each instruction set is compiled.
const Simd& simd_scalar();
const Simd& simd_avx2();
const Simd& simd_avx512();
const Simd& simd_neon();

constexpr float kInt8Min = -128, kInt8Max = 127;

inline float to_float(Half half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half.bits & 0x8000u) << 16;
    const std::uint32_t exponent = half.bits >> 10 & 31u, fraction = half.bits & 1023u;
    std::uint32_t bits;
    float value;
    if (exponent == 0) {  // zero, or a fraction of 2^-24
        value = static_cast<float>(fraction) * 0x1p-24f;
        std::memcpy(&bits, &value, sizeof bits);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13;
    }
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

inline Half to_half(float value) {  // to nearest, ties to even
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits >= 0x7f800000u)  // infinite, or not a number
        return {static_cast<std::uint16_t>(sign | 0x7c00u | (bits > 0x7f800000u ? 0x200u | (bits >> 13 & 0x3ffu) : 0u))};
    if (bits >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // 65520 and beyond round to infinity
    if (bits < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the rounded fraction in the lowest bits
        std::memcpy(&value, &bits, sizeof bits);
        value += 0.5f;
        std::memcpy(&bits, &value, sizeof bits);
        return {static_cast<std::uint16_t>(sign | (bits - 0x3f000000u))};
    }
    bits += 0xfffu + (bits >> 13 & 1u);
    return {static_cast<std::uint16_t>(sign | (bits - 0x38000000u) >> 13)};
}

}  // namespace edgevlm
