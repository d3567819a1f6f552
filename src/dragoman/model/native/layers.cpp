// The matrix products of training, for one thread of one lane: a linear layer forward, backward and its gradients.
//
// y = x W^T + b, dx = dy W and dW += dy^T x, in float32 or in bfloat16 with sums in float32. Weights are laid out for both
// directions once an update (`lay_out`); what the third product reads is laid out on its way. A bfloat16 is a uint16_t
// here. Widths of inputs (K) are multiples of 16, those of outputs (M) may be of any size; rows of dy lie `stride` entries
// apart, in bfloat16 an even number, and what stands between two rows is finite.

#include <cstdint>
#include <new>
#include <vector>

#include "numbers.h"
#include "vectors.h"

namespace {

// What is stored, which product reads it, and how many inputs it takes at a time.
template <typename T>
struct Stored;

template <>
struct Stored<float> {
    typedef OfFloat32 Of;
    static constexpr int64_t group = 1;
};

template <>
struct Stored<uint16_t> {
    typedef OfBfloat16 Of;
    static constexpr int64_t group = 2;
};

template <typename T>
inline int64_t groups_of(int64_t inputs) {
    return (inputs + Stored<T>::group - 1) / Stored<T>::group;
}

inline void store(uint16_t* to, Floats x) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &rounded, sizeof rounded);
#else
    for (int64_t i = 0; i < WIDTH; ++i) to[i] = to_bfloat16(x[i]);
#endif
}

inline Floats widened(const float* from) { return load(from); }
inline Floats widened(const uint16_t* from) {
    typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2), aligned(2), may_alias));
    return (Floats)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Ints) << 16);
}

