/* Panels of bf16 weights for processors with AVX2, which have no products of bf16: both sides are widened.
 *
 * Rows are widened once for all panels, weights in registers, for up to six rows at a time. A sum is one chain of fused
 * products, over the inputs in their order.
 */
#ifndef SSD_PRODUCTS_AVX2_H
#define SSD_PRODUCTS_AVX2_H

#include <immintrin.h>
#include <stdlib.h>

#include "tiles.h"
#include "vector.h"

#define PANEL 32
#define VECTOR 8 /* outputs */
#define VECTORS (PANEL / VECTOR)
#define MOST_AT_ONCE 6 /* rows whose sums of 16 outputs fit in registers */
#define MOST_ROWS (16 * MOST_AT_ONCE)
#define BLOCK 128 /* inputs, whose weights stay in the first-level cache beside the next ones */
#define NEXT_BLOCK (2 * BLOCK * PANEL) /* bytes from a weight to the one that is fetched beside it */
#define ALONE 16 /* rows that one thread widens sooner than several agree to */

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
  memcpy(out, rounded, 2 * smaller(count, LANES));
}

/* Goes on with the sums of some widened rows over `inputs` of a block, WIDTH vectors of it at a time. */
#define KERNEL(ROWS, WIDTH)                                                                                   \
  static void rows_##ROWS(const float x[][BLOCK], long inputs, const bf16 *block, float sums[][PANEL]) {      \
    for (int from = 0; from < VECTORS; from += WIDTH) {                                                       \
      const bf16 *weights = block + 2 * VECTOR * from;                                                        \
      __m256 here[ROWS][WIDTH];                                                                               \
      _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++)                                                  \
        _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; v++)                                               \
          here[r][v] = _mm256_loadu_ps(sums[r] + VECTOR * (from + v));                                        \
      for (long i = 0; i < inputs; i += 2, weights += 2 * PANEL) {                                            \
        _mm_prefetch((const char *)weights + NEXT_BLOCK, _MM_HINT_T0);                                        \
        if (WIDTH == VECTORS) _mm_prefetch((const char *)weights + NEXT_BLOCK + 64, _MM_HINT_T0);             \
        _Pragma("GCC unroll 2") for (int second = 0; second < 2; second++) {                                  \
          __m256 wide[WIDTH];                                                                                 \
          _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; v++)                                             \
            wide[v] = widened(load_pairs(weights + 2 * VECTOR * v), second);                                  \
          _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++) {                                            \
            __m256 all = _mm256_broadcast_ss(x[r] + i + second);                                              \
            _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; v++)                                           \
              here[r][v] = _mm256_fmadd_ps(all, wide[v], here[r][v]);                                         \
          }                                                                                                   \
        }                                                                                                     \
      }                                                                                                       \
      _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++)                                                  \
        _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; v++)                                               \
          _mm256_storeu_ps(sums[r] + VECTOR * (from + v), here[r][v]);                                        \
    }                                                                                                         \
  }

KERNEL(1, 4) KERNEL(2, 4) KERNEL(3, 2) KERNEL(4, 2) KERNEL(5, 2) KERNEL(6, 2)

/* One row's blocks, which lie `stride` blocks apart. */
static void widen_row(const bf16 *x, long inputs, float wide[][BLOCK], long stride) {
  for (long i = 0; i < inputs; i += BLOCK, wide += stride)
    for (long j = 0; j < BLOCK && i + j < inputs; j++) {
      uint32_t bits = (uint32_t)x[i + j] << 16;
      memcpy(wide[0] + j, &bits, sizeof bits);
    }
}

/* A panel for some of the rows, of whose blocks `stride` lie together. */
static void multiply_panel(const float wide[][BLOCK], long stride, long rows, long inputs, const bf16 *weights,
                           const float *bias, bf16 *out, long outputs, long count) {
  typedef void (*kernel)(const float[][BLOCK], long, const bf16 *, float[][PANEL]);
  static const kernel kernels[MOST_AT_ONCE + 1] = {0, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6};
  float sums[MOST_ROWS][PANEL];
  memset(sums, 0, rows * sizeof sums[0]);
  for (long i = 0; i < inputs; i += BLOCK, weights += BLOCK * PANEL, wide += stride)
    for (long row = 0, now; row < rows; row += now) {
      now = part(rows - row, MOST_AT_ONCE);
      kernels[now](wide + row, smaller(inputs - i, BLOCK), weights, sums + row);
    }
  for (long r = 0; r < rows; r++)
    for (int from = 0; from < PANEL; from += LANES)
      store(sums[r] + from, bias ? bias + from : bias, out + r * outputs + from, count - from);
}

/* [blocks of inputs][rows][BLOCK] */
static void widen_rows(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  for (long row = from; row < to; row++)
    widen_row(p->x + row * p->inputs, p->inputs, (float(*)[BLOCK])p->wide + row, p->rows);
}

static void multiply_panels(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  long panel_size = PANEL * rounded_up(p->inputs, TILE_INPUTS);
  for (long panel = from; panel < to; panel++)
    for (long row = 0, now; row < p->rows; row += now) {
      now = part(p->rows - row, MOST_ROWS);
      multiply_panel((const float(*)[BLOCK])p->wide + row, p->rows, now, p->inputs, p->weights + panel * panel_size,
                     p->bias ? p->bias + panel * PANEL : NULL, p->out + row * p->outputs + panel * PANEL, p->outputs,
                     p->outputs - panel * PANEL);
    }
}

static int multiply_by_panels(product *p, int threads) {
  void *wide = aligned_alloc(64, rounded_up(p->inputs, BLOCK) * p->rows * sizeof(float));
  if (!wide && p->rows) return 0;
  p->wide = wide;
  POOL_RUN(widen_rows, *p, p->rows, ALONE, threads);
  POOL_RUN(multiply_panels, *p, parts_of(p->outputs, PANEL), piece_of(2 * PANEL * p->inputs, p->rows), threads);
  free(wide);
  return 1;
}

#endif
