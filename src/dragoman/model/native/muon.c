/* One update of a matrix by Muon, block of rows by block of rows, for one thread; training/muon.py says what it is and
 * has it again in PyTorch, which is both the fallback and the oracle of the tests.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "small.h"

/* gram = x x^T: m rows of `wide` numbers, `ldx` apart -> [m, ld]. */
static void products(long m, long wide, const float *x, long ldx, float *gram, long ld) {
    for (long i = 0; i < m; i++)
        for (long k = 0; k <= i; k += 4) { /* above the diagonal some are computed twice */
            const float *a = x + i * ldx, *b = x + k * ldx;
            vec sum[4] = {};
            for (long j = 0; j < wide; j += VEC_WIDTH) {
                vec left = load_float(a + j);
#pragma GCC unroll 4
                for (int r = 0; r < 4; r++) sum[r] += left * load_float(b + r * ldx + j);
            }
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) gram[i * ld + k + r] = gram[(k + r) * ld + i] = total(sum[r]);
        }
}

/* Blocks first ... last - 1 of a matrix [rows, n] whose element (r, j) lies at r * row_step + j * step, one of them 1:
 *   momentum = mu * momentum + (1 - mu) * gradient
 *   weight = keep * weight - rate * orthogonal(mu * momentum + (1 - mu) * gradient)
 * with `steps` steps of the polynomial a x + b x^3 + c x^5. A block has `height` <= n rows, the last one those left.
 */
int muon_step(long first, long last, long height, long rows, long n, long row_step, long step, const float *gradient,
              float *momentum, float *weight, float mu, float keep, float rate, int steps, float a, float b, float c) {
    const long wide = up16(n), ldx = wide + 16, ld = up16(height), square = ld * ld;
    float *x = floats(2 * ld * ldx + 5 * square);
    if (!x) return 1;
    float *update = x + ld * ldx, *gram = update + ld * ldx, *half = gram + square, *factor = half + square;
    float *whole = factor + square, *next = whole + square;
    memset(x, 0, sizeof(float) * (size_t)(ld * ldx)); /* what is not written below stays zero */
    for (long part = first; part < last; part++) {
        const long top = part * height, m = rows - top < height ? rows - top : height;
        if (m < height) memset(x, 0, sizeof(float) * (size_t)(ld * ldx));
        const long begin = top * row_step;
        const long outer = step == 1 ? m : n, inner = step == 1 ? n : m;
        const long outer_step = step == 1 ? row_step : step;
        const long x_outer = step == 1 ? ldx : 1, x_inner = step == 1 ? 1 : ldx;
        for (long o = 0; o < outer; o++) {
            const float *g = gradient + begin + o * outer_step;
            float *mean = momentum + begin + o * outer_step, *to = x + o * x_outer;
            for (long i = 0; i < inner; i++) {
                float now = mean[i] + (1.0f - mu) * (g[i] - mean[i]);
                mean[i] = now;
                to[i * x_inner] = now + (1.0f - mu) * (g[i] - now); /* a look ahead, as Nesterov's */
            }
        }
        products(ld, wide, x, ldx, gram, ld);
        float size = 0.0f;
        for (long i = 0; i < ld; i++) size += gram[i * ld + i];
        size = size > FLT_MIN ? size : FLT_MIN;
        for (long i = 0; i < square; i++) gram[i] /= size;
        for (int each = 0; each < steps; each++) {
            multiply(ld, ld, ld, gram, ld, 1, gram, ld, factor, ld, 0);
            for (long i = 0; i < square; i++) factor[i] = b * gram[i] + c * factor[i];
            for (long i = 0; i < ld; i++) factor[i * ld + i] += a;
            if (each == 0)
                memcpy(whole, factor, sizeof(float) * (size_t)square);
            else {
                multiply(ld, ld, ld, factor, ld, 1, whole, ld, next, ld, 0);
                float *old = whole;
                whole = next, next = old;
            }
            if (each + 1 < steps) {
                multiply(ld, ld, ld, gram, ld, 1, factor, ld, half, ld, 0);
                multiply(ld, ld, ld, half, ld, 1, factor, ld, gram, ld, 0);
            }
        }
        const float root = 1.0f / sqrtf(size);
        for (long i = 0; i < square; i++) whole[i] *= root;
        multiply(m, wide, ld, whole, ld, 1, x, ldx, update, ldx, 0);
        for (long o = 0; o < outer; o++) {
            float *w = weight + begin + o * outer_step;
            const float *from = update + o * x_outer;
            for (long i = 0; i < inner; i++) w[i] = keep * w[i] - rate * from[i * x_inner];
        }
    }
    free(x);
    return 0;
}
