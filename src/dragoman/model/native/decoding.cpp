// What stands between two matrix products of a decoding step, one pass over each row.
//
// A product leaves its result as float32, bfloat16 or, for int8 weights, int32 sums with a scale for each row (the
// activations') and each column (the weights'). Each function here reads such rows, adds the bias, does its work in
// float32 and leaves the next product's input in the same precision. Rows never meet: what a row gives cannot depend on
// its neighbours. transformer.py says what all of this must come to; tests hold the two against each other.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace {

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

inline float from_bfloat16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline uint16_t to_bfloat16(float value) {  // round to nearest even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// e^x for x <= 0 by range reduction and a polynomial, so that the compiler can vectorise it; relative error below 2e-7.
inline float exp_negative(float x) {
    x = std::max(x, -87.0f);
    const float n = std::nearbyintf(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

// The largest value, and the largest magnitude. One running maximum would have each wait for the one before it, and the
// compiler may not make several of one, since that could change what becomes of a NaN.
template <typename Of>
inline float largest_of(const float* x, int64_t n, float least, Of of) {
    constexpr int64_t LANES = 32;
    float lanes[LANES];
    std::fill(lanes, lanes + LANES, least);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int64_t j = 0; j < LANES; ++j) {
            const float value = of(x[i + j]);
            lanes[j] = value > lanes[j] ? value : lanes[j];
        }
    float largest = least;
    for (; i < n; ++i) largest = std::max(largest, of(x[i]));
    for (int64_t width = LANES / 2; width > 0; width /= 2)
        for (int64_t j = 0; j < width; ++j) lanes[j] = lanes[j + width] > lanes[j] ? lanes[j + width] : lanes[j];
    return std::max(largest, lanes[0]);
}

inline float largest_value(const float* x, int64_t n) {
    return largest_of(x, n, -INFINITY, [](float value) { return value; });
}

inline float largest_magnitude(const float* x, int64_t n) {
    return largest_of(x, n, 0.0f, [](float value) { return std::fabs(value); });
}

// Row `row` of a product with `n` columns, bias added.
inline void load(int kind, const void* product, int64_t row, int64_t n, const float* row_scale, const float* column_scale,
                 const float* bias, float* out) {
    if (kind == FLOAT32) {
        const float* in = static_cast<const float*>(product) + row * n;
        for (int64_t i = 0; i < n; ++i) out[i] = in[i] + bias[i];
    } else if (kind == BFLOAT16) {
        const uint16_t* in = static_cast<const uint16_t*>(product) + row * n;
        for (int64_t i = 0; i < n; ++i) out[i] = from_bfloat16(in[i]) + bias[i];
    } else {
        const int32_t* in = static_cast<const int32_t*>(product) + row * n;
        const float scale = row_scale[row];
        for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]) * (scale * column_scale[i]) + bias[i];
    }
}

// A row as the next product wants it: int8 is symmetric, with the row's largest magnitude at 127.
inline void store(int kind, const float* in, int64_t row, int64_t n, void* out, float* row_scale) {
    if (kind == FLOAT32) {
        std::memcpy(static_cast<float*>(out) + row * n, in, n * sizeof(float));
    } else if (kind == BFLOAT16) {
        uint16_t* to = static_cast<uint16_t*>(out) + row * n;
        for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(in[i]);
    } else {
        int8_t* to = static_cast<int8_t*>(out) + row * n;
        const float largest = largest_magnitude(in, n);
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        row_scale[row] = largest / 127.0f;
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyintf(in[i] * inverse)));
    }
}

inline float dot(const float* a, const float* b, int64_t n) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// Softmax of `n` scores in place; returns nothing to divide by: the weights sum to one.
inline void softmax(float* scores, int64_t n) {
    float largest = scores[0];
    for (int64_t i = 1; i < n; ++i) largest = std::max(largest, scores[i]);
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
        scores[i] = exp_negative(scores[i] - largest);
        sum += scores[i];
    }
    const float inverse = 1.0f / sum;
    for (int64_t i = 0; i < n; ++i) scores[i] *= inverse;
}

