/* Products of few queries with a long history on a processor. The only caller is rows.py.

   The file includes itself, once for every kind of number. */
#ifndef REAL

#include <stdint.h>
#include <string.h>

#define TASK_TOKENS 256 /* rows of one task */
#define DECODED 16      /* rows decoded before they are used: what was just written cannot be read at once */
#define TOGETHER 4      /* rows that one load of a query meets */
#define MOST_WIDTH 512
#define MOST_PLANES 4
#define MOST_SYMBOLS 2

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

enum kind { PLAIN, BFLOAT16, SYMBOLS, NIBBLES };

/* Rows of numbers as they are stored, [heads, tokens, width]. */
struct rows {
    int64_t kind, width, planes;
    const uint8_t *plane[MOST_PLANES];
    int64_t head_bytes[MOST_PLANES], token_bytes[MOST_PLANES]; /* from one head, and one token, to the next */
    int64_t bits[MOST_PLANES];                                 /* a plane of 8 bits begins a new kind of symbol */
    int64_t symbols;                                           /* kinds of symbols */
    const void *table[MOST_SYMBOLS];                           /* of each, [symbols, numbers] */
    int64_t numbers[MOST_SYMBOLS];
    const int8_t *scale; /* of each row, as a logarithm; may be null */
    int64_t scale_head_bytes, scale_token_bytes;
    const void *powers; /* scales by logarithm + 128 */
};

/* Up to 8 bytes of a plane as one word. */
INLINE uint64_t word(const uint8_t *byte, int64_t bytes) {
    uint64_t found = 0;
    memcpy(&found, byte, (size_t)bytes);
    return found;
}

/* `count` symbols of one row, whose `planes` planes begin with number `p`. See packing.py. */
INLINE void unpack(const struct rows *rows, int64_t head, int64_t token, int64_t count, int64_t p, int64_t planes,
                   int32_t *symbol) {
    memset(symbol, 0, (size_t)count * sizeof *symbol);
    for (int64_t end = p + planes, shift = 0; p < end; shift += rows->bits[p++]) {
        int64_t bits = rows->bits[p], mask = (1 << bits) - 1;
        const uint8_t *byte = rows->plane[p] + head * rows->head_bytes[p] + token * rows->token_bytes[p];
        for (int64_t i = 0; i < count; i++)
            symbol[i] |= (int32_t)(((byte[(i * bits) >> 3] >> ((i * bits) & 7)) & mask) << shift);
    }
}

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(a) JOIN(a, REAL)

#define REAL float
#include "rows.c"
#undef REAL
#define REAL double
#include "rows.c"
#undef REAL

#else

typedef REAL NAME(vector) __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));
#define VECTOR NAME(vector)
#define LANES ((int64_t)(32 / sizeof(REAL)))

/* The numbers of symbols of 8 bits in `low` and `bits` more in `high`, taken by the word. */
INLINE void NAME(look_up_words)(const uint8_t *low, const uint8_t *high, int64_t bits, int64_t count,
                                const REAL *table, int64_t numbers, REAL *buffer) {
    for (int64_t first = 0; first < count; first += 8) {
        uint64_t lower = word(low + first, 8), upper = bits ? word(high + first * bits / 8, bits) : 0;
        for (int64_t i = 0; i < 8; i++) {
            uint64_t symbol = (lower >> (8 * i)) & 255;
            if (bits) symbol |= ((upper >> (bits * i)) & ((1u << bits) - 1)) << 8;
            memcpy(buffer + numbers * (first + i), table + numbers * symbol, (size_t)numbers * sizeof(REAL));
        }
    }
}