// A group of inputs as 32 bits, from the rows of a matrix: one number, or one of each of two rows.
inline float as_float(float x) { return x; }
inline float as_float(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline int32_t group_of(const float* row, const float*, int64_t i, float) {
    int32_t bits;
    std::memcpy(&bits, row + i, 4);
    return bits;
}
inline int32_t group_of(const float* row, const float* next, int64_t i, uint16_t) {
    const uint32_t second = next ? to_bfloat16(next[i]) : 0;
    return static_cast<int32_t>(second << 16 | to_bfloat16(row[i]));
}
inline int32_t group_of(const uint16_t* row, const uint16_t* next, int64_t i, uint16_t) {
    return static_cast<int32_t>(static_cast<uint32_t>(next ? next[i] : 0) << 16 | row[i]);
}

// x [rows, columns] as panels whose inputs are its rows. S is what it holds, T what is stored.
template <typename T, typename S>
void lay_out_columns(const S* x, int64_t stride, int64_t rows, int64_t columns, int64_t groups, int64_t first_group, int32_t* panels) {
    constexpr int64_t group = Stored<T>::group;
    for (int64_t row = 0; row < rows; row += group) {
        const S *from = x + row * stride, *next = row + group - 1 < rows ? from + (group - 1) * stride : nullptr;
        int32_t* line = panels + (first_group + row / group) * PANEL;
        for (int64_t first = 0; first < columns; first += PANEL, line += groups * PANEL) {
            const int64_t n = std::min(PANEL, columns - first);
            if (next && n == PANEL)
                for (int64_t j = 0; j < PANEL; ++j) line[j] = group_of(from, next, first + j, T{});
            else
                for (int64_t j = 0; j < PANEL; ++j) line[j] = j < n ? group_of(from, next, first + j, T{}) : 0;
        }
    }
}

// W [rows, k] as panels whose columns are its rows, the first of them number `first`.
template <typename T>
void lay_out_inputs(const float* w, int64_t rows, int64_t k, int64_t first, int32_t* panels) {
    constexpr int64_t group = Stored<T>::group;
    const int64_t groups = groups_of<T>(k);
    for (int64_t i = 0; i < rows; ++i) {
        const float* row = w + i * k;
        int32_t* to = panels + (first + i) / PANEL * groups * PANEL + (first + i) % PANEL;
        for (int64_t g = 0; g < groups; ++g) to[g * PANEL] = group_of(row, row + 1, g * group, T{});
    }
}

// dy [n, columns] for a vector of its columns -> turned [columns, groups], and their sums.
inline ivec groups_at(const float* row, const float*, vec& sums) {
    const vec x = load_float(row);
    sums += x;
    return (ivec)x;
}
inline ivec groups_at(const uint16_t* row, const uint16_t* next, vec& sums) {
    const ivec first = (ivec)load_bfloat(row), second = next ? (ivec)load_bfloat(next) : ivec{};
    sums += (vec)first;
    sums += (vec)second;
    return (ivec)((uvec)first >> 16) | second;
}

template <typename T>
void turn(const T* dy, int64_t stride, int64_t n, int64_t columns, int64_t turned_stride, int32_t* turned, float* sums_to) {
    constexpr int64_t group = Stored<T>::group;
    const int64_t groups = groups_of<T>(n);
    int64_t column = 0;
    for (; column + VEC_WIDTH <= columns; column += VEC_WIDTH) {
        vec sums = {};
        for (int64_t first = 0; first < groups; first += VEC_WIDTH) {
            vec block[VEC_WIDTH];
            for (int64_t i = 0; i < VEC_WIDTH; ++i) {
                const int64_t row = (first + i) * group;
                const T* at = dy + row * stride + column;
                block[i] = row < n ? (vec)groups_at(at, row + 1 < n ? at + stride : nullptr, sums) : vec{};
            }
            transpose(block);
            for (int64_t i = 0; i < VEC_WIDTH; ++i) store_float((float*)(turned + (column + i) * turned_stride + first), block[i]);
        }
        for (int64_t i = 0; i < VEC_WIDTH; ++i) sums_to[column + i] += sums[i];
    }
    for (; column < columns; ++column)
        for (int64_t g = 0; g < groups; ++g) {
            const T* at = dy + g * group * stride + column;
            const bool has_next = (g + 1) * group <= n;
            turned[column * turned_stride + g] = group_of(at, has_next ? at + stride : nullptr, 0, T{});
            for (int64_t i = 0; i < group && g * group + i < n; ++i) sums_to[column] += as_float(at[i * stride]);
        }
}

struct Memory {
    std::vector<int32_t> panels, turned;
    int32_t* of(std::vector<int32_t>& what, int64_t n) {
        if (static_cast<int64_t>(what.size()) < n) what.resize(n);
        return what.data();
    }
};

template <typename T>
void multiply(const T* x, int64_t stride, int64_t rows, int64_t inputs, const int32_t* panels, int64_t columns, const float* bias,
              bool relu, const T* hidden, T* out) {
    const auto finish = [&](int64_t row, int64_t panel, const Floats* sums) {
        const int64_t first = panel * PANEL, n = std::min(PANEL, columns - first);
        T part[PANEL], *to = out + row * columns + first, *into = n == PANEL ? to : part;
        for (int64_t v = 0; v < VECTORS; ++v) {
            Floats y = sums[v];
            if (bias) y += load(bias + first + v * WIDTH);
            if (relu) y = y < 0.0f ? Floats{} : y;  // NaN stays NaN
            if (hidden && v * WIDTH < n) y = widened(hidden + row * columns + first + v * WIDTH) > 0.0f ? y : Floats{};
            store(into + v * WIDTH, y);
        }
        if (n < PANEL) std::memcpy(to, part, n * sizeof(T));
    };
    const int64_t group = Stored<T>::group;
    product_of<typename Stored<T>::Of>(reinterpret_cast<const int32_t*>(x), stride / group, groups_of<T>(inputs), panels, rows, 0,
                                       panels_of(columns), finish);
}

template <typename T>
void gradients(const T* dy, int64_t stride, const T* x, int64_t n, int64_t m, int64_t k, bool add, float* dw, float* db) {
    static thread_local Memory memory;
    const int64_t groups = groups_of<T>(n), turned_stride = ((groups + 15) / 16 | 1) * 16;  // odd cache lines: no two rows share a set
    int32_t* panels = memory.of(memory.panels, panels_of(k) * PANEL * groups);
    int32_t* turned = memory.of(memory.turned, BLOCK * turned_stride);
    lay_out_columns<T>(x, k, n, k, groups, 0, panels);
    if (!add) std::memset(db, 0, m * sizeof(float));
    for (int64_t begin = 0; begin < m; begin += BLOCK) {
        const int64_t rows = std::min(BLOCK, m - begin);
        turn(dy + begin, stride, n, rows, turned_stride, turned, db + begin);
        const auto finish = [&](int64_t row, int64_t panel, const Floats* sums) {
            const int64_t first = panel * PANEL, columns = std::min(PANEL, k - first);
            float* to = dw + (begin + row) * k + first;
            for (int64_t v = 0; v * WIDTH < columns; ++v) store(to + v * WIDTH, add ? load(to + v * WIDTH) + sums[v] : sums[v]);
        };
        product_of<typename Stored<T>::Of>(turned, turned_stride, groups, panels, rows, 0, panels_of(k), finish);
    }
}

template <typename Work>
int lacks_memory(const Work& work) {
    try {
        work();
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

template <typename T>
void lay_out_both(const float* w, int64_t rows, int64_t k, int64_t first, int64_t m, int32_t* forward, int32_t* backward) {
    lay_out_inputs<T>(w, rows, k, first, forward);
    lay_out_columns<T>(w, k, rows, k, groups_of<T>(m), first / Stored<T>::group, backward);
}

}  // namespace

extern "C" {

// Whether these products are likely to be faster than those of PyTorch: measured on Zen 4 and Zen 3. On the latter float32
// gains a fiftieth; for bfloat16 PyTorch has no kernel there and multiplies at a fifth to a three-hundredth of this speed.
// Matrix units (AMX) do better.
int worth_having(int kind) {
#if (defined(__AVX512BF16__) && !defined(__AMX_BF16__)) || (defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__))
    return kind == BFLOAT16 || kind == FLOAT32;
#elif defined(__x86_64__) && !defined(__AVX512F__)
    return kind == BFLOAT16;
#else
    (void)kind;
    return 0;
#endif
}

// 32-bit words that a matrix of so many inputs and columns takes when it is laid out.
long laid_out_size(int kind, long inputs, long columns) {
    return panels_of(columns) * PANEL * (kind == BFLOAT16 ? groups_of<uint16_t>(inputs) : groups_of<float>(inputs));
}

// Rows first ... first + rows - 1 of W [m, k] for x W^T (forward) and dy W (backward). `first` is even in bfloat16.
void lay_out(int kind, const float* w, long rows, long k, long first, long m, int32_t* forward, int32_t* backward) {
    (kind == BFLOAT16 ? lay_out_both<uint16_t> : lay_out_both<float>)(w, rows, k, first, m, forward, backward);
}

// out [rows, columns] = x [rows, inputs] by laid-out weights; plus bias, which fills whole panels, if there is one; then
// ReLU, if wanted; then 0 wherever hidden [rows, columns] is not above 0, if it is given.
void multiply_float32(const float* x, long stride, long rows, long inputs, const int32_t* panels, long columns, const float* bias, int relu,
                      const float* hidden, float* out) {
    multiply(x, stride, rows, inputs, panels, columns, bias, relu, hidden, out);
}
void multiply_bfloat16(const uint16_t* x, long stride, long rows, long inputs, const int32_t* panels, long columns, const float* bias,
                       int relu, const uint16_t* hidden, uint16_t* out) {
    multiply(x, stride, rows, inputs, panels, columns, bias, relu, hidden, out);
}

// dw [m, k] = or += dy^T [m, n] x [n, k], db [m] = or += the sums of dy's columns. Returns 1 where memory is short.
int gradients_float32(const float* dy, long stride, const float* x, long n, long m, long k, int add, float* dw, float* db) {
    return lacks_memory([&] { gradients(dy, stride, x, n, m, k, add, dw, db); });
}
int gradients_bfloat16(const uint16_t* dy, long stride, const uint16_t* x, long n, long m, long k, int add, float* dw, float* db) {
    return lacks_memory([&] { gradients(dy, stride, x, n, m, k, add, dw, db); });
}
}
