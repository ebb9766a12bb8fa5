/* A panel of bf16 weights for up to 14 rows, by AVX-512 BF16. */
#ifndef SSD_PRODUCTS_AVX512_H
#define SSD_PRODUCTS_AVX512_H

#include <immintrin.h>

#include "tiles.h"

#define PANEL 32
#define MOST_ROWS 14

static inline void store(__m512 sum, const float *bias, bf16 *out, long count) {
  if (count <= 0) return;
  if (bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(bias));
  __m256i rounded = (__m256i)_mm512_cvtneps_pbh(sum);
  __mmask16 mask = count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
  _mm256_mask_storeu_epi16(out, mask, rounded);
}

#define KERNEL(ROWS)                                                                                      \
  static void panel_##ROWS(const bf16 *x, long inputs, const bf16 *weights, const float *bias, bf16 *out, \
                           long outputs, long count) {                                                    \
    __m512 sums[ROWS][2];                                                                                 \
    _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps(); \
    for (long pair = 0; pair < inputs / 2; pair++, weights += 2 * PANEL) {                                \
      _mm_prefetch((const char *)weights + AHEAD, _MM_HINT_T0);                                           \
      _mm_prefetch((const char *)weights + AHEAD + 64, _MM_HINT_T0);                                      \
      __m512bh low = (__m512bh)_mm512_loadu_si512(weights);                                               \
      __m512bh high = (__m512bh)_mm512_loadu_si512(weights + PANEL);                                      \
      _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++) {                                           \
        int two;                                                                                          \
        memcpy(&two, x + r * inputs + 2 * pair, sizeof two);                                              \
        __m512bh both = (__m512bh)_mm512_set1_epi32(two);                                                 \
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, low);                                             \
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, high);                                            \
      }                                                                                                   \
    }                                                                                                     \
    for (int r = 0; r < ROWS; r++) {                                                                      \
      store(sums[r][0], bias, out + r * outputs, count);                                                  \
      store(sums[r][1], bias ? bias + 16 : bias, out + r * outputs + 16, count - 16);                     \
    }                                                                                                     \
  }

KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4) KERNEL(5) KERNEL(6) KERNEL(7)
KERNEL(8) KERNEL(9) KERNEL(10) KERNEL(11) KERNEL(12) KERNEL(13) KERNEL(14)

static void multiply_panel(const bf16 *x, long rows, long inputs, const bf16 *weights, const float *bias, bf16 *out,
                           long outputs, long count) {
  typedef void (*kernel)(const bf16 *, long, const bf16 *, const float *, bf16 *, long, long);
  static const kernel kernels[MOST_ROWS + 1] = {0,       panel_1, panel_2,  panel_3,  panel_4,
                                                panel_5, panel_6, panel_7,  panel_8,  panel_9,
                                                panel_10, panel_11, panel_12, panel_13, panel_14};
  kernels[rows](x, inputs, weights, bias, out, outputs, count);
}

static void multiply_panels(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  long panel_size = PANEL * rounded_up(p->inputs, TILE_INPUTS);
  for (long panel = from; panel < to; panel++)
    for (long row = 0, now; row < p->rows; row += now) {
      now = part(p->rows - row, MOST_ROWS);
      multiply_panel(p->x + row * p->inputs, now, p->inputs, p->weights + panel * panel_size,
                     p->bias ? p->bias + panel * PANEL : NULL, p->out + row * p->outputs + panel * PANEL, p->outputs,
                     p->outputs - panel * PANEL);
    }
}

static int multiply_by_panels(product *p, int threads) {
  long piece = piece_of(2 * PANEL * p->inputs, p->rows);
  POOL_RUN(multiply_panels, *p, parts_of(p->outputs, PANEL), piece, threads);
  return 1;
}

#endif
