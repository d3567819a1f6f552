// Encoding, and a step of decoding, each as one call: what a trained model computes, row by row, without padding.
//
// Between two products (products.h) lies one pass over each row, which does its work in float32 and leaves the next
// product's input in the precision of the weights. Rows never meet: what a row gives cannot depend on its neighbours.
// transformer.py says what all of this must come to; tests hold the two against each other.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "attention.h"
#include "numbers.h"
#include "products.h"

namespace {

// A row as the next product wants it, zeros up to the end of its last group: int8 is symmetric, with the row's largest
// magnitude at 127, and stored 128 too large, since the processor multiplies unsigned by signed.
inline void narrow(int kind, const float* in, int64_t row, int64_t n, void* out, float* row_scale) {
    const int64_t room = stored(kind, n);
    if (kind == BFLOAT16) {
        uint16_t* to = static_cast<uint16_t*>(out) + row * room;
        for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(in[i]);
        for (int64_t i = n; i < room; ++i) to[i] = 0;
    } else {
        uint8_t* to = static_cast<uint8_t*>(out) + row * room;
        const float largest = largest_magnitude(in, n);
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        row_scale[row] = largest / 127.0f;
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(static_cast<int32_t>(std::nearbyintf(in[i] * inverse)) + 128);
        for (int64_t i = n; i < room; ++i) to[i] = 0;
    }
}

struct Norm {
    const float *gamma, *beta;
    float epsilon;
};

struct EncoderLayer {
    Linear qkv, o, inner, outer;
    Norm norm, last_norm;
    Heads heads;
};

struct DecoderLayer {
    Linear qkv, o, inner, outer, q, memory, cross_o;
    Norm norm, last_norm, cross_norm;
    Heads heads, cross_heads;
};

struct Model {
    int kind, activation;
    float scale;  // of embeddings
    int64_t d, n_encoder, n_decoder, source_words, target_words;
    const float *source_embedding, *target_embedding;
    const EncoderLayer* encoder;
    const DecoderLayer* decoder;
    Linear vocabulary;
};

// What a call answers: nothing may be thrown at C.
enum Answer { DONE = 0, NO_MEMORY = 1, NO_SUCH_TOKEN = 2 };

template <typename Work>
int answer_of(Work work) {
    try {
        work();
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (Answer answer) {
        return answer;
    }
}

// What passes from function to function for a block of rows.
struct Rows {
    int kind;
    int64_t n;
    std::vector<float> x, made, scales;  // the residual stream; a product; the scales of int8 inputs
    std::vector<float> room;             // the next product's input, in whatever type
    std::vector<float> row_values;       // one row of it in float32, where it has another
    const void* input;

    // For n rows; what a thread has once is kept for its next call.
    void resize(int of_kind, int64_t rows, int64_t d, int64_t widest) {
        kind = of_kind;
        n = rows;
        const auto at_least = [](std::vector<float>& values, int64_t size) {
            if (static_cast<int64_t>(values.size()) < size) values.resize(size);
        };
        at_least(x, n * d);
        at_least(made, n * widest);
        at_least(scales, n);
        at_least(room, n * (widest + PANEL));
        at_least(row_values, widest);
    }

    void multiply(const Linear& linear) {
        product(kind, linear, input, scales.data(), n, 0, panels_of(linear.n_out), made.data(), linear.n_out);
    }

    // Where a row of the next product's input is to be put together, and what is done when it is.
    float* place(int64_t row, int64_t width) { return kind == FLOAT32 ? room.data() + row * width : row_values.data(); }

    void give(const float* values, int64_t row, int64_t width) {
        if (kind != FLOAT32) narrow(kind, values, row, width, room.data(), scales.data());
        input = room.data();
    }

    void give_x(int64_t d) {  // float32 needs no copy
        input = x.data();
        if (kind != FLOAT32)
            for (int64_t row = 0; row < n; ++row) give(x.data() + row * d, row, d);
    }

    // x = embedding * scale + position.
    void embed(const float* embedding, int64_t words, const int64_t* tokens, float scale, const float* positions,
               const int32_t* places, int64_t d) {
        for (int64_t row = 0; row < n; ++row) {
            if (tokens[row] < 0 || tokens[row] >= words) throw NO_SUCH_TOKEN;
            const float *from = embedding + tokens[row] * d, *position = positions + places[row] * d;
            float* to = x.data() + row * d;
            for (int64_t i = 0; i < d; ++i) to[i] = from[i] * scale + position[i];
        }
        give_x(d);
    }

    // x = LayerNorm(x + product).
    void residual_norm(const Norm& norm, int64_t d) {
        const float *__restrict gamma = norm.gamma, *__restrict beta = norm.beta;
        for (int64_t row = 0; row < n; ++row) {
            float* __restrict to = x.data() + row * d;
            const float* __restrict y = made.data() + row * d;
            float sum = 0.0f;
            for (int64_t i = 0; i < d; ++i) {
                to[i] += y[i];
                sum += to[i];
            }
            const float mean = sum / d;
            float squares = 0.0f;
            for (int64_t i = 0; i < d; ++i) squares += (to[i] - mean) * (to[i] - mean);
            const float inverse = 1.0f / std::sqrt(squares / d + norm.epsilon);
            for (int64_t i = 0; i < d; ++i) to[i] = (to[i] - mean) * inverse * gamma[i] + beta[i];
        }
        give_x(d);
    }

    // The inner activation of a feed-forward network: 0 ReLU, 1 swish, 2 GELU (by the error function).
    void activate(int activation, int64_t width) {
        for (int64_t row = 0; row < n; ++row) {
            const float* __restrict y = made.data() + row * width;
            float* __restrict to = place(row, width);
            if (activation == 0) {
                for (int64_t i = 0; i < width; ++i) to[i] = std::max(y[i], 0.0f);
            } else if (activation == 1) {
                for (int64_t i = 0; i < width; ++i) {  // x / (1 + e^-x), with e to a negative power alone
                    const float e = exp_negative(-std::fabs(y[i]));
                    to[i] = y[i] * (y[i] >= 0.0f ? 1.0f : e) / (1.0f + e);
                }
            } else {
                for (int64_t i = 0; i < width; ++i) to[i] = y[i] * 0.5f * (1.0f + std::erf(y[i] * 0.70710678f));
            }
            give(to, row, width);
        }
    }

    template <typename Layer>
    void feed_forward(const Layer& layer, int activation, int64_t d) {
        multiply(layer.inner);
        activate(activation, layer.inner.n_out);
        multiply(layer.outer);
        residual_norm(layer.last_norm, d);
    }
};

template <typename Layer>
int64_t widest_of(const Layer& layer) {
    int64_t widest = 0;
    for (const Linear* each : {&layer.qkv, &layer.o, &layer.inner, &layer.outer}) widest = std::max({widest, each->n_in, each->n_out});
    return widest;
}

// Columns of the vocabulary whose logits are looked at together, while they are still in the cache.
constexpr int64_t VOCABULARY_PANELS = 1024 / PANEL;

// One row's logits of `n` tokens, `first` the number of their first: the running `k` largest with their tokens
// (descending; ties to the lower token), and the running maximum and sum of exponentials over all tokens, the barred ones
// included, so that a log-probability is that of the whole distribution. `barred` ends at -1.
inline void best_tokens(float* y, int64_t n, int64_t first, const int32_t* barred, int64_t k, float* best, int32_t* token,
                        float& largest, float& sums) {
    if (first == 0) {
        largest = -INFINITY;
        sums = 0.0f;
        std::fill(best, best + k, -INFINITY);
        std::fill(token, token + k, -1);
    }
    const float top = largest_value(y, n);
    if (top > largest) {
        sums = largest == -INFINITY ? 0.0f : sums * exp_negative(largest - top);
        largest = top;
    }
    const float reference = largest;
    for (; *barred >= 0; ++barred)
        if (*barred >= first && *barred < first + n) {
            sums += exp_negative(y[*barred - first] - reference);
            y[*barred - first] = -INFINITY;
        }
    const auto look_at = [&](int64_t i) {
        if (!(y[i] > best[k - 1])) return;
        int64_t place = k - 1;
        for (; place > 0 && y[i] > best[place - 1]; --place) {
            best[place] = best[place - 1];
            token[place] = token[place - 1];
        }
        best[place] = y[i];
        token[place] = static_cast<int32_t>(first + i);
    };
    Floats vector_sums{};
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        const Floats values = load(y + i);
        vector_sums += exp_negative(values - reference);
        for (uint32_t larger = bits_of(values > best[k - 1]); larger; larger &= larger - 1) look_at(i + __builtin_ctz(larger));
    }
    for (; i < n; ++i) {
        sums += exp_negative(y[i] - reference);
        look_at(i);
    }
    for (int64_t j = 0; j < WIDTH; ++j) sums += vector_sums[j];
}

// Sentences laid end to end, sentence b being lines offsets[b] to offsets[b + 1] -> their keys and values for each of the
// decoder's layers, memory[layer][lines, kept].
void encode_sentences(const Model* model, const int64_t* tokens, const float* positions, int64_t sentences, const int32_t* offsets,
            float* const* memory) {
    const int64_t d = model->d, n = offsets[sentences];
    int64_t widest = d;
    for (int64_t l = 0; l < model->n_encoder; ++l) widest = std::max(widest, widest_of(model->encoder[l]));
    static thread_local Rows rows;
    rows.resize(model->kind, n, d, widest);
    std::vector<int32_t> places(n);
    for (int64_t b = 0; b < sentences; ++b)
        for (int64_t t = offsets[b]; t < offsets[b + 1]; ++t) places[t] = static_cast<int32_t>(t - offsets[b]);
    rows.embed(model->source_embedding, model->source_words, tokens, model->scale, positions, places.data(), d);
    std::vector<float> scores;
    std::vector<Line> seen;
    for (int64_t l = 0; l < model->n_encoder; ++l) {
        const EncoderLayer& layer = model->encoder[l];
        const Heads& heads = layer.heads;
        const int64_t width = layer.qkv.n_out;
        rows.multiply(layer.qkv);
        for (int64_t b = 0; b < sentences; ++b) {
            const float* lines = rows.made.data() + offsets[b] * width;
            const int64_t length = offsets[b + 1] - offsets[b];
            seen.resize(length);
            for (int64_t t = 0; t < length; ++t) seen[t] = lines + t * width + heads.keys();
            for (int64_t t = 0; t < length; ++t) {
                float* y = rows.place(offsets[b] + t, heads.values());
                attend(lines + t * width, heads, seen.data(), length, scores, y);
                rows.give(y, offsets[b] + t, heads.values());
            }
        }
        rows.multiply(layer.o);
        rows.residual_norm(layer.norm, d);
        rows.feed_forward(layer, model->activation, d);
    }
    for (int64_t l = 0; l < model->n_decoder; ++l) {
        const Linear& kept = model->decoder[l].memory;
        product(model->kind, kept, rows.input, rows.scales.data(), n, 0, panels_of(kept.n_out), memory[l], kept.n_out);
    }
}

// Where a step stands: each row's past, its source in each layer, and what it may not say.
//
// A position's keys and values stand in line (slot & low bits) of page (slot >> page_bits); slots[row, t] names that of
// position t, so that beams that share a past share its lines, and none is ever moved. memories[layer, row] is the first
// of a row's memory_lengths lines. barred[row, ...] ends at -1.
struct Step {
    int64_t n;
    const int64_t* tokens;
    const float* positions;    // the table of position encodings
    float* const* pages;       // [layers, pages_stride]
    int64_t pages_stride;
    int page_bits;
    const int32_t* slots;
    int64_t slots_stride;
    const int32_t* lengths;    // the newest position included
    const float* const* memories;
    const int32_t* memory_lengths;
    const int32_t* barred;
    int64_t barred_stride;
};

// One position further: the `k` best tokens of each row, or where `logits` is given all of them, [n, V].
void step_rows(const Model* model, const Step* at, int64_t k, float* values, int32_t* tokens, float* largest, float* sums, float* logits) {
    const int64_t d = model->d, vocabulary = model->vocabulary.n_out, low = (int64_t{1} << at->page_bits) - 1;
    int64_t widest = std::max(d, VOCABULARY_PANELS * PANEL);
    for (int64_t l = 0; l < model->n_decoder; ++l) {
        const DecoderLayer& layer = model->decoder[l];
        widest = std::max({widest, widest_of(layer), layer.q.n_out, layer.cross_o.n_in});
    }
    static thread_local Rows rows;
    std::vector<float> scores;
    std::vector<Line> seen;
    std::vector<int32_t> places;
    for (int64_t first = 0; first < at->n; first += BLOCK) {
        const int64_t n = std::min(BLOCK, at->n - first);
        rows.resize(model->kind, n, d, widest);
        const int32_t* lengths = at->lengths + first;
        places.assign(lengths, lengths + n);
        for (int32_t& place : places) --place;
        rows.embed(model->target_embedding, model->target_words, at->tokens + first, model->scale, at->positions,
                   places.data(), d);
        for (int64_t l = 0; l < model->n_decoder; ++l) {
            const DecoderLayer& layer = model->decoder[l];
            const Heads &heads = layer.heads, &cross = layer.cross_heads;
            rows.multiply(layer.qkv);
            float* const* pages = at->pages + l * at->pages_stride;
            for (int64_t row = 0; row < n; ++row) {
                const int32_t* slots = at->slots + (first + row) * at->slots_stride;
                const float* qkv = rows.made.data() + row * layer.qkv.n_out;
                const auto line = [&](int64_t t) { return pages[slots[t] >> at->page_bits] + (slots[t] & low) * heads.kept(); };
                const int64_t length = lengths[row];
                seen.resize(length);
                for (int64_t t = 0; t < length; ++t) seen[t] = line(t);
                std::memcpy(line(length - 1), qkv + heads.keys(), heads.kept() * sizeof(float));
                float* y = rows.place(row, heads.values());
                attend(qkv, heads, seen.data(), length, scores, y);
                rows.give(y, row, heads.values());
            }
            rows.multiply(layer.o);
            rows.residual_norm(layer.norm, d);
            rows.multiply(layer.q);
            for (int64_t row = 0; row < n; ++row) {
                const float* memory = at->memories[l * at->n + first + row];
                const int64_t length = at->memory_lengths[first + row];
                seen.resize(length);
                for (int64_t t = 0; t < length; ++t) seen[t] = memory + t * cross.kept();
                float* y = rows.place(row, cross.values());
                attend(rows.made.data() + row * layer.q.n_out, cross, seen.data(), length, scores, y);
                rows.give(y, row, cross.values());
            }
            rows.multiply(layer.cross_o);
            rows.residual_norm(layer.cross_norm, d);
            rows.feed_forward(layer, model->activation, d);
        }
        const int64_t panels = panels_of(model->vocabulary.n_out);
        if (logits) {
            product(model->kind, model->vocabulary, rows.input, rows.scales.data(), n, 0, panels, logits + first * vocabulary, vocabulary);
            continue;
        }
        for (int64_t panel = 0; panel < panels; panel += VOCABULARY_PANELS) {
            const int64_t last = std::min(panels, panel + VOCABULARY_PANELS), begin = panel * PANEL;
            const int64_t columns = std::min(vocabulary, last * PANEL) - begin;
            product(model->kind, model->vocabulary, rows.input, rows.scales.data(), n, panel, last, rows.made.data(), columns);
            for (int64_t row = 0; row < n; ++row) {
                const int64_t i = first + row;
                best_tokens(rows.made.data() + row * columns, columns, begin, at->barred + i * at->barred_stride, k, values + i * k,
                            tokens + i * k, largest[i], sums[i]);
            }
        }
    }
}

}  // namespace

extern "C" {

int panel_columns() { return static_cast<int>(PANEL); }

int encode(const Model* model, const int64_t* tokens, const float* positions, int64_t sentences, const int32_t* offsets,
           float* const* memory) {
    return answer_of([&] { encode_sentences(model, tokens, positions, sentences, offsets, memory); });
}

int step(const Model* model, const Step* at, int64_t k, float* values, int32_t* tokens, float* largest, float* sums, float* logits) {
    return answer_of([&] { step_rows(model, at, k, values, tokens, largest, sums, logits); });
}

}  // extern "C"
