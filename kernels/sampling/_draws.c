/* Philox words, the race for a token, the best one and the threshold of top-p, on any processor: see random.py, sample.py.

   A row's token depends on that row and its stream alone.
*/

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../common/inline.h"
#include "../common/wide.h"

enum { ROUNDS = 10, COUNTERS = 32, BLOCK = 4 * COUNTERS };

/* Whose draws: one number a row each. */
typedef struct {
    const int64_t *seeds, *choices, *positions;
    int64_t purpose;
} Stream;

/* The words of indices first, first + 1, ...; first is a multiple of 4. */
static void draw_block(uint32_t *words, const Stream *stream, int64_t row, int64_t first) {
    uint32_t c0[COUNTERS], c1[COUNTERS], c2[COUNTERS], c3[COUNTERS];
    uint32_t k0 = (uint32_t)stream->seeds[row], k1 = (uint32_t)((uint64_t)stream->seeds[row] >> 32);
    for (int i = 0; i < COUNTERS; i++) {
        c0[i] = (uint32_t)(first / 4 + i);
        c1[i] = (uint32_t)stream->positions[row];
        c2[i] = (uint32_t)stream->choices[row];
        c3[i] = (uint32_t)stream->purpose;
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < COUNTERS; i++) {
            uint64_t one = UINT64_C(0xD2511F53) * c0[i], two = UINT64_C(0xCD9E8D57) * c2[i];
            c0[i] = (uint32_t)(two >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)two;
            c2[i] = (uint32_t)(one >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)one;
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    for (int i = 0; i < COUNTERS; i++)
        words[4 * i] = c0[i], words[4 * i + 1] = c1[i], words[4 * i + 2] = c2[i], words[4 * i + 3] = c3[i];
}

/* out [rows, count] */
void draw_words(const Stream *stream, int64_t rows, int64_t count, int64_t *out) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t first = 0; first < count; first += BLOCK) {
            uint32_t words[BLOCK];
            draw_block(words, stream, row, first);
            for (int64_t i = 0; i < smaller(BLOCK, count - first); i++) out[row * count + first + i] = words[i];
        }
}

/* The natural logarithm of a normal number, to 6e-7 of it up to 15/16: an odd series in (m - 1) / (m + 1), where x is
   m * 2^e and m in [sqrt(1/2), sqrt(2)). */
INLINE float logarithm(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof x);
    int32_t e = (bits - 0x3F3504F3) >> 23;
    bits -= e * (1 << 23);
    float m;
    memcpy(&m, &bits, sizeof m);
    float s = (m - 1) / (m + 1), t = s * s;
    return (float)e * 0x1.62e43p-1f + s * (2 + t * (2 / 3.f + t * (2 / 5.f + t * (2 / 7.f + t * (2 / 9.f)))));
}

INLINE float exponential(uint32_t word) {
    float u = (float)word * 0x1p-32f + 0x1p-33f;
    if (word < 1u << 28) return u * (1 + u * (1 / 2.f + u * (1 / 3.f + u * (1 / 4.f + u * (1 / 5.f + u * (1 / 6.f))))));
    return -logarithm((float)~word * 0x1p-32f + 0x1p-33f);
}

/* The first index of the largest p / e, 0 where no p is positive. */
static int64_t race_of_row(const float *p, int64_t count, const Stream *stream, int64_t row) {
    float best = 0;
    int64_t winner = 0;
    for (int64_t first = 0; first < count; first += BLOCK, p += BLOCK) {
        int64_t size = smaller(BLOCK, count - first);
        int runs = 0;
        for (int64_t i = 0; i < size; i++) runs |= p[i] > 0;
        if (!runs) continue;
        uint32_t words[BLOCK];
        draw_block(words, stream, row, first);
        /* e is larger than the word / 2^32, so few come near the best, and only those need a logarithm. */
        float bound = best * (0x1p-31f * (1 - 0x1p-20f));
        int is_near = 0;
        for (int64_t i = 0; i < size; i++) is_near |= p[i] > bound * (float)(int32_t)(words[i] >> 1);
        if (!is_near) continue;
        for (int64_t i = 0; i < size; i++) {
            float value = p[i] / exponential(words[i]);
            if (value > best) best = value, winner = first + i;
        }
    }
    return winner;
}

/* p [rows, count], tokens [rows] */
void race(const float *p, const Stream *stream, int64_t rows, int64_t count, int64_t *tokens, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) tokens[row] = race_of_row(p + row * count, count, stream, row);
}

enum { AT_ONCE = 16 * WIDTH };

typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

