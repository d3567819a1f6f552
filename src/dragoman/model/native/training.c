/* The inner loops of training on a CPU, one pass over memory each, for one thread of one lane.
 *
 * compiled.py compiles this file on its first use and calls it through ctypes; kernels.py has every function again in
 * PyTorch, which is both the fallback and the oracle of the tests. Rows are tokens without padding ("packed"): sentence i
 * occupies rows start[i] ... start[i] + length[i] - 1. Arithmetic is float32 whatever the tensors hold. Widths (D, K, V
 * of heads) are multiples of 16; the vocabulary may be of any size.
 *
 * The file includes itself once for float32 and once for bfloat16; T is the stored type, NAME adds its suffix.
 */
#ifndef T

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "small.h"

INLINE vec splat(float x) { return x - (vec){}; }

INLINE float largest(vec x) {
    float m = x[0];
    for (int i = 1; i < VEC_WIDTH; i++) m = x[i] > m ? x[i] : m;
    return m;
}

INLINE vec at_least(vec x, vec low) {
    ivec keep = x > low;
    return (vec)(((ivec)x & keep) | ((ivec)low & ~keep));
}

/* exp(x) for x <= 0 or so, to 2 ulp: 2^n times a polynomial on [-ln2 / 2, ln2 / 2]; below -87 it is the value there. */
INLINE vec exp_vec(vec x) {
    x = at_least(x, splat(-87.0f));
    vec shifted = x * 1.44269504f + 12582912.0f; /* the low bits of the sum are n, rounded */
    vec n = shifted - 12582912.0f;
    vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vec)((ivec)p + (((ivec)shifted - 0x4B400000) << 23));
}

