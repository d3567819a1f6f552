// Matrix products of rows with weights that were laid out for them, from one row to thousands.
//
// Columns stand in panels of a few vectors; a tile of the result, a few rows by one panel (with AVX-512 six by four
// vectors), stays in registers while the panel streams by once. A row's numbers are sums over the inputs from first to
// last, each in a register of its own: they cannot depend on how many rows there are. On one core of a Zen 4 this comes
// to 115 GFLOP/s in float32, twice that in bfloat16 and four times in int8, at four rows as at hundreds.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// Floats of a register, registers of a panel, and rows of a tile: as many running sums as leave room for the rest.
#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16, VECTORS = 4, TILE = 6;
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8, VECTORS = 2, TILE = 6;
#elif defined(__ARM_NEON)
constexpr int64_t WIDTH = 4, VECTORS = 4, TILE = 6;
#else
constexpr int64_t WIDTH = 4, VECTORS = 2, TILE = 4;
#endif
constexpr int64_t PANEL = VECTORS * WIDTH;
constexpr int64_t TILE_IN_PARTS = 4;  // where weights are taken apart before they are multiplied, which takes registers too
constexpr int64_t BLOCK = 96;         // rows that go through all panels together and stay in the second cache

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Unaligned __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// Which entries of a comparison hold: a bit for each.
inline uint32_t bits_of(Ints which) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)which, (__m512i)which);
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)which);
#else
    uint32_t bits = 0;
    for (int64_t i = 0; i < WIDTH; ++i) bits |= (which[i] & 1u) << i;
    return bits;
#endif
}

// Keeps a vector of weights in a register, where the compiler would read it anew for each row.
#if defined(__AVX512F__)
#define IN_REGISTER(vector) asm("" : "+v"(vector))
#elif defined(__x86_64__)
#define IN_REGISTER(vector) asm("" : "+x"(vector))
#elif defined(__aarch64__)
#define IN_REGISTER(vector) asm("" : "+w"(vector))
#else
#define IN_REGISTER(vector)
#endif

// Weights as Python lays them out: [panels, groups of inputs, PANEL, inputs of a group], where a group is what fills 32
// bits. Scales, bias and zeros have an entry for every column of every panel.
struct Linear {
    const void* weight;
    const float* scales;   // of int8 weights alone
    const float* bias;
    const int32_t* zeros;  // of int8 weights alone: what inputs that are stored 128 too large add to each sum
    int64_t n_in, n_out;
};

inline int64_t inputs_of_group(int kind) { return kind == FLOAT32 ? 1 : kind == BFLOAT16 ? 2 : 4; }

// Inputs of a row as they are stored: whole groups.
inline int64_t stored(int kind, int64_t n) {
    const int64_t group = inputs_of_group(kind);
    return (n + group - 1) / group * group;
}

// sums + x * w, which the compiler does not take apart again to add two such products first.
inline __attribute__((always_inline)) Floats added(Floats sums, Floats x, Floats w) {
#if defined(__FMA__) && !defined(__AVX512F__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sums);
#else
    return sums + x * w;
#endif
}

// How each kind adds the products of one group of inputs to a vector of sums, and for how many rows at a time.
struct OfFloat32 {
    typedef Floats Sums;
    static constexpr int64_t ROWS = TILE;
    static inline __attribute__((always_inline)) void add(Sums& sums, int32_t x, Ints w) {
        float value;
        std::memcpy(&value, &x, 4);
        sums += value * (Floats)w;
    }
};

struct OfBfloat16 {
    typedef Floats Sums;
#if defined(__AVX512BF16__)
    static constexpr int64_t ROWS = TILE;
#else
    static constexpr int64_t ROWS = TILE_IN_PARTS;
#endif
    static inline __attribute__((always_inline)) void add(Sums& sums, int32_t x, Ints w) {
#if defined(__AVX512BF16__)
        sums = (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(x), (__m512bh)(__m512i)w);
#else
        Ints row = x - Ints{};
        IN_REGISTER(row);
        sums = added(sums, (Floats)(row << 16), (Floats)(w << 16));
        sums = added(sums, (Floats)(row & ~0xFFFF), (Floats)(w & ~0xFFFF));
#endif
    }
};

struct OfInt8 {
    typedef Ints Sums;
#if defined(__AVX512VNNI__)
    static constexpr int64_t ROWS = TILE;
#else
    static constexpr int64_t ROWS = TILE_IN_PARTS;
#endif
    static inline __attribute__((always_inline)) void add(Sums& sums, int32_t x, Ints w) {
#if defined(__AVX512VNNI__)
        sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(x), (__m512i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        // Two 16-bit numbers in each 32 bits, every other one at a time: unlike products of bytes these cannot run over.
        const __m256i all = (__m256i)w, odd = _mm256_srai_epi16(all, 8), even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8);
        const __m256i row = _mm256_set1_epi32(x);
        sums += (Ints)_mm256_madd_epi16(even, _mm256_and_si256(row, _mm256_set1_epi16(255)));
        sums += (Ints)_mm256_madd_epi16(odd, _mm256_srli_epi16(row, 8));
#else
        sums += (x & 255) * ((w << 24) >> 24);
        sums += ((x >> 8) & 255) * ((w << 16) >> 24);
        sums += ((x >> 16) & 255) * ((w << 8) >> 24);
        sums += ((x >> 24) & 255) * (w >> 24);
#endif
    }
};

