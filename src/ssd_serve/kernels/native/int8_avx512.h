/* Panels of int8 weights for processors with AVX-512 VNNI: a row's numbers lie in two planes of bytes, which are
 * multiplied one by one.
 *
 * A panel is read once for up to seven rows, or 16 by tiles, whose sums stay in registers.
 */
#ifndef SSD_INT8_AVX512_H
#define SSD_INT8_AVX512_H

#include <immintrin.h>

#include "tiles.h"

#define MOST_ROWS 7
#define ROUNDING 12615808.0f /* 3 * 2^22 + 128 + 256 * 128: the number's two bytes end up lowest */
/* Named rounding keeps the compiler from joining a product and a sum, which would round once less. */
#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

static inline __mmask32 first(long count) {
  return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1;
}

/* The scale of a row: its largest magnitude becomes LARGEST_ELEMENT. */
static float scale_of(const bf16 *x, long inputs) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i most = _mm512_setzero_si512();
  for (long i = 0; i < inputs; i += 32) {
    __m512i some = _mm512_maskz_loadu_epi16(first(inputs - i), x + i);
    most = _mm512_max_epu16(most, _mm512_and_si512(some, magnitude)); /* a NaN has the largest bits */
  }
  uint16_t lanes[32], top_bits = 0;
  memcpy(lanes, &most, sizeof lanes);
  for (int i = 0; i < 32; i++) top_bits = lanes[i] > top_bits ? lanes[i] : top_bits;
  uint32_t wide = (uint32_t)top_bits << 16;
  float top;
  memcpy(&top, &wide, sizeof top);
  return (top < SMALLEST_TOP ? SMALLEST_TOP : top) / LARGEST_ELEMENT;
}

/* 16 elements as numbers of two bytes, which lie lowest. */
static inline __m512i numbers(const bf16 *x, long left, float scale) {
  __m256i some = _mm256_maskz_loadu_epi16((__mmask16)first(left), x);
  __m512 element = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16);
  return (__m512i)_mm512_add_ps(_mm512_div_ps(element, _mm512_set1_ps(scale)), _mm512_set1_ps(ROUNDING));
}

/* One row's bytes, four low ones and then four high ones, each such group `stride` bytes after the last. */
static void split(const bf16 *x, long inputs, float scale, uint8_t *bytes, long stride) {
  for (long i = 0; i < inputs; i += 16) {
    __m512i number = numbers(x + i, inputs - i, scale);
    uint32_t low[4], high[4];
    _mm_storeu_si128((__m128i *)low, _mm512_cvtepi32_epi8(number));
    _mm_storeu_si128((__m128i *)high, _mm512_cvtepi32_epi8(_mm512_srli_epi32(number, 8)));
    for (int four = 0; four < 4; four++, bytes += stride) {
      memcpy(bytes, low + four, 4);
      memcpy(bytes + 4, high + four, 4);
    }
  }
}

/* Rounded to the nearest bf16, ties to even; a NaN stays one. */
static inline __m256i to_bf16(__m512 value) {
  __m512i bits = (__m512i)value;
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  __mmask16 none = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, none, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

/* 16 outputs of a row from the sums of its planes. */
static inline void store(__m512i low, __m512i high, const panel *at, int column, float scale, bf16 *out, long count) {
  if (count <= 0) return;
  __m512 scales = _mm512_loadu_ps(at->scales + column);
  __m512 fine = _mm512_mul_round_ps(_mm512_cvtepi32_ps(low), scales, NEAREST);
  __m512 coarse = _mm512_mul_round_ps(_mm512_cvtepi32_ps(high), scales, NEAREST);
  __m512 value = _mm512_add_ps(fine, _mm512_mul_ps(coarse, _mm512_set1_ps(256.0f)));
  value = _mm512_mul_round_ps(value, _mm512_set1_ps(scale), NEAREST);
  if (at->bias) value = _mm512_add_ps(value, _mm512_loadu_ps(at->bias + column));
  _mm256_mask_storeu_epi16(out, (__mmask16)first(count), to_bf16(value));
}

#define KERNEL(ROWS)                                                                                       \
  static void panel_##ROWS(const uint8_t *bytes, const float *scales, long inputs, panel at, bf16 *out,    \
                           long outputs, long count) {                                                     \
    const int8_t *weights = at.weights;                                                                    \
    __m512i sums[2 * ROWS][2], left = _mm512_loadu_si512(at.start);                                        \
    __m512i right = _mm512_loadu_si512(at.start + 16);                                                     \
    _Pragma("GCC unroll 16") for (int p = 0; p < 2 * ROWS; p++) {                                          \
      sums[p][0] = left;                                                                                   \
      sums[p][1] = right;                                                                                  \
    }                                                                                                      \
    for (long i = 0; i < inputs; i += 4, weights += 4 * PANEL, bytes += 8 * ROWS) {                        \
      _mm_prefetch((const char *)weights + at.ahead, _MM_HINT_T0);                                         \
      _mm_prefetch((const char *)weights + at.ahead + 64, _MM_HINT_T0);                                    \
      left = _mm512_loadu_si512(weights);                                                                  \
      right = _mm512_loadu_si512(weights + 2 * PANEL);                                                     \
      _Pragma("GCC unroll 16") for (int p = 0; p < 2 * ROWS; p++) {                                        \
        int four;                                                                                          \
        memcpy(&four, bytes + 4 * p, sizeof four);                                                         \
        __m512i all = _mm512_set1_epi32(four);                                                             \
        sums[p][0] = _mm512_dpbusd_epi32(sums[p][0], all, left);                                           \
        sums[p][1] = _mm512_dpbusd_epi32(sums[p][1], all, right);                                          \
      }                                                                                                    \
    }                                                                                                      \
    _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                \
      _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++)                                         \
        store(sums[2 * r][half], sums[2 * r + 1][half], &at, 16 * half, scales[r],                         \
              out + r * outputs + 16 * half, count - 16 * half);                                           \
  }

KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4) KERNEL(5) KERNEL(6) KERNEL(7)

typedef void (*kernel)(const uint8_t *, const float *, long, panel, bf16 *, long, long);

/* Rows are multiplied in groups of nearly equal size: where the group of a row begins, and how many it has. */
static long group_of(long row, long rows, long *size) {
  long groups = (rows + MOST_ROWS - 1) / MOST_ROWS, least = rows / groups, larger = rows % groups;
  long split_at = larger * (least + 1);
  *size = row < split_at ? least + 1 : least;
  return row < split_at ? row / (least + 1) * (least + 1) : split_at + (row - split_at) / least * least;
}

static void split_rows(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  long row_bytes = 2 * rounded_up(p->inputs, 16);
  for (long row = from; row < to; row++) {
    long size, begin = group_of(row, p->rows, &size);
    p->row_scales[row] = scale_of(p->x + row * p->inputs, p->inputs);
    split(p->x + row * p->inputs, p->inputs, p->row_scales[row], p->bytes + begin * row_bytes + 8 * (row - begin),
          8 * size);
  }
}

static void multiply_by_panels(const void *work, long from, long to, pool_place *place) {
  static const kernel kernels[MOST_ROWS + 1] = {0,       panel_1, panel_2, panel_3,
                                                panel_4, panel_5, panel_6, panel_7};
  const product *p = work;
  long steps = rounded_up(p->inputs, 4), row_bytes = 2 * rounded_up(p->inputs, 16);
  for (long n = from; n < to; n++) {
    panel at = panel_at(p->all, n * PANEL, rounded_up(p->inputs, TILE_INPUTS));
    for (long row = 0, size; row < p->rows; row += size) {
      group_of(row, p->rows, &size);
      kernels[size](p->bytes + row * row_bytes, p->row_scales + row, steps, at, p->out + row * p->outputs + n * PANEL,
                    p->outputs, p->outputs - n * PANEL);
      at.ahead = PANEL * steps; /* this panel is near now: fetch the next one */
    }
  }
}

#if defined(TILES) && defined(__AMX_INT8__)

#define LEAST_ROWS 2 /* for which tiles are not slower; sums are exact either way */

/* One row's bytes: a plane of low ones and, `plane` bytes after it, one of high ones. */
static void split_planes(const bf16 *x, long inputs, float scale, uint8_t *bytes, long plane) {
  for (long i = 0; i < inputs; i += 16) {
    __m512i number = numbers(x + i, inputs - i, scale);
    _mm_storeu_si128((__m128i *)(bytes + i), _mm512_cvtepi32_epi8(number));
    _mm_storeu_si128((__m128i *)(bytes + plane + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(number, 8)));
  }
}

/* A panel for a group of rows, whose planes lie one after the other. `near`: the panel is in a cache. */
static void tiles_of_panel(const uint8_t *bytes, long plane, long rows, const float *scales, panel at, bf16 *out,
                           long outputs, long count, int near) {
  const int8_t *weights = at.weights;
  int32_t sums[4][TILE_ROWS][16];
  ZERO_TILES();
  for (long i = 0; i < plane; i += TILE_INPUTS, weights += TILE_INPUTS * PANEL) {
    if (!near) fetch_tiles(weights);
    _tile_loadd(4, bytes + i, 2 * plane);
    _tile_loadd(5, bytes + plane + i, 2 * plane);
    _tile_loadd(6, weights, 4 * PANEL);
    _tile_loadd(7, weights + 2 * PANEL, 4 * PANEL);
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int half = 0; half < 2; half++) {
    __m512i start = _mm512_loadu_si512(at.start + 16 * half);
    for (long r = 0; r < rows; r++)
      store(_mm512_add_epi32(start, _mm512_loadu_si512(sums[half][r])),
            _mm512_add_epi32(start, _mm512_loadu_si512(sums[2 + half][r])), &at, 16 * half, scales[r],
            out + r * outputs + 16 * half, count - 16 * half);
  }
}

static void split_by_planes(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  long plane = rounded_up(p->inputs, TILE_INPUTS);
  for (long row = from; row < to; row++) {
    p->row_scales[row] = scale_of(p->x + row * p->inputs, p->inputs);
    split_planes(p->x + row * p->inputs, p->inputs, p->row_scales[row], p->bytes + 2 * row * plane, plane);
  }
}

static void multiply_by_tiles(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  long plane = rounded_up(p->inputs, TILE_INPUTS);
  tile_shape shape = {0, 0};
  for (long n = from; n < to; n++) {
    panel at = panel_at(p->all, n * PANEL, plane);
    for (long row = 0, now; row < p->rows; row += now) {
      now = smaller(p->rows - row, TILE_ROWS);
      shape_tiles(&shape, now, now);
      tiles_of_panel(p->bytes + 2 * row * plane, plane, now, p->row_scales + row, at,
                     p->out + row * p->outputs + n * PANEL, p->outputs, p->outputs - n * PANEL, row > 0);
    }
  }
  _tile_release();
}

#endif

#endif