// One query over `length` keys and values, all heads. at(t) is where position t's keys stand, its values d_keys further.
template <typename At>
inline void attend(const float* q, int64_t heads, int64_t d_k, int64_t d_v, int64_t length, At at, float* scores, float* out) {
    const int64_t d_keys = heads * d_k;
    const float scale = 1.0f / std::sqrt(static_cast<float>(d_k));
    for (int64_t t = 0; t < length; ++t) {
        const float* k = at(t);
        for (int64_t h = 0; h < heads; ++h) scores[h * length + t] = dot(q + h * d_k, k + h * d_k, d_k) * scale;
    }
    for (int64_t h = 0; h < heads && length > 0; ++h) softmax(scores + h * length, length);
    std::fill(out, out + heads * d_v, 0.0f);
    for (int64_t t = 0; t < length; ++t) {
        const float* v = at(t) + d_keys;
        for (int64_t h = 0; h < heads; ++h) {
            const float weight = scores[h * length + t];
            float* to = out + h * d_v;
            for (int64_t i = 0; i < d_v; ++i) to[i] += weight * v[h * d_v + i];
        }
    }
}

// sum of a[i] b[i], exact.
inline int32_t dot(const int16_t* a, const int8_t* b, int64_t n) {
    int32_t sum = 0;
    int64_t i = 0;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    __m512i sums = _mm512_setzero_si512();
    for (; i + 32 <= n; i += 32) {
        const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + i)));
        sums = _mm512_dpwssd_epi32(sums, wide, _mm512_loadu_si512(a + i));
    }
    sum = _mm512_reduce_add_epi32(sums);
#endif
    for (; i < n; ++i) sum += static_cast<int32_t>(a[i]) * b[i];
    return sum;
}

inline float wide(float weight) { return weight; }
inline float wide(uint16_t weight) { return from_bfloat16(weight); }

// out[rows, n_out] = x[rows, n_in] W[n_in, n_out] for few rows: the weights are read once, in the order in which they
// stand. Each output is one running sum, from the first input to the last.
template <typename T>
void few_rows_product(const T* x, int64_t rows, const T* weight, int64_t n_in, int64_t n_out, float* out) {
    std::fill(out, out + rows * n_out, 0.0f);
    int64_t i = 0;
    for (; i + 8 <= n_in; i += 8) {
        const T* w = weight + i * n_out;
        for (int64_t row = 0; row < rows; ++row) {
            const T* a = x + row * n_in + i;
            const float a0 = wide(a[0]), a1 = wide(a[1]), a2 = wide(a[2]), a3 = wide(a[3]);
            const float a4 = wide(a[4]), a5 = wide(a[5]), a6 = wide(a[6]), a7 = wide(a[7]);
            float* to = out + row * n_out;
            for (int64_t o = 0; o < n_out; ++o) {
                float sum = to[o];
                sum += a0 * wide(w[o]);
                sum += a1 * wide(w[o + n_out]);
                sum += a2 * wide(w[o + 2 * n_out]);
                sum += a3 * wide(w[o + 3 * n_out]);
                sum += a4 * wide(w[o + 4 * n_out]);
                sum += a5 * wide(w[o + 5 * n_out]);
                sum += a6 * wide(w[o + 6 * n_out]);
                sum += a7 * wide(w[o + 7 * n_out]);
                to[o] = sum;
            }
        }
    }
    for (; i < n_in; ++i)
        for (int64_t row = 0; row < rows; ++row) {
            const float a = wide(x[row * n_in + i]);
            for (int64_t o = 0; o < n_out; ++o) out[row * n_out + o] += a * wide(weight[i * n_out + o]);
        }
}

}  // namespace

