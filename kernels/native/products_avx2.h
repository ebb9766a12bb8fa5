/* Panels of bf16 weights for processors with AVX2, which have no products of bf16: both sides are widened.
 *
 * Few rows are bound by reading weights, which are widened in registers, for four rows at a time. For more rows a
 * block of a panel is widened once, into a cache. Either way a sum is one chain of fused products, over the inputs in
 * their order.
 */
#ifndef SSD_PRODUCTS_AVX2_H
#define SSD_PRODUCTS_AVX2_H

#include <immintrin.h>

#include "tiles.h"
#include "vector.h"

#define PANEL 32
#define VECTOR 8 /* outputs */
#define VECTORS (PANEL / VECTOR)
#define FEW_ROWS 16
#define FEW_AT_ONCE 4
#define MANY_AT_ONCE 6 /* rows whose sums of 16 outputs fit in registers */
#define MOST_ROWS (8 * MANY_AT_ONCE)
#define BLOCK 128 /* inputs */

/* The first or the second of each pair of bf16, as float. */
static inline __m256 widened(__m256i pairs, int second) {
  const __m256i upper = _mm256_set1_epi32(0xffff0000);
  return (__m256)(second ? _mm256_and_si256(pairs, upper) : _mm256_slli_epi32(pairs, 16));
}

static inline __m256i load_pairs(const bf16 *weights) { return _mm256_loadu_si256((const __m256i *)weights); }

static inline void store(const float *sums, const float *bias, bf16 *out, long count) {
  if (count <= 0) return;
  bf16 rounded[LANES];
  store_bf16(rounded, bias ? load_float(sums) + load_float(bias) : load_float(sums));
  memcpy(out, rounded, count < LANES ? 2 * count : 2 * LANES);
}

/* Goes on with the sums of some rows over `inputs` of a block, WIDTH vectors of it at a time. */
#define FEW(ROWS, WIDTH)                                                                                      \
  static void few_##ROWS(const bf16 *x, long stride, long inputs, const bf16 *block, float sums[][PANEL]) {   \
    for (int from = 0; from < VECTORS; from += WIDTH) {                                                       \
      const bf16 *weights = block + 2 * VECTOR * from;                                                        \
      __m256 here[ROWS][WIDTH];                                                                               \
      _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++)                                                  \
        _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; v++)                                               \
          here[r][v] = _mm256_loadu_ps(sums[r] + VECTOR * (from + v));                                        \
      for (long pair = 0; pair < inputs / 2; pair++, weights += 2 * PANEL) {                                  \
        _mm_prefetch((const char *)weights + AHEAD, _MM_HINT_T0);                                             \
        if (WIDTH == VECTORS) _mm_prefetch((const char *)weights + AHEAD + 64, _MM_HINT_T0);                  \
        _Pragma("GCC unroll 2") for (int second = 0; second < 2; second++)                                    \
          _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) {                                            \
            int two;                                                                                          \
            memcpy(&two, x + r * stride + 2 * pair, sizeof two);                                              \
            __m256 all = widened(_mm256_set1_epi32(two), second);                                             \
            _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; v++) here[r][v] =                              \
                _mm256_fmadd_ps(all, widened(load_pairs(weights + 2 * VECTOR * v), second), here[r][v]);      \
          }                                                                                                   \
      }                                                                                                       \
      _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++)                                                  \
        _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; v++)                                               \
          _mm256_storeu_ps(sums[r] + VECTOR * (from + v), here[r][v]);                                        \
    }                                                                                                         \
  }

/* The same where rows and block are widened. */
#define MANY(ROWS)                                                                                          \
  static void many_##ROWS(const float x[][BLOCK], long inputs, const float weights[][PANEL],               \
                           float sums[][PANEL]) {                                                           \
    for (int from = 0; from < PANEL; from += 2 * VECTOR) {                                                  \
      __m256 here[ROWS][2];                                                                                 \
      _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++)                                                \
        _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)                                                 \
          here[r][v] = _mm256_loadu_ps(sums[r] + from + VECTOR * v);                                        \
      for (long i = 0; i < inputs; i++) {                                                                   \
        __m256 left = _mm256_loadu_ps(weights[i] + from), right = _mm256_loadu_ps(weights[i] + from + VECTOR); \
        _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++) {                                            \
          __m256 all = _mm256_broadcast_ss(x[r] + i);                                                       \
          here[r][0] = _mm256_fmadd_ps(all, left, here[r][0]);                                              \
          here[r][1] = _mm256_fmadd_ps(all, right, here[r][1]);                                             \
        }                                                                                                   \
      }                                                                                                     \
      _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++)                                                \
        _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++)                                                 \
          _mm256_storeu_ps(sums[r] + from + VECTOR * v, here[r][v]);                                        \
    }                                                                                                       \
  }

FEW(1, 4) FEW(2, 4) FEW(3, 2) FEW(4, 2)
MANY(4) MANY(5) MANY(6)

static inline void widen_rows(const bf16 *x, long stride, long rows, long inputs, float wide[][BLOCK]) {
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < inputs; i++) {
      uint32_t bits = (uint32_t)x[r * stride + i] << 16;
      memcpy(wide[r] + i, &bits, sizeof bits);
    }
}

static inline void widen_block(const bf16 *weights, long inputs, float wide[][PANEL]) {
  for (long i = 0; i < inputs; i += 2, weights += 2 * PANEL)
    for (int v = 0; v < VECTORS; v++) {
      _mm_prefetch((const char *)(weights + BLOCK * PANEL + 2 * VECTOR * v), _MM_HINT_T0);
      __m256i pairs = load_pairs(weights + 2 * VECTOR * v);
      _mm256_storeu_ps(wide[i] + VECTOR * v, widened(pairs, 0));
      _mm256_storeu_ps(wide[i + 1] + VECTOR * v, widened(pairs, 1));
    }
}

static void multiply_panel(const bf16 *x, long rows, long inputs, const bf16 *weights, const float *bias, bf16 *out,
                           long outputs, long count) {
  static void (*const few[])(const bf16 *, long, long, const bf16 *, float[][PANEL]) = {0,     few_1, few_2,
                                                                                         few_3, few_4};
  /* More than FEW_ROWS have no group of less than four. */
  static void (*const many[])(const float[][BLOCK], long, const float[][PANEL], float[][PANEL]) = {
      0, 0, 0, 0, many_4, many_5, many_6};
  float sums[MOST_ROWS][PANEL], wide[BLOCK][PANEL], group[MANY_AT_ONCE][BLOCK];
  int widens = rows > FEW_ROWS;
  long most = widens ? MANY_AT_ONCE : FEW_AT_ONCE;
  memset(sums, 0, rows * sizeof sums[0]);
  for (long i = 0; i < inputs; i += BLOCK, weights += BLOCK * PANEL) {
    long here = inputs - i < BLOCK ? inputs - i : BLOCK;
    if (widens) widen_block(weights, here, wide);
    for (long row = 0, now; row < rows; row += now) {
      long left = rows - row, groups = (left + most - 1) / most;
      const bf16 *from = x + row * inputs + i;
      now = (left + groups - 1) / groups;
      if (!widens) {
        few[now](from, inputs, here, weights, sums + row);
        continue;
      }
      widen_rows(from, inputs, now, here, group);
      many[now](group, here, wide, sums + row);
    }
  }
  for (long r = 0; r < rows; r++)
    for (int from = 0; from < PANEL; from += LANES)
      store(sums[r] + from, bias ? bias + from : bias, out + r * outputs + from, count - from);
}

#endif