INLINE void store_bfloat(uint16_t *p, vec x) {
    uvec u = (uvec)x; /* to nearest, ties to even; a NaN keeps being one because its payload has high bits */
    u = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    *(hvec *)p = __builtin_convertvector(u, hvec);
}
INLINE float one_bfloat(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
INLINE uint16_t to_bfloat(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

/* Dropout: x * scale where the 16 random bits, read as a signed number, reach the threshold; 0 elsewhere. */
INLINE vec drop(vec x, const int16_t *bits, int threshold, vec scale) {
    ivec keep = __builtin_convertvector(*(const svec *)bits, ivec) >= threshold;
    return (vec)((ivec)(x * scale) & keep);
}

#define PASTE2(a, b) a##_##b
#define PASTE(a, b) PASTE2(a, b)
#define NAME(f) PASTE(f, SUFFIX)

#define T float
#define SUFFIX float32
#define LOAD load_float
#define STORE store_float
#define ONE(x) (x)
#define TO(x) (x)
#include "training.c"
#undef T
#undef SUFFIX
#undef LOAD
#undef STORE
#undef ONE
#undef TO
#define T uint16_t
#define SUFFIX bfloat16
#define LOAD load_bfloat
#define STORE store_bfloat
#define ONE(x) one_bfloat(x)
#define TO(x) to_bfloat(x)
#include "training.c"

#else

/* out = LayerNorm(z) with z = x + Dropout(y); z, mean and 1 / deviation of each row are kept for the way back. */
int NAME(residual_norm_forward)(long n, long d, const T *x, const T *y, const int16_t *bits, int threshold, float scale,
                                const float *gamma, const float *beta, float eps, T *z, T *out, float *mean,
                                float *rstd) {
    float *row = floats(d);
    if (!row) return 1;
    for (long i = 0; i < n; i++, x += d, y += d, z += d, out += d) {
        vec sum = splat(0.0f);
        for (long j = 0; j < d; j += VEC_WIDTH) {
            vec branch = LOAD(y + j);
            if (bits) branch = drop(branch, bits + i * d + j, threshold, splat(scale));
            vec both = LOAD(x + j) + branch;
            STORE(z + j, both);
            store_float(row + j, both);
            sum += both;
        }
        float mu = total(sum) / d;
        vec squares = splat(0.0f);
        for (long j = 0; j < d; j += VEC_WIDTH) {
            vec centred = load_float(row + j) - mu;
            squares += centred * centred;
        }
        float r = 1.0f / sqrtf(total(squares) / d + eps);
        for (long j = 0; j < d; j += VEC_WIDTH)
            STORE(out + j, (load_float(row + j) - mu) * r * load_float(gamma + j) + load_float(beta + j));
        mean[i] = mu;
        rstd[i] = r;
    }
    free(row);
    return 0;
}

/* From the gradient of out: of x (dx), of y (dy, through the same dropout), and summed into gamma's and beta's. */
int NAME(residual_norm_backward)(long n, long d, const T *grad, const T *z, const int16_t *bits, int threshold,
                                 float scale, const float *gamma, const float *mean, const float *rstd, T *dx, T *dy,
                                 float *dgamma, float *dbeta) {
    for (long i = 0; i < n; i++, grad += d, z += d, dx += d, dy += d) {
        float mu = mean[i], r = rstd[i];
        vec sum = splat(0.0f), dot = splat(0.0f);
        for (long j = 0; j < d; j += VEC_WIDTH) {
            vec g = LOAD(grad + j), unit = (LOAD(z + j) - mu) * r;
            store_float(dgamma + j, load_float(dgamma + j) + g * unit);
            store_float(dbeta + j, load_float(dbeta + j) + g);
            g *= load_float(gamma + j);
            sum += g;
            dot += g * unit;
        }
        float a = total(sum) / d, b = total(dot) / d;
        for (long j = 0; j < d; j += VEC_WIDTH) {
            vec g = LOAD(grad + j) * load_float(gamma + j), unit = (LOAD(z + j) - mu) * r;
            vec both = (g - a - unit * b) * r;
            STORE(dx + j, both);
            if (bits) STORE(dy + j, drop(both, bits + i * d + j, threshold, splat(scale)));
        }
    }
    return 0;
}

/* out = Dropout(table[tokens] * factor + positions[position]); the table is always float32. */
int NAME(embed_forward)(long n, long d, const int64_t *tokens, const int64_t *position, const float *table,
                        const float *positions, float factor, const int16_t *bits, int threshold, float scale, T *out) {
    for (long i = 0; i < n; i++)
        for (long j = 0; j < d; j += VEC_WIDTH) {
            vec x = load_float(table + tokens[i] * d + j) * factor + load_float(positions + position[i] * d + j);
            if (bits) x = drop(x, bits + i * d + j, threshold, splat(scale));
            STORE(out + i * d + j, x);
        }
    return 0;
}

int NAME(embed_backward)(long n, long d, const int64_t *tokens, float factor, const int16_t *bits, int threshold,
                         float scale, const T *grad, float *dtable) {
    for (long i = 0; i < n; i++)
        for (long j = 0; j < d; j += VEC_WIDTH) {
            vec g = LOAD(grad + i * d + j) * factor;
            if (bits) g = drop(g, bits + i * d + j, threshold, splat(scale));
            float *to = dtable + tokens[i] * d + j;
            store_float(to, load_float(to) + g);
        }
    return 0;
}

/* x [s, width] of one head -> its transpose [width, w], w >= s a multiple of 16, with zeros beyond s; and x itself. */
static void NAME(turn)(long s, long width, const T *x, long step, float *transposed, long w, float *plain) {
    for (long i = 0; i < w; i += VEC_WIDTH)
        for (long j = 0; j < width; j += VEC_WIDTH) {
            vec r[VEC_WIDTH];
            if (i + VEC_WIDTH <= s) {
#pragma GCC unroll 16
                for (int e = 0; e < VEC_WIDTH; e++) r[e] = LOAD(x + (i + e) * step + j);
            } else {
                for (int e = 0; e < VEC_WIDTH; e++) r[e] = i + e < s ? LOAD(x + (i + e) * step + j) : splat(0.0f);
            }
            if (plain)
                for (int e = 0; e < VEC_WIDTH && i + e < s; e++) store_float(plain + (i + e) * width + j, r[e]);
            transpose(r);
#pragma GCC unroll 16
            for (int e = 0; e < VEC_WIDTH; e++) store_float(transposed + (j + e) * w + i, r[e]);
        }
}

/* Attention of packed sentences; head h of row i is q + i * q_step + h * K. Keeps log sum exp of the scores [n, H]. */
int NAME(attention_forward)(long sentences, long H, long K, long V, const int64_t *q_start, const int64_t *q_length,
                            const int64_t *k_start, const int64_t *k_length, long most_q, long most_k, int causal,
                            float scale, const T *q, long q_step, const T *k, long k_step, const T *v, long v_step,
                            T *out, long out_step, float *lse) {
    long wide = up16(most_k), per_head = most_q > most_k ? most_q : most_k;
    float *work = floats(most_q * K + K * wide + most_k * V + most_q * wide + per_head * V);
    if (!work) return 1;
    float *Q = work, *KT = Q + most_q * K, *W = KT + K * wide, *P = W + most_k * V, *O = P + most_q * wide;
    for (long b = 0; b < sentences; b++)
        for (long h = 0; h < H; h++) {
            long t = q_length[b], s = k_length[b], w = up16(s);
            const T *qh = q + q_start[b] * q_step + h * K, *kh = k + k_start[b] * k_step + h * K;
            const T *vh = v + k_start[b] * v_step + h * V;
            T *oh = out + q_start[b] * out_step + h * V;
            if (!s) { /* nothing to see: zeros */
                for (long i = 0; i < t; i++) {
                    memset(oh + i * out_step, 0, (size_t)V * sizeof(T));
                    lse[(q_start[b] + i) * H + h] = 0.0f;
                }
                continue;
            }
            for (long i = 0; i < t; i++)
                for (long j = 0; j < K; j += VEC_WIDTH) store_float(Q + i * K + j, LOAD(qh + i * q_step + j) * scale);
            NAME(turn)(s, K, kh, k_step, KT, w, NULL);
            for (long i = 0; i < s; i++)
                for (long j = 0; j < V; j += VEC_WIDTH) store_float(W + i * V + j, LOAD(vh + i * v_step + j));
            multiply(t, w, K, Q, K, 1, KT, w, P, w, 0);
            for (long i = 0; i < t; i++) {
                float *row = P + i * w;
                long seen = causal && i + 1 < s ? i + 1 : s;
                for (long j = seen; j < w; j++) row[j] = -INFINITY;
                vec top = load_float(row);
                for (long j = VEC_WIDTH; j < w; j += VEC_WIDTH) top = at_least(load_float(row + j), top);
                float high = largest(top);
                vec sum = splat(0.0f);
                for (long j = 0; j < w; j += VEC_WIDTH) store_float(row + j, exp_vec(load_float(row + j) - high));
                for (long j = seen; j < w; j++) row[j] = 0.0f;
                for (long j = 0; j < w; j += VEC_WIDTH) sum += load_float(row + j);
                float z = total(sum), inverse = 1.0f / z;
                for (long j = 0; j < w; j += VEC_WIDTH) store_float(row + j, load_float(row + j) * inverse);
                lse[(q_start[b] + i) * H + h] = high + logf(z);
            }
            multiply(t, V, s, P, w, 1, W, V, O, V, 0);
            for (long i = 0; i < t; i++)
                for (long j = 0; j < V; j += VEC_WIDTH) STORE(oh + i * out_step + j, load_float(O + i * V + j));
        }
    free(work);
    return 0;
}

/* The weights are computed again from the scores and their log sum exp; dq, dk, dv are written, not added to. */
int NAME(attention_backward)(long sentences, long H, long K, long V, const int64_t *q_start, const int64_t *q_length,
                             const int64_t *k_start, const int64_t *k_length, long most_q, long most_k, int causal,
                             float scale, const T *q, long q_step, const T *k, long k_step, const T *v, long v_step,
                             const float *lse, const T *grad, long grad_step, T *dq, long dq_step, T *dk, long dk_step,
                             T *dv, long dv_step) {
    long wide = up16(most_k), per_head = most_q > most_k ? most_q : most_k, widest = K > V ? K : V;
    float *work = floats(most_q * K + most_k * K + widest * wide + most_q * V + 2 * most_q * wide + per_head * widest);
    if (!work) return 1;
    float *Q = work, *KF = Q + most_q * K, *KT = KF + most_k * K, *G = KT + widest * wide, *P = G + most_q * V;
    float *S = P + most_q * wide, *out = S + most_q * wide;
    for (long b = 0; b < sentences; b++)
        for (long h = 0; h < H; h++) {
            long t = q_length[b], s = k_length[b], w = up16(s);
            const T *qh = q + q_start[b] * q_step + h * K, *kh = k + k_start[b] * k_step + h * K;
            const T *vh = v + k_start[b] * v_step + h * V, *gh = grad + q_start[b] * grad_step + h * V;
            if (!s) {
                for (long i = 0; i < t; i++)
                    memset(dq + (q_start[b] + i) * dq_step + h * K, 0, (size_t)K * sizeof(T));
                continue;
            }
            for (long i = 0; i < t; i++)
                for (long j = 0; j < K; j += VEC_WIDTH) store_float(Q + i * K + j, LOAD(qh + i * q_step + j) * scale);
            NAME(turn)(s, K, kh, k_step, KT, w, KF);
            for (long i = 0; i < t; i++)
                for (long j = 0; j < V; j += VEC_WIDTH) store_float(G + i * V + j, LOAD(gh + i * grad_step + j));
            multiply(t, w, K, Q, K, 1, KT, w, P, w, 0);
            for (long i = 0; i < t; i++) {
                float *row = P + i * w, z = lse[(q_start[b] + i) * H + h];
                long seen = causal && i + 1 < s ? i + 1 : s;
                for (long j = 0; j < w; j += VEC_WIDTH) store_float(row + j, exp_vec(load_float(row + j) - z));
                for (long j = seen; j < w; j++) row[j] = 0.0f;
            }
            multiply(s, V, t, P, 1, w, G, V, out, V, 0); /* dV = P^T G */
            for (long i = 0; i < s; i++)
                for (long j = 0; j < V; j += VEC_WIDTH)
                    STORE(dv + (k_start[b] + i) * dv_step + h * V + j, load_float(out + i * V + j));
            NAME(turn)(s, V, vh, v_step, KT, w, NULL);
            multiply(t, w, V, G, V, 1, KT, w, S, w, 0); /* dP = G V^T */
            for (long i = 0; i < t; i++) {
                vec dot = splat(0.0f);
                for (long j = 0; j < w; j += VEC_WIDTH) dot += load_float(P + i * w + j) * load_float(S + i * w + j);
                float mean = total(dot);
                for (long j = 0; j < w; j += VEC_WIDTH)
                    store_float(S + i * w + j, load_float(P + i * w + j) * (load_float(S + i * w + j) - mean));
            }
            multiply(t, K, s, S, w, 1, KF, K, out, K, 0); /* dQ = dS K, scaled as the scores were */
            for (long i = 0; i < t; i++)
                for (long j = 0; j < K; j += VEC_WIDTH)
                    STORE(dq + (q_start[b] + i) * dq_step + h * K + j, load_float(out + i * K + j) * scale);
            multiply(s, K, t, S, 1, w, Q, K, out, K, 0); /* dK = dS^T Q, and Q already carries the scale */
            for (long i = 0; i < s; i++)
                for (long j = 0; j < K; j += VEC_WIDTH)
                    STORE(dk + (k_start[b] + i) * dk_step + h * K + j, load_float(out + i * K + j));
        }
    free(work);
    return 0;
}

/* One row of logits -> exp(x - largest) in row[V], zeros behind up to a multiple of 16. Gives log sum exp, NaN where a
 * logit is not finite, the sum of the exponentials and the sum of the logits. */
INLINE float NAME(exponentials)(const T *logits, long V, float *row, float *sum, float *all) {
    long whole = V & ~15L, wide = up16(V);
    vec top = splat(-INFINITY), plain = splat(0.0f);
    for (long j = 0; j < whole; j += VEC_WIDTH) {
        vec x = LOAD(logits + j);
        store_float(row + j, x);
        top = at_least(x, top);
        plain += x;
    }
    float high = largest(top);
    *all = total(plain);
    for (long j = whole; j < V; j++) {
        row[j] = ONE(logits[j]);
        *all += row[j];
        high = row[j] > high ? row[j] : high;
    }
    for (long j = V; j < wide; j++) row[j] = -INFINITY;
    vec z = splat(0.0f);
    for (long j = 0; j < wide; j += VEC_WIDTH) {
        vec e = exp_vec(load_float(row + j) - high);
        store_float(row + j, e);
        if (j + VEC_WIDTH > V)
            for (long e = V; e < wide; e++) row[e] = 0.0f;
        z += load_float(row + j);
    }
    *sum = total(z);
    return high + logf(*sum) + (*all - *all);
}

/* logits [n, V] -> their gradient, in place, of the loss sum_i -sum_v q log p; q is `on` at the target, `off` at the
 * others, 0 at `never`; a target of `pad` has neither loss nor gradient. sums[0] += that loss, sums[1] += the negative
 * log-likelihood; both are NaN where a logit is not finite. */
int NAME(smoothed_loss)(long n, long V, T *logits, const int64_t *targets, long pad, float on, float off,
                        long never, double *sums) {
    long whole = V & ~15L;
    float *row = floats(up16(V));
    if (!row) return 1;
    float weight = on + off * (float)(V - (never >= 0 ? 2 : 1));
    for (long i = 0; i < n; i++, logits += V) {
        if (targets[i] == pad) {
            memset(logits, 0, (size_t)V * sizeof(T));
            continue;
        }
        float z, all, log_z = NAME(exponentials)(logits, V, row, &z, &all), inverse = weight / z;
        float hit = ONE(logits[targets[i]]), out = never >= 0 ? ONE(logits[never]) : 0.0f;
        sums[1] += log_z - hit;
        sums[0] += (double)weight * log_z - (double)(on - off) * hit - (double)off * (all - out);
        vec share = splat(inverse), even = splat(off);
        for (long j = 0; j < whole; j += VEC_WIDTH) STORE(logits + j, load_float(row + j) * share - even);
        for (long j = whole; j < V; j++) logits[j] = TO(row[j] * inverse - off);
        if (never >= 0) logits[never] = TO(row[never] * inverse);
        logits[targets[i]] = TO(row[targets[i]] * inverse - on);
    }
    free(row);
    return 0;
}

/* R-Drop: x and y [n, V] are the logits of two passes with the same targets. Both are replaced by their gradients of half
 * the sum of their losses, as smoothed_loss has them, plus `alpha` / 4 times KL(p || r) + KL(r || p), where p and r are
 * their distributions. sums[0] += that, sums[1] += half the sum of their negative log-likelihoods. */
int NAME(r_drop_loss)(long n, long V, T *x, T *y, const int64_t *targets, long pad, float on, float off, long never,
                      float alpha, double *sums) {
    long whole = V & ~15L, wide = up16(V);
    float *p = floats(3 * wide), *r = p + wide, *apart = r + wide;
    if (!p) return 1;
    float weight = on + off * (float)(V - (never >= 0 ? 2 : 1));
    for (long j = V; j < wide; j++) apart[j] = 0.0f;
    for (long i = 0; i < n; i++, x += V, y += V) {
        long target = targets[i];
        if (target == pad) {
            memset(x, 0, (size_t)V * sizeof(T));
            memset(y, 0, (size_t)V * sizeof(T));
            continue;
        }
        float x_sum, y_sum, x_all, y_all;
        float x_log = NAME(exponentials)(x, V, p, &x_sum, &x_all), y_log = NAME(exponentials)(y, V, r, &y_sum, &y_all);
        float logs = 0.5f * (x_log + y_log), hit = 0.5f * (ONE(x[target]) + ONE(y[target]));
        float all = 0.5f * (x_all + y_all) - (never >= 0 ? 0.5f * (ONE(x[never]) + ONE(y[never])) : 0.0f);
        /* apart = log p - log r, and its means under p and under r, which are KL(p || r) and -KL(r || p) */
        float between = x_log - y_log, x_share = 1.0f / x_sum, y_share = 1.0f / y_sum;
        for (long j = 0; j < whole; j += VEC_WIDTH) store_float(apart + j, LOAD(x + j) - LOAD(y + j) - between);
        for (long j = whole; j < V; j++) apart[j] = ONE(x[j]) - ONE(y[j]) - between;
        vec under_p = splat(0.0f), under_r = splat(0.0f);
        for (long j = 0; j < wide; j += VEC_WIDTH) {
            vec a = load_float(p + j) * x_share, b = load_float(r + j) * y_share, d = load_float(apart + j);
            store_float(p + j, a);
            store_float(r + j, b);
            under_p += a * d;
            under_r += b * d;
        }
        float p_mean = total(under_p), r_mean = total(under_r), pull = 0.25f * alpha;
        sums[1] += logs - hit;
        sums[0] += (double)weight * logs - (double)(on - off) * hit - (double)off * all;
        sums[0] += (double)pull * (p_mean - r_mean);
        for (long j = 0; j < wide; j += VEC_WIDTH) {
            vec a = load_float(p + j), b = load_float(r + j), d = load_float(apart + j);
            store_float(p + j, 0.5f * (a * weight - off) + pull * (a * (d - p_mean) + a - b));
            store_float(r + j, 0.5f * (b * weight - off) + pull * (b * (r_mean - d) + b - a));
        }
        float more = 0.5f * (on - off);
        p[target] -= more;
        r[target] -= more;
        if (never >= 0) {
            p[never] += 0.5f * off;
            r[never] += 0.5f * off;
        }
        for (long j = 0; j < whole; j += VEC_WIDTH) {
            STORE(x + j, load_float(p + j));
            STORE(y + j, load_float(r + j));
        }
        for (long j = whole; j < V; j++) {
            x[j] = TO(p[j]);
            y[j] = TO(r[j]);
        }
    }
    free(p);
    return 0;
}

#endif
