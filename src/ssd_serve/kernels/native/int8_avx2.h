/* Panels of int8 weights for processors with AVX2 and without VNNI: both sides are widened to 16 bits.
 *
 * A row's numbers stay whole, since products of 16 bits are added in pairs to 32; a block of inputs is short enough
 * for those sums, which are then added up as doubles: exact as well.
 */
#ifndef SSD_INT8_AVX2_H
#define SSD_INT8_AVX2_H

#include <immintrin.h>

#include "tiles.h"
#include "vector.h"

#define VECTOR 4 /* outputs, each with the sums of two pairs of inputs */
#define VECTORS (PANEL / VECTOR)
#define MOST_AT_ONCE 6
#define MOST_ROWS (8 * MOST_AT_ONCE)
#define BLOCK 256 /* inputs: at most 258 pairs of the largest products fit 32 bits */
#define NEXT_BLOCK (BLOCK * PANEL) /* bytes from a weight to the one that is fetched beside it */

/* Adds the sums of eight outputs to doubles. */
static inline void add_sums(__m256i first, __m256i second, double *sums) {
  __m256i all = _mm256_permute4x64_epi64(_mm256_hadd_epi32(first, second), 0xd8);
  __m256d low = _mm256_cvtepi32_pd(_mm256_castsi256_si128(all));
  __m256d high = _mm256_cvtepi32_pd(_mm256_extracti128_si256(all, 1));
  _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), low));
  _mm256_storeu_pd(sums + 4, _mm256_add_pd(_mm256_loadu_pd(sums + 4), high));
}

/* Goes on with the sums of some rows over `inputs` of a block, WIDTH vectors of it at a time. */
#define KERNEL(ROWS, WIDTH)                                                                                  \
  static void rows_##ROWS(const int16_t *x, long stride, long inputs, const int8_t *block, double sums[][PANEL]) { \
    for (int from = 0; from < VECTORS; from += WIDTH) {                                                      \
      const int8_t *weights = block + 4 * VECTOR * from;                                                     \
      __m256i here[ROWS][WIDTH];                                                                             \
      _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++)                                                 \
        _Pragma("GCC unroll 8") for (int v = 0; v < WIDTH; v++) here[r][v] = _mm256_setzero_si256();         \
      for (long i = 0; i < inputs; i += 4, weights += 4 * PANEL) {                                           \
        _mm_prefetch((const char *)weights + NEXT_BLOCK, _MM_HINT_T0);                                       \
        if (WIDTH == VECTORS) _mm_prefetch((const char *)weights + NEXT_BLOCK + 64, _MM_HINT_T0);            \
        __m256i wide[WIDTH];                                                                                 \
        _Pragma("GCC unroll 8") for (int v = 0; v < WIDTH; v++)                                              \
          wide[v] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(weights + 4 * VECTOR * v)));      \
        _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++) {                                             \
          long long four;                                                                                    \
          memcpy(&four, x + r * stride + i, sizeof four);                                                    \
          __m256i all = _mm256_set1_epi64x(four);                                                            \
          _Pragma("GCC unroll 8") for (int v = 0; v < WIDTH; v++) {                                          \
            here[r][v] = _mm256_add_epi32(here[r][v], _mm256_madd_epi16(all, wide[v]));                      \
            __asm__ volatile("" : "+x"(here[r][v])); /* in a register, before the next row begins */         \
          }                                                                                                  \
        }                                                                                                    \
      }                                                                                                      \
      _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++)                                                 \
        _Pragma("GCC unroll 4") for (int v = 0; v < WIDTH; v += 2)                                           \
          add_sums(here[r][v], here[r][v + 1], sums[r] + VECTOR * (from + v));                               \
    }                                                                                                        \
  }

KERNEL(1, 8) KERNEL(2, 4) KERNEL(3, 2) KERNEL(4, 2) KERNEL(5, 2) KERNEL(6, 2)

static inline float as_float(bf16 number) {
  uint32_t bits = (uint32_t)number << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* The scale of a row: its largest magnitude becomes LARGEST_ELEMENT. */
static float scale_of(const bf16 *x, long inputs) {
  bf16 most = 0;
  for (long i = 0; i < inputs; i++) {
    bf16 magnitude = x[i] & 0x7fff; /* a NaN has the largest bits */
    most = magnitude > most ? magnitude : most;
  }
  float top = as_float(most);
  return (top < SMALLEST_TOP ? SMALLEST_TOP : top) / LARGEST_ELEMENT;
}

/* One row's numbers, those of a block together; blocks of `rows` rows follow one another. Ends in zeros. */
static void quantise_row(const bf16 *x, long inputs, long padded, float scale, int16_t *numbers, long row, long rows) {
  for (long i = 0; i < padded; i += BLOCK) {
    long size = smaller(padded - i, BLOCK);
    int16_t *to = numbers + i * rows + row * size;
    for (long j = 0; j < size; j++)
      to[j] = i + j < inputs ? (int16_t)(int32_t)__builtin_rintf(as_float(x[i + j]) / scale) : 0;
  }
}

/* A panel for `rows` rows from `first` on, of `all`. */
static void multiply_panel(const int16_t *numbers, long all, long first, long rows, long padded,
                           const float *row_scales, panel at, bf16 *out, long outputs, long count) {
  typedef void (*kernel)(const int16_t *, long, long, const int8_t *, double[][PANEL]);
  static const kernel kernels[MOST_AT_ONCE + 1] = {0, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6};
  double sums[MOST_ROWS][PANEL];
  memset(sums, 0, rows * sizeof sums[0]);
  for (long i = 0; i < padded; i += BLOCK) {
    long size = smaller(padded - i, BLOCK);
    for (long row = 0, now; row < rows; row += now) {
      now = part(rows - row, MOST_AT_ONCE);
      kernels[now](numbers + i * all + (first + row) * size, size, size, at.weights + i * PANEL, sums + row);
    }
  }
  for (long r = 0; r < rows; r++) {
    float values[PANEL];
    bf16 rounded[PANEL];
    for (int c = 0; c < PANEL; c++) values[c] = (float)(sums[r][c] * ((double)at.scales[c] * row_scales[r]));
    for (int c = 0; at.bias && c < PANEL; c++) values[c] += at.bias[c];
    for (int c = 0; c < PANEL; c += LANES) store_bf16(rounded + c, load_float(values + c));
    memcpy(out + r * outputs, rounded, 2 * smaller(count, PANEL));
  }
}

static void split_rows(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  long padded = rounded_up(p->inputs, TILE_INPUTS);
  for (long row = from; row < to; row++) {
    p->row_scales[row] = scale_of(p->x + row * p->inputs, p->inputs);
    quantise_row(p->x + row * p->inputs, p->inputs, padded, p->row_scales[row], (int16_t *)p->bytes, row, p->rows);
  }
}

static void multiply_by_panels(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  long padded = rounded_up(p->inputs, TILE_INPUTS);
  for (long n = from; n < to; n++)
    for (long row = 0, now; row < p->rows; row += now) {
      now = part(p->rows - row, MOST_ROWS);
      multiply_panel((const int16_t *)p->bytes, p->rows, row, now, padded, p->row_scales + row,
                     panel_at(p->all, n * PANEL, padded), p->out + row * p->outputs + n * PANEL, p->outputs,
                     p->outputs - n * PANEL);
    }
}

#endif
