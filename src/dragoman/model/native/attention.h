// One query over keys and values, all heads at once.
//
// Heads stand side by side: entry i of head h is number i * heads + h, in queries, keys, values and what comes out of
// them; packed_weights.py orders the projections so. Products then add up where they stand, whatever the width of a
// head, and one vector of weights serves every entry of the values. Positions are summed from the first to the last.

#pragma once

#include <numeric>
#include <utility>
#include <vector>

#include "numbers.h"

namespace {

struct Heads {
    int64_t n, d_k, d_v;
    int64_t keys() const { return n * d_k; }
    int64_t values() const { return n * d_v; }
    int64_t kept() const { return keys() + values(); }  // what one position leaves behind
};

// Where a position's keys stand; its values follow them.
typedef const float* Line;

// Floats after which the heads begin anew at a vector's beginning.
template <int64_t HEADS>
constexpr int64_t LANES = std::lcm(HEADS, WIDTH);

template <int64_t DISTANCE, int... J>
inline Floats exchanged(Floats x, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(x, x, (J ^ DISTANCE)...);
}

template <int64_t HEADS, int64_t DISTANCE = WIDTH / 2>
inline Floats sums_within(Floats x) {
    if constexpr (DISTANCE >= HEADS)
        return sums_within<HEADS, DISTANCE / 2>(x + exchanged<DISTANCE>(x, std::make_integer_sequence<int, WIDTH>{}));
    return x;
}

// Each entry of all lanes becomes the sum of those that belong to the same head.
template <int64_t HEADS>
inline void sum_heads(Floats* x) {
    if constexpr (WIDTH % HEADS == 0) {
        *x = sums_within<HEADS>(*x);
    } else if constexpr (HEADS % WIDTH != 0) {
        float entries[LANES<HEADS>], sums[HEADS] = {};
        std::memcpy(entries, x, sizeof entries);
        for (int64_t j = 0; j < LANES<HEADS>; j += HEADS)
            for (int64_t h = 0; h < HEADS; ++h) sums[h] += entries[j + h];
        for (int64_t j = 0; j < LANES<HEADS>; j += HEADS) std::copy(sums, sums + HEADS, entries + j);
        std::memcpy(x, entries, sizeof entries);
    }
}

// Scores of N positions, which share each load of the query: a head's as often one after the other as lanes are for it.
template <int64_t HEADS, int64_t N>
inline void scores_of(const float* q, const Line* lines, int64_t width, float scale, float* scores) {
    constexpr int64_t COUNT = LANES<HEADS> / WIDTH;
    Floats sums[N][COUNT] = {};
    for (int64_t j = 0; j < width; j += LANES<HEADS>)
        for (int64_t v = 0; v < COUNT; ++v) {
            const Floats query = load(q + j + v * WIDTH);
            for (int64_t n = 0; n < N; ++n) sums[n][v] += query * load(lines[n] + j + v * WIDTH);
        }
    for (int64_t n = 0; n < N; ++n) {
        sum_heads<HEADS>(sums[n]);
        for (int64_t v = 0; v < COUNT; ++v) store(scores + n * LANES<HEADS> + v * WIDTH, sums[n][v] * scale);
    }
}

// scores [length, lanes] -> e to the power of their distance from the largest, and one over the sums of these.
inline void softmax(float* scores, int64_t length, int64_t lanes, float* inverse) {
    for (int64_t first = 0; first < lanes; first += WIDTH) {
        Floats largest = load(scores + first), sums{};
        for (int64_t t = 1; t < length; ++t) {
            const Floats score = load(scores + t * lanes + first);
            largest = score > largest ? score : largest;
        }
        for (int64_t t = 0; t < length; ++t) {
            float* at = scores + t * lanes + first;
            const Floats e = exp_negative(load(at) - largest);
            store(at, e);
            sums += e;
        }
        store(inverse + first, 1.0f / sums);
    }
}

// COUNT vectors of what comes out, which stay in registers while the positions pass.
template <int64_t HEADS, int64_t COUNT>
inline void mix(const Line* lines, int64_t offset, const float* weights, int64_t length, const float* inverse, float* out) {
    Floats sums[COUNT] = {};
    for (int64_t t = 0; t < length; ++t) {
        const float *v = lines[t] + offset, *weight = weights + t * LANES<HEADS>;
#pragma GCC unroll 16
        for (int64_t c = 0; c < COUNT; ++c) sums[c] += load(weight + c * WIDTH % LANES<HEADS>) * load(v + c * WIDTH);
    }
#pragma GCC unroll 16
    for (int64_t c = 0; c < COUNT; ++c) store(out + c * WIDTH, sums[c] * load(inverse + c * WIDTH % LANES<HEADS>));
}

// As many whole lanes at a time as there are registers for, at most LIMIT vectors; then the rest.
template <int64_t HEADS, int64_t LIMIT>
inline void mix_all(const Line* lines, int64_t offset, const float* weights, int64_t length, const float* inverse, int64_t width, float* out) {
    constexpr int64_t LEAST = LANES<HEADS> / WIDTH, COUNT = std::max(LEAST, LIMIT / LEAST * LEAST), STEP = COUNT * WIDTH;
    int64_t j = 0;
    for (; j + STEP <= width; j += STEP) mix<HEADS, COUNT>(lines, offset + j, weights, length, inverse, out + j);
    if constexpr (COUNT > LEAST) {
        if (j < width) mix_all<HEADS, COUNT / 2>(lines, offset + j, weights, length, inverse, width - j, out + j);
    }
}

template <int64_t HEADS>
void attend_in_vectors(const float* q, const Heads& heads, const Line* lines, int64_t length, float* scores, float* out) {
    constexpr int64_t N = 4, REGISTERS = WIDTH == 16 ? 16 : 8;
    const float scale = 1.0f / std::sqrt(static_cast<float>(heads.d_k));
    int64_t t = 0;
    for (; t + N <= length; t += N) scores_of<HEADS, N>(q, lines + t, heads.keys(), scale, scores + t * LANES<HEADS>);
    for (; t < length; ++t) scores_of<HEADS, 1>(q, lines + t, heads.keys(), scale, scores + t * LANES<HEADS>);
    float inverse[LANES<HEADS>];
    softmax(scores, length, LANES<HEADS>, inverse);
    mix_all<HEADS, REGISTERS>(lines, heads.keys(), scores, length, inverse, heads.values(), out);
}

// Any number of heads of any width.
inline void attend_in_any(const float* q, const Heads& heads, const Line* lines, int64_t length, float* scores, float* out) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(heads.d_k));
    const int64_t lanes = (heads.n + WIDTH - 1) / WIDTH * WIDTH;
    for (int64_t t = 0; t < length; ++t) {
        float* score = scores + t * lanes;
        std::fill(score, score + lanes, 0.0f);
        for (int64_t i = 0; i < heads.keys(); i += heads.n)
            for (int64_t h = 0; h < heads.n; ++h) score[h] += q[i + h] * lines[t][i + h];
        for (int64_t h = 0; h < heads.n; ++h) score[h] *= scale;
    }
    float* inverse = scores + length * lanes;
    softmax(scores, length, lanes, inverse);
    std::fill(out, out + heads.values(), 0.0f);
    for (int64_t t = 0; t < length; ++t) {
        const float *v = lines[t] + heads.keys(), *weight = scores + t * lanes;
        for (int64_t i = 0; i < heads.values(); i += heads.n)
            for (int64_t h = 0; h < heads.n; ++h) out[i + h] += weight[h] * inverse[h] * v[i + h];
    }
}

// out = the heads' attention to `length` lines, zeros where there is none; `scores` is room that is kept.
inline void attend(const float* q, const Heads& heads, const Line* lines, int64_t length, std::vector<float>& scores, float* out) {
    if (length == 0) return void(std::fill(out, out + heads.values(), 0.0f));
    const int64_t lanes = std::lcm(heads.n, WIDTH), room = (length + 1) * lanes;
    if (static_cast<int64_t>(scores.size()) < room) scores.resize(2 * room);
    const auto by = [&](auto function) { function(q, heads, lines, length, scores.data(), out); };
    if (heads.keys() % lanes == 0 && heads.values() % lanes == 0) switch (heads.n) {
            case 1: return by(attend_in_vectors<1>);
            case 2: return by(attend_in_vectors<2>);
            case 3: return by(attend_in_vectors<3>);
            case 4: return by(attend_in_vectors<4>);
            case 6: return by(attend_in_vectors<6>);
            case 8: return by(attend_in_vectors<8>);
            case 12: return by(attend_in_vectors<12>);
            case 16: return by(attend_in_vectors<16>);
        }
    by(attend_in_any);
}

}  // namespace