inline Floats finished(Floats sums, const Linear& linear, int64_t column, const float*) { return sums + load(linear.bias + column); }

inline Floats finished(Ints sums, const Linear& linear, int64_t column, const float* row_scale) {
    Ints zeros;
    std::memcpy(&zeros, linear.zeros + column, sizeof zeros);
    return __builtin_convertvector(sums - zeros, Floats) * (*row_scale * load(linear.scales + column)) + load(linear.bias + column);
}

// ROWS rows of x, `groups` groups each, by one panel; finish(row, sums) gets the panel's sums of each row.
template <typename Of, int64_t ROWS, typename Finish>
inline __attribute__((always_inline)) void tile(const int32_t* x, int64_t stride, int64_t groups, const int32_t* weight, int64_t row,
                                                const Finish& finish) {
    typename Of::Sums sums[ROWS][VECTORS];
    for (int64_t r = 0; r < ROWS; ++r)
        for (int64_t v = 0; v < VECTORS; ++v) sums[r][v] = typename Of::Sums{};
    for (int64_t i = 0; i < groups; ++i) {
        Ints w[VECTORS];
        for (int64_t v = 0; v < VECTORS; ++v) {
            Ints read = *reinterpret_cast<const Unaligned*>(weight + (i * VECTORS + v) * WIDTH);
            IN_REGISTER(read);
            w[v] = read;
        }
#pragma GCC unroll 8
        for (int64_t r = 0; r < ROWS; ++r) {
            const int32_t value = x[r * stride + i];
#pragma GCC unroll 8
            for (int64_t v = 0; v < VECTORS; ++v) Of::add(sums[r][v], value, w[v]);
        }
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS; ++r) {
        typename Of::Sums made[VECTORS];  // a copy: sums that somebody may point to do not stay in registers
        for (int64_t v = 0; v < VECTORS; ++v) made[v] = sums[r][v];
        finish(row + r, made);
    }
}

// The last rows, fewer than a tile has.
template <typename Of, int64_t ROWS, typename Finish>
void rest(int64_t rows, const int32_t* x, int64_t stride, int64_t groups, const int32_t* weight, int64_t row, const Finish& finish) {
    if (rows == ROWS)
        tile<Of, ROWS>(x, stride, groups, weight, row, finish);
    else if constexpr (ROWS > 1)
        rest<Of, ROWS - 1>(rows, x, stride, groups, weight, row, finish);
}

// Rows of x, each `stride` groups behind the other, by some panels of weights [panels, groups, PANEL]: every sum goes to
// finish(row, panel, sums), VECTORS vectors of them.
template <typename Of, typename Finish>
void product_of(const int32_t* x, int64_t stride, int64_t groups, const int32_t* weights, int64_t rows, int64_t first_panel,
                int64_t last_panel, const Finish& finish) {
    for (int64_t begin = 0; begin < rows; begin += BLOCK)
        for (int64_t panel = first_panel; panel < last_panel; ++panel) {
            const int32_t* weight = weights + panel * groups * PANEL;
            const auto finish_row = [&](int64_t row, const typename Of::Sums* sums) { finish(row, panel, sums); };
            const int64_t end = std::min(rows, begin + BLOCK);
            int64_t row = begin;
            for (; row + Of::ROWS <= end; row += Of::ROWS) tile<Of, Of::ROWS>(x + row * stride, stride, groups, weight, row, finish_row);
            rest<Of, Of::ROWS - 1>(end - row, x + row * stride, stride, groups, weight, row, finish_row);
        }
}

inline int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

template <typename Of>
void linear_of(const Linear& linear, const int32_t* x, int64_t groups, const float* row_scales, int64_t rows, int64_t first_panel,
               int64_t last_panel, float* out, int64_t out_stride) {
    const auto finish = [&](int64_t row, int64_t panel, const typename Of::Sums* sums) {
        const int64_t first = panel * PANEL, columns = std::min(PANEL, linear.n_out - first);
        float part[PANEL], *to = out + row * out_stride + (panel - first_panel) * PANEL, *into = columns == PANEL ? to : part;
        for (int64_t v = 0; v < VECTORS; ++v) store(into + v * WIDTH, finished(sums[v], linear, first + v * WIDTH, row_scales + row));
        if (columns < PANEL) std::memcpy(to, part, columns * sizeof(float));
    };
    product_of<Of>(x, groups, groups, static_cast<const int32_t*>(linear.weight), rows, first_panel, last_panel, finish);
}

// out[rows, columns] = x W^T + b in float32, for the columns of some panels; x as `store` in decoding.cpp leaves it.
inline void product(int kind, const Linear& linear, const void* x, const float* row_scales, int64_t rows, int64_t first_panel,
                    int64_t last_panel, float* out, int64_t out_stride) {
    const int32_t* from = static_cast<const int32_t*>(x);
    const int64_t groups = stored(kind, linear.n_in) / inputs_of_group(kind);
    const auto of = kind == FLOAT32 ? linear_of<OfFloat32> : kind == BFLOAT16 ? linear_of<OfBfloat16> : linear_of<OfInt8>;
    of(linear, from, groups, row_scales, rows, first_panel, last_panel, out, out_stride);
}

}  // namespace
