/* Tiles of attention: scores and weighted sums of a few queries over one block of the context, in registers.
 *
 * Vectors are the compiler's own, as wide as the processor's, so that any processor is served; with AVX-512 a few
 * operations are spelled out. A query's numbers are computed in the same order whatever tile it is in.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "parts.h"

#ifdef __AVX512F__
#include <immintrin.h>
#define BYTES 64          /* of a vector */
#define SCORE_QUERIES 12  /* registers: 24 sums, 2 of keys, 1 of queries */
#define MIX_VECTORS 4
#define MIX_QUERIES 6 /* 24 sums, 4 of values, 1 of weights */
#else
#ifdef __AVX__
#define BYTES 32
#else
#define BYTES 16
#endif
#define SCORE_QUERIES 6 /* 16 registers */
#define MIX_VECTORS 2
#define MIX_QUERIES 6
#endif

#define INLINE static inline __attribute__((always_inline))
#define WIDE (BYTES / 4) /* floats of a vector */
#define SCORE_VECTORS 2
#define BLOCK 32 /* entries of the context that are scored together: half a word of ancestry */
#define LINE 16  /* floats of a cache line */

typedef float floats __attribute__((vector_size(BYTES)));
typedef float half_floats __attribute__((vector_size(BYTES / 2)));
typedef uint32_t words __attribute__((vector_size(BYTES)));
typedef uint16_t half_words __attribute__((vector_size(BYTES / 2)));
typedef int32_t masks __attribute__((vector_size(BYTES)));
typedef double doubles __attribute__((vector_size(BYTES)));

INLINE floats load(const float *from) {
  floats value;
  memcpy(&value, from, sizeof value);
  return value;
}

INLINE floats load_bf16(const uint16_t *from) {
  half_words value;
  memcpy(&value, from, sizeof value);
  return (floats)(__builtin_convertvector(value, words) << 16);
}

INLINE float widen_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Rounded to the nearest, ties to even; a NaN stays one. */
INLINE uint16_t narrow_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE void store(float *to, floats value) { memcpy(to, &value, sizeof value); }

INLINE floats splat(float x) { return x - (floats){0}; }

#ifdef __AVX512F__
INLINE floats choose(masks where, floats yes, floats no) {
  return _mm512_mask_mov_ps(no, _mm512_test_epi32_mask((__m512i)where, (__m512i)where), yes);
}

INLINE floats greater(floats a, floats b) { return _mm512_max_ps(a, b); }

/* `value`, or 0 where x is below `least`; a value for an x that is no number is kept. */
INLINE floats zero_below(floats x, float least, floats value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(least), _CMP_NLT_UQ), value);
}

INLINE void widen(floats x, doubles *low, doubles *high) {
  *low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
  *high = _mm512_cvtps_pd((__m256)_mm512_extractf64x4_pd((__m512d)x, 1));
}
#else
INLINE floats choose(masks where, floats yes, floats no) {
  return (floats)(((masks)yes & where) | ((masks)no & ~where));
}

INLINE floats greater(floats a, floats b) { return choose(a > b, a, b); }

/* `value`, or 0 where x is below `least`; a value for an x that is no number is kept. */
INLINE floats zero_below(floats x, float least, floats value) { return choose(x < least, (floats){0}, value); }

INLINE void widen(floats x, doubles *low, doubles *high) {
  half_floats halves[2];
  memcpy(halves, &x, sizeof halves);
  *low = __builtin_convertvector(halves[0], doubles);
  *high = __builtin_convertvector(halves[1], doubles);
}
#endif

/* e^x for x <= 0 to about an ulp, exactly 0 below -87: 2^n times a Taylor series on [-ln 2 / 2, ln 2 / 2]. */
INLINE floats exponential(floats x) {
  const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits */
  floats shifted = x * 1.44269504f + shift, n = shifted - shift;
  floats r = x - n * 0.693359375f; /* ln 2 in two parts, the first of few bits */
  r = r - n * -2.12194440e-4f;
  floats y = r * (1.0f / 5040) + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  words power = ((words)shifted << 23) + (127u << 23);
  return zero_below(x, -87.0f, y * (floats)power);
}

