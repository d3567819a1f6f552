// One query over keys and values, all heads at once.
//
// Heads stand side by side: entry i of head h is number i * heads + h, in queries, keys, values and what comes out of
// them; packed_weights.py orders the projections so. Products then add up where they stand, whatever the width of a
// head, and one vector of weights serves every entry of the values. Positions are summed from the first to the last.

#pragma once

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

inline Floats floats_at(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline void put(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

template <int64_t DISTANCE, int... J>
inline Floats exchanged(Floats x, std::integer_sequence<int, J...>) {
    return __builtin_shufflevector(x, x, (J ^ DISTANCE)...);
}

// Each entry becomes the sum of all that belong to the same head.
template <int64_t HEADS, int64_t DISTANCE = WIDTH / 2>
inline Floats sums_of_heads(Floats x) {
    if constexpr (DISTANCE >= HEADS)
        return sums_of_heads<HEADS, DISTANCE / 2>(x + exchanged<DISTANCE>(x, std::make_integer_sequence<int, WIDTH>{}));
    return x;
}

// Scores of N positions, which share each load of the query: as often one after the other as fill a vector.
template <int64_t HEADS, int64_t N>
inline void scores_of(const float* q, const Line* lines, int64_t width, float scale, float* scores) {
    constexpr int64_t LANES = std::max(HEADS, WIDTH), VECTORS_OF = LANES / WIDTH;
    Floats sums[N][VECTORS_OF] = {};
    for (int64_t j = 0; j < width; j += LANES)
        for (int64_t v = 0; v < VECTORS_OF; ++v) {
            const Floats query = floats_at(q + j + v * WIDTH);
            for (int64_t n = 0; n < N; ++n) sums[n][v] += query * floats_at(lines[n] + j + v * WIDTH);
        }
    for (int64_t n = 0; n < N; ++n)
        for (int64_t v = 0; v < VECTORS_OF; ++v) put(scores + n * LANES + v * WIDTH, sums_of_heads<HEADS>(sums[n][v]) * scale);
}

// scores [length, lanes] -> e to the power of their distance from the largest, and one over the sums of these.
inline void softmax(float* scores, int64_t length, int64_t lanes, float* inverse) {
    for (int64_t first = 0; first < lanes; first += WIDTH) {
        Floats largest = floats_at(scores + first), sums{};
        for (int64_t t = 1; t < length; ++t) {
            const Floats score = floats_at(scores + t * lanes + first);
            largest = score > largest ? score : largest;
        }
        for (int64_t t = 0; t < length; ++t) {
            float* at = scores + t * lanes + first;
            const Floats e = exp_negative(floats_at(at) - largest);
            put(at, e);
            sums += e;
        }
        put(inverse + first, 1.0f / sums);
    }
}

// COUNT vectors of what comes out, which stay in registers while the positions pass.
template <int64_t LANES, int64_t COUNT>
inline void mix(const Line* lines, int64_t offset, const float* weights, int64_t length, const float* inverse, float* out) {
    Floats sums[COUNT] = {};
    for (int64_t t = 0; t < length; ++t) {
        const float *v = lines[t] + offset, *weight = weights + t * LANES;
#pragma GCC unroll 16
        for (int64_t c = 0; c < COUNT; ++c) sums[c] += floats_at(weight + c * WIDTH % LANES) * floats_at(v + c * WIDTH);
    }
#pragma GCC unroll 16
    for (int64_t c = 0; c < COUNT; ++c) put(out + c * WIDTH, sums[c] * floats_at(inverse + c * WIDTH % LANES));
}

// As many vectors at a time as there are registers for, then the rest.
template <int64_t LANES, int64_t COUNT>
inline void mix_all(const Line* lines, int64_t offset, const float* weights, int64_t length, const float* inverse, int64_t width, float* out) {
    constexpr int64_t STEP = COUNT * WIDTH;
    int64_t j = 0;
    for (; j + STEP <= width; j += STEP) mix<LANES, COUNT>(lines, offset + j, weights, length, inverse, out + j);
    if constexpr (STEP > LANES) {
        if (j < width) mix_all<LANES, COUNT / 2>(lines, offset + j, weights, length, inverse, width - j, out + j);
    }
}

template <int64_t HEADS>
void attend_in_vectors(const float* q, const Heads& heads, const Line* lines, int64_t length, float* scores, float* out) {
    constexpr int64_t LANES = std::max(HEADS, WIDTH), TOGETHER = 4, COUNT = WIDTH == 16 ? 16 : 8;
    const float scale = 1.0f / std::sqrt(static_cast<float>(heads.d_k));
    int64_t t = 0;
    for (; t + TOGETHER <= length; t += TOGETHER) scores_of<HEADS, TOGETHER>(q, lines + t, heads.keys(), scale, scores + t * LANES);
    for (; t < length; ++t) scores_of<HEADS, 1>(q, lines + t, heads.keys(), scale, scores + t * LANES);
    float inverse[LANES];
    softmax(scores, length, LANES, inverse);
    mix_all<LANES, COUNT>(lines, heads.keys(), scores, length, inverse, heads.values(), out);
}

// Any number of heads of any width.
inline void attend_in_any(const float* q, const Heads& heads, const Line* lines, int64_t length, int64_t lanes, float* scores, float* out) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(heads.d_k));
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

// out = the heads' attention to `length` lines, at least one; `scores` is room that is kept.
inline void attend(const float* q, const Heads& heads, const Line* lines, int64_t length, std::vector<float>& scores, float* out) {
    const int64_t lanes = (heads.n + WIDTH - 1) / WIDTH * WIDTH, room = (length + 1) * lanes;
    if (static_cast<int64_t>(scores.size()) < room) scores.resize(2 * room);
    const auto work = [&](auto function) { function(q, heads, lines, length, scores.data(), out); };
    if (heads.keys() % lanes == 0 && heads.values() % lanes == 0) switch (heads.n) {
            case 1: return work(attend_in_vectors<1>);
            case 2: return work(attend_in_vectors<2>);
            case 4: return work(attend_in_vectors<4>);
            case 8: return work(attend_in_vectors<8>);
            case 16: return work(attend_in_vectors<16>);
        }
    attend_in_any(q, heads, lines, length, lanes, scores.data(), out);
}

}  // namespace
