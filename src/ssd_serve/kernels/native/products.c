/* Products of rows with a fixed bf16 matrix, by AVX-512 BF16 or AVX2, or by tiles where there are some.
 *
 * A decoding step multiplies a few rows with every weight once, so it is bound by reading weights. The matrix
 * lies in panels of 32 outputs: [panels][inputs / 2][32][2], inputs rounded up to whole tiles. A panel is read
 * once for up to 14 rows, or 32 by tiles, whose sums stay in registers; by AVX2 for 96, whose sums do not. Each sum
 * is added up in the same order however many rows there are: a row's result does not depend on its batch.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "pool.h"
#include "tiles.h"

typedef uint16_t bf16;

#define TILE_INPUTS 32

/* A product that threads share; see `ssd_multiply_bf16`. */
typedef struct {
  const bf16 *x;
  long rows, inputs;
  const bf16 *weights;
  const float *bias;
  bf16 *out;
  long outputs;
  const void *wide; /* the rows as floats, where they are widened first */
} product;

#if defined(__AVX512BF16__)
#include "products_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "products_avx2.h"
#endif

#ifdef MOST_ROWS

#if defined(TILES) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

/* Where rows of inputs begin and how far apart they are. */
typedef struct {
  const bf16 *first;
  long stride;
} place;

/* The tile of inputs from `i` on; the last ones are copied beside zeros where they do not fill a tile. */
static inline place inputs_at(const bf16 *x, long rows, long inputs, long i, bf16 rest[][TILE_INPUTS]) {
  if (inputs - i >= TILE_INPUTS) return (place){x + i, inputs};
  for (long r = 0; r < rows; r++) {
    memset(rest[r], 0, sizeof rest[r]);
    memcpy(rest[r], x + r * inputs + i, 2 * (inputs - i));
  }
  return (place){rest[0], TILE_INPUTS};
}

#define WEIGHTS(number, half) _tile_loadd(number, half, 4 * PANEL)
#define STORE_TILE(number, rows, bias, out, count)                                                         \
  do {                                                                                                     \
    _tile_stored(number, sums, sizeof sums[0]);                                                            \
    for (long r = 0; r < (rows); r++) store(_mm512_loadu_ps(sums[r]), bias, (out) + r * outputs, count);   \
  } while (0)

/* A panel for two groups of rows. `near`: it is in a cache. */
static void tiles_of_rows(const bf16 *x, long first, long second, long inputs, const bf16 *weights,
                          const float *bias, bf16 *out, long outputs, long count, int near) {
  bf16 rest[2 * TILE_ROWS][TILE_INPUTS];
  float sums[TILE_ROWS][16];
  ZERO_TILES();
  for (long i = 0; i < inputs; i += TILE_INPUTS, weights += TILE_INPUTS * PANEL) {
    place at = inputs_at(x, first + second, inputs, i, rest);
    if (!near) fetch_tiles(weights);
    _tile_loadd(4, at.first, 2 * at.stride);
    _tile_loadd(5, at.first + first * at.stride, 2 * at.stride);
    WEIGHTS(6, weights);
    WEIGHTS(7, weights + PANEL);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  const float *right = bias ? bias + 16 : bias;
  STORE_TILE(0, first, bias, out, count);
  STORE_TILE(1, first, right, out + 16, count - 16);
  STORE_TILE(2, second, bias, out + first * outputs, count);
  STORE_TILE(3, second, right, out + first * outputs + 16, count - 16);
}

/* Two panels for one group of rows: four sums that do not wait for one another. */
static void tiles_of_panels(const bf16 *x, long rows, long inputs, const bf16 *weights, long panel,
                            const float *bias, bf16 *out, long outputs, long count) {
  bf16 rest[TILE_ROWS][TILE_INPUTS];
  float sums[TILE_ROWS][16];
  ZERO_TILES();
  for (long i = 0; i < inputs; i += TILE_INPUTS, weights += TILE_INPUTS * PANEL) {
    place at = inputs_at(x, rows, inputs, i, rest);
    fetch_tiles(weights);
    fetch_tiles(weights + panel);
    _tile_loadd(4, at.first, 2 * at.stride);
    WEIGHTS(6, weights);
    WEIGHTS(7, weights + PANEL);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    WEIGHTS(6, weights + panel);
    WEIGHTS(7, weights + panel + PANEL);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  }
  STORE_TILE(0, rows, bias, out, count);
  STORE_TILE(1, rows, bias ? bias + 16 : bias, out + 16, count - 16);
  STORE_TILE(2, rows, bias ? bias + 32 : bias, out + 32, count - 32);
  STORE_TILE(3, rows, bias ? bias + 48 : bias, out + 48, count - 48);
}

/* Two panels for one row, for which tiles are slower, added up as tiles do: even and odd inputs of a tile apart. */
static void row_of_panels(const bf16 *x, long inputs, const bf16 *weights, long panel, const float *bias, bf16 *out,
                          long count) {
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  __m512 sums[4];
  _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++) sums[part] = _mm512_setzero_ps();
  for (long i = 0; i < inputs; i += TILE_INPUTS, weights += TILE_INPUTS * PANEL) {
    __m512 even[4], odd[4];
    _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++) even[part] = odd[part] = _mm512_setzero_ps();
    long pairs = inputs - i < TILE_INPUTS ? (inputs - i) / 2 : TILE_INPUTS / 2;
    const bf16 *here = weights;
    for (long pair = 0; pair < pairs; pair++, here += 2 * PANEL) {
      uint32_t two;
      memcpy(&two, x + i + 2 * pair, sizeof two);
      __m512 first = (__m512)_mm512_set1_epi32(two << 16), second = (__m512)_mm512_set1_epi32(two & 0xffff0000);
      _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++) {
        const bf16 *half = here + (part >> 1) * panel + (part & 1) * PANEL;
        _mm_prefetch((const char *)half + AHEAD, _MM_HINT_T0);
        __m512i both = _mm512_loadu_si512(half);
        even[part] = _mm512_fmadd_ps(first, (__m512)_mm512_slli_epi32(both, 16), even[part]);
        odd[part] = _mm512_fmadd_ps(second, (__m512)_mm512_and_si512(both, upper), odd[part]);
      }
    }
    _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++)
      sums[part] = _mm512_add_ps(sums[part], _mm512_add_ps(even[part], odd[part]));
  }
  _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++)
    store(sums[part], bias ? bias + 16 * part : bias, out + 16 * part, count - 16 * part);
}