extern "C" {

// Weights as Python lays them out: [in, out], but int8 [out, in].
struct Linear {
    const void* weight;
    const float *scales, *bias;
    int64_t n_in, n_out;
};

struct Norm {
    const float *gamma, *beta;
    float epsilon;
};

struct DecoderLayer {
    Linear qkv, o, q, cross_o, inner, outer;
    Norm norm, cross_norm, last_norm;
    int64_t heads, d_k, d_v, cross_heads, cross_d_k, cross_d_v;
};

struct Decoder {
    int kind, activation;
    float scale;  // of embeddings
    int64_t d, n_layers, n_blocks;
    const float* embedding;
    const DecoderLayer* layers;
    const Linear* blocks;  // the vocabulary's
};

// x = LayerNorm(x + product + bias), and the same as the next product's input.
void residual_norm(int kind, const void* product, const float* row_scale, const float* column_scale, const float* bias,
                   float* x, const float* gamma, const float* beta, float epsilon, int64_t rows, int64_t d, void* out,
                   float* out_scale) {
    std::vector<float> row_buffer(d);
    float* y = row_buffer.data();
    for (int64_t row = 0; row < rows; ++row) {
        load(kind, product, row, d, row_scale, column_scale, bias, y);
        float* to = x + row * d;
        float sum = 0.0f;
        for (int64_t i = 0; i < d; ++i) {
            y[i] += to[i];
            sum += y[i];
        }
        const float mean = sum / d;
        float squares = 0.0f;
        for (int64_t i = 0; i < d; ++i) squares += (y[i] - mean) * (y[i] - mean);
        const float inverse = 1.0f / std::sqrt(squares / d + epsilon);
        for (int64_t i = 0; i < d; ++i) to[i] = (y[i] - mean) * inverse * gamma[i] + beta[i];
        if (kind != FLOAT32) store(kind, to, row, d, out, out_scale);
    }
}

// The inner activation of a feed-forward network: 0 ReLU, 1 swish, 2 GELU (by the error function).
void activate(int kind, const void* product, const float* row_scale, const float* column_scale, const float* bias,
              int64_t rows, int64_t n, int activation, void* out, float* out_scale) {
    std::vector<float> row_buffer(n);
    float* y = row_buffer.data();
    for (int64_t row = 0; row < rows; ++row) {
        load(kind, product, row, n, row_scale, column_scale, bias, y);
        if (activation == 0) {
            for (int64_t i = 0; i < n; ++i) y[i] = std::max(y[i], 0.0f);
        } else if (activation == 1) {
            for (int64_t i = 0; i < n; ++i) {  // x / (1 + e^-x), with e to a negative power alone
                const float e = exp_negative(-std::fabs(y[i]));
                y[i] *= (y[i] >= 0.0f ? 1.0f : e) / (1.0f + e);
            }
        } else {
            for (int64_t i = 0; i < n; ++i) y[i] *= 0.5f * (1.0f + std::erf(y[i] * 0.70710678f));
        }
        store(kind, y, row, n, out, out_scale);
    }
}

// Rows as the next product's input: the first of a chain.
void prepare(int kind, const float* x, int64_t rows, int64_t n, void* out, float* out_scale) {
    for (int64_t row = 0; row < rows; ++row) store(kind, x + row * n, row, n, out, out_scale);
}

// Product plus bias in float32: keys and values of the memory, logits that a caller wants whole.
void finish(int kind, const void* product, const float* row_scale, const float* column_scale, const float* bias,
            int64_t rows, int64_t n, int64_t out_stride, float* out) {
    for (int64_t row = 0; row < rows; ++row)
        load(kind, product, row, n, row_scale, column_scale, bias, out + row * out_stride);
}

// Self-attention of a step. A position's keys and values stand in line (slot & low bits) of page (slot >> page_bits);
// slots[row, t] names that of position t, so that beams that share a past share its lines, and none is ever moved.
void attend_past(int kind, const void* product, const float* row_scale, const float* column_scale, const float* bias,
                 int64_t rows, int64_t heads, int64_t d_k, int64_t d_v, float* const* pages, int page_bits,
                 const int32_t* slots, int64_t slots_stride, const int32_t* lengths, void* out, float* out_scale) {
    const int64_t d_keys = heads * d_k, d_values = heads * d_v, width = 2 * d_keys + d_values, kept = d_keys + d_values;
    const int32_t low = (1 << page_bits) - 1;
    std::vector<float> qkv(width), y(d_values), scores;
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t length = lengths[row];  // the newest position included
        const int32_t* mine = slots + row * slots_stride;
        const auto at = [&](int64_t t) { return pages[mine[t] >> page_bits] + (mine[t] & low) * kept; };
        load(kind, product, row, width, row_scale, column_scale, bias, qkv.data());
        std::memcpy(at(length - 1), qkv.data() + d_keys, kept * sizeof(float));
        if (static_cast<int64_t>(scores.size()) < heads * length) scores.resize(2 * heads * length);
        attend(qkv.data(), heads, d_k, d_v, length, at, scores.data(), y.data());
        store(kind, y.data(), row, d_values, out, out_scale);
    }
}

// Attention of a step over the source: starts[row] is the first of lengths[row] lines of `memory`.
void attend_memory(int kind, const void* product, const float* row_scale, const float* column_scale, const float* bias,
                   int64_t rows, int64_t heads, int64_t d_k, int64_t d_v, const float* const* memories,
                   const int32_t* lengths, void* out, float* out_scale) {
    const int64_t d_keys = heads * d_k, d_values = heads * d_v, kept = d_keys + d_values;
    std::vector<float> q(d_keys), y(d_values), scores;
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t length = lengths[row];
        const float* memory = memories[row];
        load(kind, product, row, d_keys, row_scale, column_scale, bias, q.data());
        if (static_cast<int64_t>(scores.size()) < heads * length) scores.resize(heads * length);
        attend(q.data(), heads, d_k, d_v, length, [&](int64_t t) { return memory + t * kept; }, scores.data(), y.data());
        store(kind, y.data(), row, d_values, out, out_scale);
    }
}