/* `count` symbols of every kind, as the numbers they stand for. Those of 8 and 10 bits, which most have, go fast. */
INLINE void NAME(look_up)(const struct rows *rows, int64_t head, int64_t token, int64_t count, REAL *buffer) {
    for (int64_t s = 0, p = 0; s < rows->symbols; s++) {
        const REAL *table = rows->table[s];
        int64_t numbers = rows->numbers[s], planes = 1;
        while (p + planes < rows->planes && rows->bits[p + planes] < 8) planes++;
        const uint8_t *low = rows->plane[p] + head * rows->head_bytes[p] + token * rows->token_bytes[p];
        if (count % 8 == 0 && planes == 1) {
            if (numbers == 2)
                NAME(look_up_words)(low, low, 0, count, table, 2, buffer);
            else
                NAME(look_up_words)(low, low, 0, count, table, 4, buffer);
        } else if (count % 8 == 0 && planes == 2 && rows->bits[p + 1] == 2) {
            const uint8_t *high =
                rows->plane[p + 1] + head * rows->head_bytes[p + 1] + token * rows->token_bytes[p + 1];
            if (numbers == 2)
                NAME(look_up_words)(low, high, 2, count, table, 2, buffer);
            else
                NAME(look_up_words)(low, high, 2, count, table, 4, buffer);
        } else {
            int32_t symbol[MOST_WIDTH];
            unpack(rows, head, token, count, p, planes, symbol);
            for (int64_t i = 0; i < count; i++)
                memcpy(buffer + numbers * i, table + numbers * symbol[i], (size_t)numbers * sizeof(REAL));
        }
        buffer += count * numbers;
        p += planes;
    }
}

/* One row as numbers: where it lies, or in `buffer`. */
INLINE const REAL *NAME(row)(const struct rows *rows, int64_t head, int64_t token, int64_t width, REAL *buffer) {
    const uint8_t *at = rows->plane[0] + head * rows->head_bytes[0] + token * rows->token_bytes[0];
    if (rows->kind == PLAIN) return (const REAL *)at;
    if (rows->kind == BFLOAT16) {
        const uint16_t *half = (const uint16_t *)at;
        for (int64_t i = 0; i < width; i++) {
            uint32_t bits = (uint32_t)half[i] << 16;
            float number;
            memcpy(&number, &bits, sizeof number);
            buffer[i] = number;
        }
    } else if (rows->kind == NIBBLES) {
        const int8_t *code = (const int8_t *)at;
        for (int64_t i = 0; i < width / 2; i++) buffer[i] = (REAL)((code[i] & 15) - 8) + (REAL)0.5;
        for (int64_t i = 0; i < width / 2; i++) buffer[width / 2 + i] = (REAL)(code[i] >> 4) + (REAL)0.5;
    } else if (rows->numbers[0] * rows->symbols == 4) {
        NAME(look_up)(rows, head, token, width / 4, buffer);
    } else {
        NAME(look_up)(rows, head, token, width / 2, buffer);
    }
    return buffer;
}

/* DECODED rows from `token` on, and their scales; behind the last one, that one again. */
INLINE void NAME(decode)(const struct rows *rows, int64_t head, int64_t token, int64_t end, int64_t width,
                         const REAL **row, REAL *scale, REAL *buffer) {
    for (int64_t t = 0; t < DECODED; t++) {
        int64_t place = token + t < end ? token + t : end - 1;
        row[t] = NAME(row)(rows, head, place, width, buffer + t * width);
        scale[t] = 1;
        if (rows->scale) {
            int8_t logarithm = rows->scale[head * rows->scale_head_bytes + place * rows->scale_token_bytes];
            scale[t] = ((const REAL *)rows->powers)[logarithm + 128];
        }
    }
}

INLINE void NAME(score_rows)(const struct rows *rows, const REAL *query, REAL *out, int64_t head, int64_t queries,
                             int64_t tokens, int64_t begin, int64_t end, int64_t width) {
    REAL buffer[DECODED * MOST_WIDTH], scale[DECODED];
    const REAL *row[DECODED];
    for (int64_t first = begin; first < end; first += DECODED) {
        NAME(decode)(rows, head, first, end, width, row, scale, buffer);
        int64_t count = end - first < DECODED ? end - first : DECODED;
        for (int64_t some = 0; some < count; some += TOGETHER)
            for (int64_t q = 0; q < queries; q++) {
                const REAL *numbers = query + (head * queries + q) * width;
                VECTOR sum[TOGETHER] = {{0}};
                for (int64_t i = 0; i < width; i += LANES)
                    for (int64_t t = 0; t < TOGETHER; t++)
                        sum[t] += *(const VECTOR *)(numbers + i) * *(const VECTOR *)(row[some + t] + i);
                for (int64_t t = 0; t < TOGETHER && some + t < count; t++) {
                    REAL total = 0;
                    for (int64_t i = 0; i < LANES; i++) total += sum[t][i];
                    out[(head * queries + q) * tokens + first + some + t] = total * scale[some + t];
                }
            }
    }
}

