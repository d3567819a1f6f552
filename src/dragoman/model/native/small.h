/* Products of small matrices that live in the first caches, for training.c and muon.c. */

#pragma once

#include <stdlib.h>

#include "vectors.h"

/* Registers that a block of sums is wide: with 6 rows, a row of B and an element of A they are nearly all there are. */
#if defined(__AVX512F__)
#define WIDEST 4
#else
#define WIDEST 2
#endif

/* rows x VEC_WIDTH*vectors block of C = A B (or C += A B); A is read element by element, so any strides will do. */
INLINE void block(const int rows, const int vectors, long depth, const float *a, long row_step, long depth_step,
                  const float *b, long ldb, float *c, long ldc, int add) {
    vec sum[6][4];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) sum[i][j] = add ? load_float(c + i * ldc + VEC_WIDTH * j) : (vec){};
    for (long k = 0; k < depth; k++) {
        vec right[4];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) right[j] = load_float(b + k * ldb + VEC_WIDTH * j);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            float left = a[i * row_step + k * depth_step];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sum[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store_float(c + i * ldc + VEC_WIDTH * j, sum[i][j]);
}

#define ROWS(V)                                                                                              \
    switch (left) {                                                                                          \
    case 1: block(1, V, depth, A, row_step, depth_step, B, ldb, C, ldc, add); break;                         \
    case 2: block(2, V, depth, A, row_step, depth_step, B, ldb, C, ldc, add); break;                         \
    case 3: block(3, V, depth, A, row_step, depth_step, B, ldb, C, ldc, add); break;                         \
    case 4: block(4, V, depth, A, row_step, depth_step, B, ldb, C, ldc, add); break;                         \
    case 5: block(5, V, depth, A, row_step, depth_step, B, ldb, C, ldc, add); break;                         \
    default: block(6, V, depth, A, row_step, depth_step, B, ldb, C, ldc, add);                               \
    }

/* C [m, n] = A [m, depth] B [depth, n], n a multiple of 16; small matrices that live in the first caches. */
static void multiply(long m, long n, long depth, const float *a, long row_step, long depth_step, const float *b,
                     long ldb, float *c, long ldc, int add) {
    for (long j = 0; j < n; j += VEC_WIDTH * WIDEST)
        for (long i = 0; i < m; i += 6) {
            const float *A = a + i * row_step, *B = b + j;
            float *C = c + i * ldc + j;
            long left = m - i;
            const long vectors = (n - j) / VEC_WIDTH;
            switch (vectors < WIDEST ? vectors : WIDEST) {
            case 1: ROWS(1) break;
            case 2: ROWS(2) break;
            case 3: ROWS(3) break;
            default: ROWS(4)
            }
        }
}

INLINE float total(vec x) {
    float s[VEC_WIDTH / 2];
    for (int i = 0; i < VEC_WIDTH / 2; i++) s[i] = x[i] + x[i + VEC_WIDTH / 2];
    for (int half = VEC_WIDTH / 4; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

INLINE long up16(long x) { return (x + 15) & ~15L; }

static float *floats(long n) {
    void *p = NULL;
    return posix_memalign(&p, 64, (size_t)(n > 0 ? n : 1) * sizeof(float)) ? NULL : p;
}