static void multiply_row(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  long panel = PANEL * rounded_up(p->inputs, TILE_INPUTS);
  unsigned before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | 0x0040 /* denormals are zero */); /* as tiles do */
  for (long first = 2 * from * PANEL; first < 2 * to * PANEL; first += 2 * PANEL)
    row_of_panels(p->x, p->inputs, p->weights + first / PANEL * panel, panel, p->bias ? p->bias + first : NULL,
                  p->out + first, p->outputs - first);
  _mm_setcsr(before);
}

static void multiply_tiles(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  long panel = PANEL * rounded_up(p->inputs, TILE_INPUTS), outputs = p->outputs;
  tile_shape shape = {0, 0};
  for (long pair = from; pair < to; pair++) {
    const bf16 *begin = p->weights + 2 * pair * panel;
    const float *offset = p->bias ? p->bias + 2 * pair * PANEL : NULL;
    for (long row = 0, now; row < p->rows; row += now) {
      long count = outputs - 2 * pair * PANEL;
      const bf16 *in = p->x + row * p->inputs;
      bf16 *to = p->out + row * outputs + 2 * pair * PANEL;
      now = smaller(p->rows - row, 2 * TILE_ROWS);
      long first = smaller(now, TILE_ROWS), second = now - first;
      shape_tiles(&shape, first, second ? second : first);
      if (!second) {
        tiles_of_panels(in, first, p->inputs, begin, panel, offset, to, outputs, count);
        continue;
      }
      tiles_of_rows(in, first, second, p->inputs, begin, offset, to, outputs, count, row > 0);
      if (count > PANEL)
        tiles_of_rows(in, first, second, p->inputs, begin + panel, offset ? offset + PANEL : NULL, to + PANEL, outputs,
                      count - PANEL, row > 0);
    }
  }
  _tile_release();
}

static int multiply_by_tiles(product *p, int threads) {
  long piece = piece_of(4 * PANEL * p->inputs, p->rows);
  POOL_RUN(p->rows == 1 ? multiply_row : multiply_tiles, *p, parts_of(p->outputs, 2 * PANEL), piece, threads);
  return 1;
}

int ssd_tiles_multiply_bf16(void) { return tiles_allowed(); }

#else

#define multiply_by_tiles multiply_by_panels
int ssd_tiles_multiply_bf16(void) { return 0; }

#endif

int ssd_can_multiply_bf16(void) { return 1; }

/* out [rows, outputs] = x [rows, inputs] times the matrix, plus bias (float, whole panels, or NULL). `tiles`: by
 * tiles, which add up in another order, where `ssd_tiles_multiply_bf16` says that they can. Returns 0 if there is no
 * memory for it. */
int ssd_multiply_bf16(const bf16 *x, long rows, long inputs, const bf16 *weights, const float *bias, bf16 *out,
                      long outputs, int tiles, int threads) {
  product p = {x, rows, inputs, weights, bias, out, outputs, NULL};
  return (tiles ? multiply_by_tiles : multiply_by_panels)(&p, threads);
}

#else

int ssd_can_multiply_bf16(void) { return 0; }
int ssd_tiles_multiply_bf16(void) { return 0; }
int ssd_multiply_bf16(const uint16_t *x, long rows, long inputs, const uint16_t *weights, const float *bias,
                      uint16_t *out, long outputs, int tiles, int threads) {
  return 0;
}

#endif