// Self-attention of the encoder over sentences laid end to end: sentence b is lines offsets[b] to offsets[b + 1].
void attend_source(int kind, const void* product, const float* row_scale, const float* column_scale, const float* bias,
                   int64_t sentences, const int32_t* offsets, int64_t heads, int64_t d_k, int64_t d_v, void* out,
                   float* out_scale) {
    const int64_t d_keys = heads * d_k, d_values = heads * d_v, width = 2 * d_keys + d_values;
    std::vector<float> lines, y(d_values), scores;
    for (int64_t b = 0; b < sentences; ++b) {
        const int64_t first = offsets[b], length = offsets[b + 1] - first;
        lines.resize(length * width);
        scores.resize(heads * length);
        for (int64_t t = 0; t < length; ++t)
            load(kind, product, first + t, width, row_scale, column_scale, bias, lines.data() + t * width);
        for (int64_t t = 0; t < length; ++t) {
            attend(lines.data() + t * width, heads, d_k, d_v, length,
                   [&](int64_t u) { return lines.data() + u * width + d_keys; }, scores.data(), y.data());
            store(kind, y.data(), first + t, d_values, out, out_scale);
        }
    }
}

// One block of vocabulary columns, `first` the number of its first: the running `k` largest logits of each row with
// their tokens (descending; ties to the lower token), and the running maximum and sum of exponentials over all tokens,
// the barred ones included, so that a log-probability is that of the whole distribution. barred[row, ...] ends at -1.
void best_tokens(int kind, const void* product, const float* row_scale, const float* column_scale, const float* bias,
                 int64_t rows, int64_t n, int64_t first, const int32_t* barred, int64_t barred_stride, int64_t k,
                 float* values, int32_t* tokens, float* largest, float* sums) {
    constexpr int64_t STRETCH = 64;
    std::vector<float> row_buffer(n), peaks(n / STRETCH + 1);
    float* y = row_buffer.data();
    for (int64_t row = 0; row < rows; ++row) {
        load(kind, product, row, n, row_scale, column_scale, bias, y);
        float* best = values + row * k;
        int32_t* token = tokens + row * k;
        if (first == 0) {
            largest[row] = -INFINITY;
            sums[row] = 0.0f;
            std::fill(best, best + k, -INFINITY);
            std::fill(token, token + k, -1);
        }
        // The largest of each stretch: where it is below the k-th so far, the stretch needs no second look.
        float top = -INFINITY;
        for (int64_t begin = 0; begin < n; begin += STRETCH) {
            peaks[begin / STRETCH] = largest_value(y + begin, std::min(STRETCH, n - begin));
            top = std::max(top, peaks[begin / STRETCH]);
        }
        if (top > largest[row]) {
            sums[row] = largest[row] == -INFINITY ? 0.0f : sums[row] * exp_negative(largest[row] - top);
            largest[row] = top;
        }
        float sum = 0.0f;
        const float reference = largest[row];
        for (int64_t i = 0; i < n; ++i) sum += exp_negative(y[i] - reference);
        sums[row] += sum;
        for (const int32_t* bar = barred + row * barred_stride; *bar >= 0; ++bar)
            if (*bar >= first && *bar < first + n) y[*bar - first] = -INFINITY;
        for (int64_t begin = 0; begin < n; begin += STRETCH) {
            if (!(peaks[begin / STRETCH] > best[k - 1])) continue;
            for (int64_t i = begin, end = std::min(begin + STRETCH, n); i < end; ++i) {
                if (!(y[i] > best[k - 1])) continue;
                int64_t place = k - 1;
                for (; place > 0 && y[i] > best[place - 1]; --place) {
                    best[place] = best[place - 1];
                    token[place] = token[place - 1];
                }
                best[place] = y[i];
                token[place] = static_cast<int32_t>(first + i);
            }
        }
    }
}

// Where a step stands: each row's past, its source in each layer, and what it may not say (as above).
struct Rows {
    int64_t n;
    const int64_t* tokens;
    const float* positions;  // the table of position encodings
    float* const* pages;     // [layers, pages_stride]
    int64_t pages_stride;
    int page_bits;
    const int32_t* slots;
    int64_t slots_stride;
    const int32_t* lengths;
    const float* const* memories;  // [layers, n]
    const int32_t* memory_lengths;
    const int32_t* barred;
    int64_t barred_stride;
};

