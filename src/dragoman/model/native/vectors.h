/* One register's floats as a vector, in C and C++ alike, and squares of them turned on their side. */

#pragma once

#include <stdint.h>

/* Vectors wider than the processor's are taken apart by the compiler, which with GCC 12 goes through memory for every
 * one of them. */
#if defined(__AVX512F__)
#define VEC_WIDTH 16
#else
#define VEC_WIDTH 8
#endif

typedef float vec __attribute__((vector_size(VEC_WIDTH * 4)));
typedef float vec_u __attribute__((vector_size(VEC_WIDTH * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(VEC_WIDTH * 4)));
typedef uint32_t uvec __attribute__((vector_size(VEC_WIDTH * 4)));
typedef uint16_t hvec __attribute__((vector_size(VEC_WIDTH * 2), aligned(2), may_alias));
typedef int16_t svec __attribute__((vector_size(VEC_WIDTH * 2), aligned(2), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE vec load_float(const float *p) { return *(const vec_u *)p; }
INLINE void store_float(float *p, vec x) { *(vec_u *)p = x; }
INLINE vec load_bfloat(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const hvec *)p, uvec) << 16); }

/* VEC_WIDTH x VEC_WIDTH in registers: in rounds the halves of pairs of rows, 8, 4, 2 and 1 apart, change places. */
#define SWAP(h)                                                                                              \
    for (int i = 0; i < VEC_WIDTH; i++)                                                                      \
        if (!(i & h)) {                                                                                      \
            vec a = r[i], b = r[i + h];                                                                      \
            r[i] = __builtin_shufflevector(a, b, FIRST_##h);                                                 \
            r[i + h] = __builtin_shufflevector(a, b, SECOND_##h);                                            \
        }
#if VEC_WIDTH == 16
#define FIRST_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define SECOND_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define FIRST_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define SECOND_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define FIRST_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define SECOND_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define FIRST_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define SECOND_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#else
#define FIRST_1 0, 8, 2, 10, 4, 12, 6, 14
#define SECOND_1 1, 9, 3, 11, 5, 13, 7, 15
#define FIRST_2 0, 1, 8, 9, 4, 5, 12, 13
#define SECOND_2 2, 3, 10, 11, 6, 7, 14, 15
#define FIRST_4 0, 1, 2, 3, 8, 9, 10, 11
#define SECOND_4 4, 5, 6, 7, 12, 13, 14, 15
#endif
INLINE void transpose(vec r[VEC_WIDTH]) {
#if VEC_WIDTH == 16
#pragma GCC unroll 16
    SWAP(8)
#endif
#pragma GCC unroll 16
    SWAP(4)
#pragma GCC unroll 16
    SWAP(2)
#pragma GCC unroll 16
    SWAP(1)
}
