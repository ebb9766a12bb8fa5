/* Products of rows with a fixed bf16 matrix, for processors with AVX-512 BF16.
 *
 * A decoding step multiplies a few rows with every weight once, so it is bound by reading weights. The matrix
 * lies in panels of 32 outputs: [panels][inputs / 2][32][2]. A panel is read once for up to 14 rows, whose sums
 * stay in registers. Each sum is added up in the same order however many rows there are: a row's result does
 * not depend on its batch.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512BF16__
#include <immintrin.h>

#define PANEL 32
#define AHEAD 4096 /* bytes; far enough to hide memory, near enough to stay in the first-level cache */
#define MOST_ROWS 14

typedef uint16_t bf16;

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

typedef void (*kernel)(const bf16 *, long, const bf16 *, const float *, bf16 *, long, long);

int ssd_can_multiply_bf16(void) { return 1; }

/* out [rows, outputs] = x [rows, inputs] times the matrix, plus bias (float, whole panels, or NULL). */
void ssd_multiply_bf16(const bf16 *x, long rows, long inputs, const bf16 *weights, const float *bias, bf16 *out,
                       long outputs, int threads) {
  static const kernel kernels[MOST_ROWS + 1] = {0,       panel_1, panel_2,  panel_3,  panel_4,
                                                panel_5, panel_6, panel_7,  panel_8,  panel_9,
                                                panel_10, panel_11, panel_12, panel_13, panel_14};
  long panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long panel = 0; panel < panels; panel++)
    for (long row = 0; row < rows;) {
      long left = rows - row, groups = (left + MOST_ROWS - 1) / MOST_ROWS, now = (left + groups - 1) / groups;
      kernels[now](x + row * inputs, inputs, weights + panel * PANEL * inputs, bias ? bias + panel * PANEL : bias,
                   out + row * outputs + panel * PANEL, outputs, outputs - panel * PANEL);
      row += now;
    }
}

#else

int ssd_can_multiply_bf16(void) { return 0; }
void ssd_multiply_bf16(const uint16_t *x, long rows, long inputs, const uint16_t *weights, const float *bias,
                       uint16_t *out, long outputs, int threads) {}

#endif