// A whole step for few rows: what the functions above do between the products of a library, with products that read
// the weights as a stream. At few rows a step's time is that of reading the weights, if nothing else is added to it.
void few_rows_step(const Decoder* model, const Rows* rows, int64_t k, float* values, int32_t* tokens, float* largest,
                   float* sums) {
    const int kind = model->kind;
    const int64_t n = rows->n, d = model->d;
    int64_t widest = d;
    for (int64_t l = 0; l < model->n_layers; ++l)
        for (const Linear* each : {&model->layers[l].qkv, &model->layers[l].cross_o, &model->layers[l].inner, &model->layers[l].outer})
            widest = std::max({widest, each->n_in, each->n_out});
    for (int64_t b = 0; b < model->n_blocks; ++b) widest = std::max(widest, model->blocks[b].n_out);
    std::vector<float> x(n * d), given(n * widest), made(n * widest), wide_product(n * widest), scales(n);
    std::vector<int16_t> wide_input(widest);

    const auto product = [&](const Linear& linear, const void* input) {
        const int64_t n_in = linear.n_in, n_out = linear.n_out;
        if (kind == FLOAT32) {
            few_rows_product(static_cast<const float*>(input), n, static_cast<const float*>(linear.weight), n_in, n_out, made.data());
        } else if (kind == BFLOAT16) {
            few_rows_product(static_cast<const uint16_t*>(input), n, static_cast<const uint16_t*>(linear.weight), n_in, n_out,
                             wide_product.data());
            uint16_t* out = reinterpret_cast<uint16_t*>(made.data());
            for (int64_t i = 0; i < n * n_out; ++i) out[i] = to_bfloat16(wide_product[i]);
        } else {
            const int8_t* weight = static_cast<const int8_t*>(linear.weight);
            int32_t* out = reinterpret_cast<int32_t*>(made.data());
            std::vector<int16_t>& a = wide_input;
            a.resize(std::max<int64_t>(a.size(), n * n_in));
            const int8_t* narrow = static_cast<const int8_t*>(input);
            for (int64_t i = 0; i < n * n_in; ++i) a[i] = narrow[i];
            for (int64_t o = 0; o < n_out; ++o)
                for (int64_t row = 0; row < n; ++row) out[row * n_out + o] = dot(a.data() + row * n_in, weight + o * n_in, n_in);
        }
    };
    const auto normed = [&](const Linear& linear, const Norm& norm) {
        residual_norm(kind, made.data(), scales.data(), linear.scales, linear.bias, x.data(), norm.gamma, norm.beta, norm.epsilon, n,
                      d, given.data(), scales.data());
        return kind == FLOAT32 ? static_cast<const void*>(x.data()) : given.data();
    };

    for (int64_t row = 0; row < n; ++row) {
        const float* from = model->embedding + rows->tokens[row] * d;
        const float* position = rows->positions + (rows->lengths[row] - 1) * d;
        for (int64_t i = 0; i < d; ++i) x[row * d + i] = from[i] * model->scale + position[i];
    }
    prepare(kind, x.data(), n, d, given.data(), scales.data());
    const void* input = given.data();
    for (int64_t l = 0; l < model->n_layers; ++l) {
        const DecoderLayer& layer = model->layers[l];
        product(layer.qkv, input);
        attend_past(kind, made.data(), scales.data(), layer.qkv.scales, layer.qkv.bias, n, layer.heads, layer.d_k, layer.d_v,
                    rows->pages + l * rows->pages_stride, rows->page_bits, rows->slots, rows->slots_stride, rows->lengths,
                    given.data(), scales.data());
        product(layer.o, given.data());
        input = normed(layer.o, layer.norm);
        product(layer.q, input);
        attend_memory(kind, made.data(), scales.data(), layer.q.scales, layer.q.bias, n, layer.cross_heads, layer.cross_d_k,
                      layer.cross_d_v, rows->memories + l * n, rows->memory_lengths, given.data(), scales.data());
        product(layer.cross_o, given.data());
        input = normed(layer.cross_o, layer.cross_norm);
        product(layer.inner, input);
        activate(kind, made.data(), scales.data(), layer.inner.scales, layer.inner.bias, n, layer.inner.n_out, model->activation,
                 given.data(), scales.data());
        product(layer.outer, given.data());
        input = normed(layer.outer, layer.last_norm);
    }
    int64_t first = 0;
    for (int64_t b = 0; b < model->n_blocks; ++b) {
        const Linear& block = model->blocks[b];
        product(block, input);
        best_tokens(kind, made.data(), scales.data(), block.scales, block.bias, n, block.n_out, first, rows->barred,
                    rows->barred_stride, k, values, tokens, largest, sums);
        first += block.n_out;
    }
}

}  // extern "C"
