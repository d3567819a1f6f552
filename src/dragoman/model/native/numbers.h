// What the passes between products compute with: e to a negative power, the largest of a row, bfloat16.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "products.h"

namespace {

inline uint16_t to_bfloat16(float value) {  // round to nearest even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// a - n b. As one fused operation it is not rounded in between, and the compiler does not take it apart.
inline float minus_product(float a, float n, float b) {
#if defined(__FMA__) || defined(__aarch64__)
    return std::fma(-n, b, a);
#else
    return a - n * b;
#endif
}

// e^r for |r| <= ln 2 / 2, of a number or a vector of them.
template <typename T>
inline T exp_near_zero(T r) {
    T p = T{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// e^x for x <= 0 by range reduction and a polynomial, so that the compiler can vectorise it. Relative error below 3e-7
// where the processor fuses multiplication and addition, else below 5e-6: there ln 2 in two parts is added up again.
inline float exp_negative(float x) {
    x = std::max(x, -87.0f);
    const float n = std::nearbyintf(x * 1.44269504f);
    const float r = minus_product(minus_product(x, n, 0.693359375f), n, -2.12194440e-4f);
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return exp_near_zero(r) * power;
}

// The same for a vector of them.
inline Floats exp_negative(Floats x) {
    x = x < -87.0f ? Floats{} - 87.0f : x;  // NaN stays NaN
    const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);  // towards zero, which for x <= 0 is the nearest
    const Floats whole = __builtin_convertvector(n, Floats);
    const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    return exp_near_zero(r) * (Floats)((n + 127) << 23);
}

// The largest value, and the largest magnitude. One running maximum would have each wait for the one before it, and the
// compiler may not make several of one, since that could change what becomes of a NaN.
template <typename Of>
inline float largest_of(const float* x, int64_t n, float least, Of of) {
    constexpr int64_t WAYS = 32;
    float running[WAYS];
    std::fill(running, running + WAYS, least);
    int64_t i = 0;
    for (; i + WAYS <= n; i += WAYS)
        for (int64_t j = 0; j < WAYS; ++j) {
            const float value = of(x[i + j]);
            running[j] = value > running[j] ? value : running[j];
        }
    float largest = least;
    for (; i < n; ++i) largest = std::max(largest, of(x[i]));
    for (int64_t width = WAYS / 2; width > 0; width /= 2)
        for (int64_t j = 0; j < width; ++j) running[j] = running[j + width] > running[j] ? running[j + width] : running[j];
    return std::max(largest, running[0]);
}

inline float largest_value(const float* x, int64_t n) {
    return largest_of(x, n, -INFINITY, [](float value) { return value; });
}

inline float largest_magnitude(const float* x, int64_t n) {
    return largest_of(x, n, 0.0f, [](float value) { return std::fabs(value); });
}

}  // namespace