/* Add weights of at most 1 to half as many sums. Each is rounded to a multiple of 2^-36 first, so that sums up to 2^17
 * are exact and hence the same in any order. */
INLINE doubles accumulate(doubles sum, floats weights) {
  const double shift = 98304.0; /* 1.5 * 2^16 */
  doubles low, high;
  widen(weights, &low, &high);
  return sum + (((low + shift) - shift) + ((high + shift) - shift));
}

/* Call FUNCTION with its first argument, the number of queries, as a constant. */
#define CASE(NUMBER, FUNCTION, ...) \
  case NUMBER: FUNCTION(NUMBER, __VA_ARGS__); break;
#define SWITCH(NUMBER, FUNCTION, ...)                                                                       \
  switch (NUMBER) {                                                                                         \
    CASE(1, FUNCTION, __VA_ARGS__) CASE(2, FUNCTION, __VA_ARGS__) CASE(3, FUNCTION, __VA_ARGS__)            \
    CASE(4, FUNCTION, __VA_ARGS__) CASE(5, FUNCTION, __VA_ARGS__) CASE(6, FUNCTION, __VA_ARGS__)            \
    CASE(7, FUNCTION, __VA_ARGS__) CASE(8, FUNCTION, __VA_ARGS__) CASE(9, FUNCTION, __VA_ARGS__)            \
    CASE(10, FUNCTION, __VA_ARGS__) CASE(11, FUNCTION, __VA_ARGS__) CASE(12, FUNCTION, __VA_ARGS__)         \
  }

/* Where the next block's keys or values lie. They are asked for while this one's are used, a few at a time:
 * in between there is enough work to hide the memory, and slots may be scattered. */
typedef struct {
  const float *rows[BLOCK];
  long offset, lines, left; /* where to go on; cache lines of a row for this tile, and in all from here */
} ahead;

INLINE void fetch(const ahead *next, long row) {
  for (long line = 0; line < next->lines; line++)
    __builtin_prefetch(next->rows[row] + next->offset + line * LINE);
}

static void advance(ahead *next) {
  next->offset += next->lines * LINE;
  next->left -= next->lines;
  next->lines = smaller(next->lines, next->left);
}