INLINE void NAME(sum_rows)(const struct rows *rows, const REAL *weights, const int64_t *strides, REAL *out,
                           int64_t head, int64_t queries, int64_t begin, int64_t end, int64_t width) {
    REAL buffer[DECODED * MOST_WIDTH], scale[DECODED];
    const REAL *row[DECODED];
    memset(out, 0, (size_t)(queries * width) * sizeof(REAL));
    for (int64_t first = begin; first < end; first += DECODED) {
        NAME(decode)(rows, head, first, end, width, row, scale, buffer);
        for (int64_t q = 0; q < queries; q++) {
            const REAL *given = weights + head * strides[0] + q * strides[1] + first;
            REAL weight[DECODED];
            for (int64_t t = 0; t < DECODED; t++) weight[t] = first + t < end ? given[t] * scale[t] : 0;
            for (int64_t i = 0; i < width; i += LANES) {
                VECTOR sum = *(VECTOR *)(out + q * width + i);
                for (int64_t t = 0; t < DECODED; t++) sum += weight[t] * *(const VECTOR *)(row[t] + i);
                *(VECTOR *)(out + q * width + i) = sum;
            }
        }
    }
}

/* For the usual widths the compiler knows how long its loops are. */
FOR_EVERY_PROCESSOR
static void NAME(score)(const struct rows *rows, const REAL *query, REAL *out, int64_t head, int64_t queries,
                        int64_t tokens, int64_t begin, int64_t end) {
    if (rows->width == 64)
        NAME(score_rows)(rows, query, out, head, queries, tokens, begin, end, 64);
    else if (rows->width == 128)
        NAME(score_rows)(rows, query, out, head, queries, tokens, begin, end, 128);
    else
        NAME(score_rows)(rows, query, out, head, queries, tokens, begin, end, rows->width);
}

FOR_EVERY_PROCESSOR
static void NAME(sum)(const struct rows *rows, const REAL *weights, const int64_t *strides, REAL *out, int64_t head,
                      int64_t queries, int64_t begin, int64_t end) {
    if (rows->width == 64)
        NAME(sum_rows)(rows, weights, strides, out, head, queries, begin, end, 64);
    else if (rows->width == 128)
        NAME(sum_rows)(rows, weights, strides, out, head, queries, begin, end, 128);
    else
        NAME(sum_rows)(rows, weights, strides, out, head, queries, begin, end, rows->width);
}

/* out[heads, queries, tokens] = query[heads, queries, width] times the rows. */
void NAME(scores)(const struct rows *rows, const REAL *query, REAL *out, int64_t heads, int64_t queries,
                  int64_t tokens, int32_t threads) {
    int64_t tasks = (tokens + TASK_TOKENS - 1) / TASK_TOKENS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < heads * tasks; task++) {
        int64_t begin = task % tasks * TASK_TOKENS, end = begin + TASK_TOKENS;
        NAME(score)(rows, query, out, task / tasks, queries, tokens, begin, end < tokens ? end : tokens);
    }
}

/* out[heads, tasks, queries, width]: for each task, weights[heads, queries, tokens] times its rows. `strides` are those
   of the weights' heads and queries; their tokens lie next to each other. */
void NAME(sums)(const struct rows *rows, const REAL *weights, const int64_t *strides, REAL *out, int64_t heads,
                int64_t queries, int64_t tokens, int32_t threads) {
    int64_t tasks = (tokens + TASK_TOKENS - 1) / TASK_TOKENS;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < heads * tasks; task++) {
        int64_t begin = task % tasks * TASK_TOKENS, end = begin + TASK_TOKENS;
        NAME(sum)(rows, weights, strides, out + task * queries * rows->width, task / tasks, queries, begin,
                  end < tokens ? end : tokens);
    }
}

#undef VECTOR
#undef LANES
#endif