/* WIDTH scores, fp32 or bf16, from `i` on. */
INLINE Wide scores_at(int is_bf16, const void *row, int64_t i) {
    Wide wide;
    if (is_bf16) {
        Halves halves;
        __builtin_memcpy(&halves, (const uint16_t *)row + i, sizeof halves);
        return (Wide)(__builtin_convertvector(halves, Lanes) << 16);
    }
    __builtin_memcpy(&wide, (const float *)row + i, sizeof wide);
    return wide;
}

INLINE float score_at(int is_bf16, const void *row, int64_t i) {
    if (!is_bf16) return ((const float *)row)[i];
    union {
        uint32_t bits;
        float value;
    } score = {(uint32_t)((const uint16_t *)row)[i] << 16};
    return score.value;
}

/* The first largest score; -1 where that is not finite, or a score is NaN. Only where AT_ONCE scores hold one larger than
   all before is it looked for. */
INLINE int64_t first_best_of(int is_bf16, const void *row, int64_t count) {
    float best = -__builtin_inff();
    int64_t place = -1, whole = count / AT_ONCE * AT_ONCE;
    for (int64_t i = 0; i < whole; i += AT_ONCE) {
        Wide top = scores_at(is_bf16, row, i);
        Lanes unordered = top != top;
        for (int64_t j = WIDTH; j < AT_ONCE; j += WIDTH) {
            Wide scores = scores_at(is_bf16, row, i + j);
            unordered |= scores != scores;
            top = highest_of(top, scores);
        }
        float largest = best;
        int is_wrong = 0;
        for (int lane = 0; lane < WIDTH; lane++) {
            is_wrong |= unordered[lane];
            largest = top[lane] > largest ? top[lane] : largest;
        }
        if (is_wrong) return -1;
        if (largest == best) continue;
        best = largest;
        for (place = i; score_at(is_bf16, row, place) != best;) place++;
    }
    for (int64_t i = whole; i < count; i++) {
        float score = score_at(is_bf16, row, i);
        if (score != score) return -1;
        if (score > best) {
            best = score;
            place = i;
        }
    }
    return __builtin_isinf(best) ? -1 : place;
}

/* scores [rows, count], fp32 or bf16, rows so many bytes apart; tokens [rows] */
void first_best(const void *scores, int is_bf16, int64_t row_bytes, int64_t rows, int64_t count, int64_t *tokens,
                int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
    for (int64_t i = 0; i < rows; i++) {
        const void *row = (const char *)scores + i * row_bytes;
        tokens[i] = is_bf16 ? first_best_of(1, row, count) : first_best_of(0, row, count);
    }
}

typedef struct {
    float score, weight;
} Candidate;

INLINE void swap(Candidate *one, Candidate *other) {
    Candidate kept = *one;
    *one = *other;
    *other = kept;
}

/* The least score that is kept: of all larger ones together the weights are below the limit. Changes the order. */
static float least_of(Candidate *candidates, int64_t count, double limit) {
    int64_t low = 0, high = count;
    double before = 0; /* the weights above candidates[low .. high) */
    for (;;) {
        /* Larger ones go to [low, larger), smaller ones to [smaller, high); pivots and NaNs stay between them. */
        float pivot = candidates[low + (high - low) / 2].score;
        int64_t larger = low, smaller = high;
        double above = before, equal = 0;
        for (int64_t i = low; i < smaller;) {
            if (candidates[i].score > pivot) {
                above += candidates[i].weight;
                swap(&candidates[larger++], &candidates[i++]);
            } else if (candidates[i].score < pivot) {
                swap(&candidates[--smaller], &candidates[i]);
            } else {
                equal += candidates[i++].weight;
            }
        }
        if (above >= limit && larger > low) {
            high = larger;
        } else if (above + equal >= limit || smaller == high) {
            return pivot;
        } else {
            before = above + equal;
            low = smaller;
        }
    }
}

/* The least kept score of each row of scores [rows, count], whose weights [rows, count] sum to 1. Returns 1 where memory
   is missing. */
int least_kept(
    const float *scores, const float *weights, const float *limits, int64_t rows, int64_t count, float *out, int threads
) {
    int is_short = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : is_short) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        Candidate *candidates = malloc(count * sizeof *candidates);
        if (candidates == NULL) {
            is_short = 1;
            continue;
        }
        const float *score = scores + row * count, *weight = weights + row * count;
        /* All that weigh less than this make no more than 1 - limit together, so the limit is reached before them. */
        float least = (1 - limits[row]) / count / 2;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++)
            if (!(weight[i] < least)) candidates[kept++] = (Candidate){score[i], weight[i]};
        out[row] = least_of(candidates, kept, limits[row]);
        free(candidates);
    }
    return is_short;
}