/* scores [Q, BLOCK] = queries [head_dim, Q] times keys [head_dim, BLOCK], for 16 * V entries. */
INLINE void score(const int Q, const int V, const float *queries, const float *keys, long head_dim,
                  float *scores, const ahead *next) {
  if (Q > SCORE_QUERIES) return;
  floats sums[SCORE_QUERIES][SCORE_VECTORS];
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[q][v] = (floats){0};
  for (long d = 0; d < head_dim; d++, queries += Q, keys += BLOCK) {
    if (d < BLOCK) fetch(next, d);
    floats key[SCORE_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) key[v] = load(keys + v * WIDE);
#pragma GCC unroll 16
    for (int q = 0; q < Q; q++) {
      floats query = splat(queries[q]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[q][v] = query * key[v] + sums[q][v];
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(scores + q * BLOCK + v * WIDE, sums[q][v]);
}

/* out [Q, stride] += weights [Q, BLOCK] times `count` values, for 16 * V numbers of each value. */
INLINE void mix(const int Q, const int V, const float *weights, const float *const *values, long offset,
                long count, float *out, long stride, const ahead *next) {
  if (Q > MIX_QUERIES) return;
  floats sums[MIX_QUERIES][MIX_VECTORS];
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[q][v] = load(out + q * stride + v * WIDE);
  for (long entry = 0; entry < count; entry++, weights++) {
    const float *at = values[entry] + offset;
    if (!offset) fetch(next, entry);
    floats value[MIX_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) value[v] = load(at + v * WIDE);
#pragma GCC unroll 16
    for (int q = 0; q < Q; q++) {
      floats weight = splat(weights[q * BLOCK]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[q][v] = weight * value[v] + sums[q][v];
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(out + q * stride + v * WIDE, sums[q][v]);
}

/* The scores of a tile of queries and of the first `vectors` vectors of entries. */
static void score_tile(long tile, long vectors, const float *queries, const float *keys, long head_dim,
                       float *scores, const ahead *next) {
  static const ahead none = {.lines = 0};
  for (; vectors > 0; vectors -= SCORE_VECTORS, next = &none) {
    if (vectors >= SCORE_VECTORS)
      SWITCH(tile, score, SCORE_VECTORS, queries, keys, head_dim, scores, next)
    else
      SWITCH(tile, score, 1, queries, keys, head_dim, scores, next)
    keys += SCORE_VECTORS * WIDE;
    scores += SCORE_VECTORS * WIDE;
  }
}

/* The weighted values of a tile of queries: `numbers` numbers of each, a multiple of the vector's. */
static void mix_tile(long tile, const float *weights, const float *const *values, long count, float *out,
                     long numbers, long stride, const ahead *next) {
  long d = 0;
  for (; d + MIX_VECTORS * WIDE <= numbers; d += MIX_VECTORS * WIDE)
    SWITCH(tile, mix, MIX_VECTORS, weights, values, d, count, out + d, stride, next)
  for (; d < numbers; d += WIDE) SWITCH(tile, mix, 1, weights, values, d, count, out + d, stride, next)
}

#if defined __AVX512F__
#define SQUARE 16
/* SQUARE columns of out [SQUARE, BLOCK] = the transpose of SQUARE rows of as many numbers. */
INLINE void transpose(const float *const *rows, long offset, float *out) {
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    __m512 line[4]; /* line r: 4 numbers of each of the rows r, r + 4, r + 8, r + 12 */
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      __m512 value = _mm512_castps128_ps512(_mm_loadu_ps(rows[r] + offset + 4 * c));
      value = _mm512_insertf32x4(value, _mm_loadu_ps(rows[r + 4] + offset + 4 * c), 1);
      value = _mm512_insertf32x4(value, _mm_loadu_ps(rows[r + 8] + offset + 4 * c), 2);
      line[r] = _mm512_insertf32x4(value, _mm_loadu_ps(rows[r + 12] + offset + 4 * c), 3);
    }
    /* Quarter by quarter, the four lines are a square of 4 rows by 4 numbers. */
    __m512d low01 = (__m512d)_mm512_unpacklo_ps(line[0], line[1]);
    __m512d high01 = (__m512d)_mm512_unpackhi_ps(line[0], line[1]);
    __m512d low23 = (__m512d)_mm512_unpacklo_ps(line[2], line[3]);
    __m512d high23 = (__m512d)_mm512_unpackhi_ps(line[2], line[3]);
    _mm512_storeu_pd((double *)(out + (4 * c + 0) * BLOCK), _mm512_unpacklo_pd(low01, low23));
    _mm512_storeu_pd((double *)(out + (4 * c + 1) * BLOCK), _mm512_unpackhi_pd(low01, low23));
    _mm512_storeu_pd((double *)(out + (4 * c + 2) * BLOCK), _mm512_unpacklo_pd(high01, high23));
    _mm512_storeu_pd((double *)(out + (4 * c + 3) * BLOCK), _mm512_unpackhi_pd(high01, high23));
  }
}
#elif defined __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SQUARE 4
INLINE void transpose(const float *const *rows, long offset, float *out) {
  typedef float four __attribute__((vector_size(16)));
  four line[4];
  for (int r = 0; r < 4; r++) memcpy(&line[r], rows[r] + offset, sizeof line[r]);
  four low01 = __builtin_shufflevector(line[0], line[1], 0, 4, 1, 5);
  four high01 = __builtin_shufflevector(line[0], line[1], 2, 6, 3, 7);
  four low23 = __builtin_shufflevector(line[2], line[3], 0, 4, 1, 5);
  four high23 = __builtin_shufflevector(line[2], line[3], 2, 6, 3, 7);
  four turned[4] = {
      __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
      __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
  for (int d = 0; d < 4; d++) memcpy(out + d * BLOCK, &turned[d], sizeof turned[d]);
}
#endif
#endif
