/* Products of bf16 rows with a matrix that stays packed in 4 to 8 bits (packed.h).
 *
 * A row becomes numbers of 8 bits, with a scale for each 32 inputs. A group of a panel is unpacked to bytes in the
 * first-level cache once for up to STRIP rows, whatever its type; one product of bytes serves all types. Every
 * way of multiplying gives the same bits, and a row's result does not depend on its batch or on the threads.
 */
#include <limits.h>
#include <stdlib.h>

#include "packed.h"
#include "pool.h"
#include "tiles.h"
#include "vector.h"

#define STRIP 96
#define ROWS_TOGETHER 8 /* that are quantised in one piece */
#define PANELS_TOGETHER 4 /* at most, that are multiplied in one piece */
#define SMALLEST_TOP 1e-30f
#define LARGEST_NUMBER 127.0f

/* Some rows of 8 bits, STRIP at most. A chunk is a run of inputs with one scale of the matrix, 32 or 16; arrays are
 * [chunks][rows]. */
typedef struct {
  long rows;
  int8_t *numbers; /* [chunks][rows][inputs of a chunk] */
  float *scales, *sums; /* sums: those of the numbers, times their scale */
  int32_t *starts;      /* what takes the zero of the codes away again */
} quantised;

/* Some blocks of a panel, from a chunk of the rows on. */
typedef struct {
  long chunk, chunks, stride; /* stride: bytes from a block's codes to those of the next one */
  const uint8_t *codes;
  const float *scales, *minima; /* minima: NULL without any */
} unpacked;

typedef void (*kernel)(const unpacked *, const quantised *, long, float (*)[PANEL]);

/* A way of multiplying: kernels for 1 to `most` rows, of types with whole blocks, with halves, and of 8 bits. */
typedef struct {
  int most;
  kernel kernels[3][8];
} way;

static inline const uint8_t *codes_of(const unpacked *at, long chunk, int steps) {
  return at->codes + (steps == 8 ? chunk * at->stride : chunk / 2 * at->stride + chunk % 2 * CODES / 2);
}

static void plain_rows(const unpacked *at, const quantised *x, long row, int steps, float *sums) {
  for (long chunk = 0; chunk < at->chunks; chunk++) {
    long index = (at->chunk + chunk) * x->rows + row;
    const int8_t *numbers = x->numbers + index * 4 * steps;
    const uint8_t *codes = codes_of(at, chunk, steps);
    for (int o = 0; o < PANEL; o++) {
      int32_t dot = x->starts[index];
      for (int i = 0; i < 4 * steps; i++) dot += numbers[i] * codes[(i / 4 * PANEL + o) * 4 + i % 4];
      sums[o] = __builtin_fmaf((float)dot, at->scales[chunk * PANEL + o] * x->scales[index], sums[o]);
      if (at->minima) sums[o] = __builtin_fmaf(at->minima[chunk * PANEL + o], x->sums[index], sums[o]);
    }
  }
}

static void plain_8(const unpacked *at, const quantised *x, long row, float (*sums)[PANEL]) {
  plain_rows(at, x, row, 8, sums[0]);
}

static void plain_4(const unpacked *at, const quantised *x, long row, float (*sums)[PANEL]) {
  plain_rows(at, x, row, 4, sums[0]);
}

static const way plain_way = {1, {{0, plain_8}, {0, plain_4}, {0, plain_8}}};

#if defined(__AVX2__) && defined(__FMA__)
#include "packed_avx2.h"
#define AVX2_WAY &avx2_way
#else
#define AVX2_WAY NULL
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "packed_avx512.h"
#define AVX512_WAY &avx512_way
#else
#define AVX512_WAY NULL
#endif

#if defined(TILES) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#include "packed_tiles.h"
#define TILE_WAY &avx512_way
#else
#define TILE_WAY NULL
#define TILE_ROWS 16
#define LEAST_TILE_ROWS LONG_MAX
#define tiles_allowed() 0
#define shape_for_blocks() (void)0
#define multiply_tiles(at, x, row, sums) (void)0
#define _tile_release() (void)0
#endif

#define WAYS 4
#define BY_TILES 3
static const way *const ways[WAYS] = {&plain_way, AVX2_WAY, AVX512_WAY, TILE_WAY};

/* The best way up to `most`, which is at least 0. */
static int best_way(int most) {
  int best = most < WAYS ? most : WAYS - 1;
  while (!ways[best] || (best == BY_TILES && !tiles_allowed())) best--;
  return best;
}

/* The fastest way of this processor: 0 the plain one, 1 AVX2, 2 AVX-512, 3 tiles too. */
int ssd_packed_way(void) { return best_way(WAYS); }

static void quantise_row(const packed_type *type, const bf16 *x, long inputs, const quantised *to, long row) {
  int size = BLOCK / type->halves;
  for (long i = 0; i < inputs; i += BLOCK) {
    bf16 most = 0;
    for (int k = 0; k < BLOCK; k++) most = (x[i + k] & 0x7fff) > most ? x[i + k] & 0x7fff : most; /* NaN: the most */
    float values[BLOCK], top;
    for (int k = 0; k < BLOCK; k += LANES) store_float(values + k, load_bf16(x + i + k));
    uint32_t bits = (uint32_t)most << 16;
    memcpy(&top, &bits, sizeof top);
    if (top < SMALLEST_TOP) top = SMALLEST_TOP;
    float factor = LARGEST_NUMBER / top, scale = top / LARGEST_NUMBER;
    for (int half = 0; half < type->halves; half++) {
      long index = (i / size + half) * to->rows + row;
      int8_t *numbers = to->numbers + index * size;
      int32_t sum = 0;
      for (int k = 0; k < size; k++) {
        int32_t number = (int32_t)__builtin_rintf(values[half * size + k] * factor);
        numbers[k] = (int8_t)number;
        sum += number;
      }
      to->scales[index] = scale;
      to->sums[index] = scale * (float)sum;
      to->starts[index] = -type->zero * sum;
    }
  }
}

/* A panel for the first `rows` rows of a strip. `tiles`: by tiles where enough rows are left. */
static void multiply_panel(const way *by, int tiles, const packed_type *type, const uint8_t *panel, long inputs,
                           const quantised *x, long rows, float (*sums)[PANEL]) {
  _Alignas(64) uint8_t codes[GROUP * CODES];
  _Alignas(64) float scales[2 * GROUP * PANEL], minima[GROUP * PANEL];
  int form = type->bits == 8 ? 2 : type->halves - 1;
  long blocks = inputs / BLOCK, size = block_bytes(type);
  memset(sums, 0, rows * sizeof sums[0]);
  for (long block = 0; block < blocks; block += GROUP) {
    const uint8_t *group = group_at(type, panel, block), *from = group + head_bytes(type);
    unpacked at = {block * type->halves, 0, type->bits == 8 ? size : CODES, type->bits == 8 ? from : codes, scales,
                   type->minimum ? minima : NULL};
    long count = smaller(GROUP, blocks - block);
    at.chunks = count * type->halves;
    for (long b = 0; b < count; b++, from += size) {
      for (long i = 0; i < size; i += 64) __builtin_prefetch(from + AHEAD + i);
      unpack_scales(type, group, from, scales + b * type->halves * PANEL, minima + b * PANEL);
      if (type->bits < 8) unpack_codes(type, from, codes + b * CODES);
    }
    for (long r = 0, now; r < rows; r += now) {
      if (tiles && rows - r >= LEAST_TILE_ROWS) {
        now = smaller(TILE_ROWS, rows - r);
        multiply_tiles(&at, x, r, sums + r);
        continue;
      }
      now = part(rows - r, by->most);
      by->kernels[form][now](&at, x, r, sums + r);
    }
  }
}

static quantised strip_at(int8_t *memory, long rows, long inputs, long chunks) {
  float *scales = (float *)(memory + rows * inputs);
  return (quantised){rows, memory, scales, scales + rows * chunks, (int32_t *)(scales + 2 * rows * chunks)};
}

/* A product that threads share; of its rows the strip of `now` from `row` on is multiplied. A strip begins every
 * `size` rows, its numbers every `strip_bytes` of `memory`. */
typedef struct {
  const packed_type *type;
  const way *by;
  int tiles;
  const bf16 *x;
  long inputs, outputs, stride, size, strip_bytes;
  int8_t *memory;
  const uint8_t *packed;
  const float *bias;
  bf16 *out;
  long row, now;
} product;

static quantised strip_of(const product *p, long row) {
  return strip_at(p->memory + row / p->size * p->strip_bytes, p->size, p->inputs, p->inputs / BLOCK * p->type->halves);
}

static void quantise_rows(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  for (long row = from; row < to; row++) {
    quantised strip = strip_of(p, row);
    quantise_row(p->type, p->x + row * p->inputs, p->inputs, &strip, row % p->size);
  }
}

static void multiply_panels(const void *work, long from, long to, pool_place *place) {
  const product *p = work;
  quantised strip = strip_of(p, p->row);
  _Alignas(64) float sums[STRIP][PANEL];
  bf16 results[PANELS_TOGETHER][STRIP][PANEL];
  if (p->tiles) shape_for_blocks();
  for (long first = from; first < to; first += PANELS_TOGETHER) {
    long last = smaller(first + PANELS_TOGETHER, to);
    for (long n = first; n < last; n++) {
      const uint8_t *panel = p->packed + n * panel_bytes(p->type, p->inputs);
      multiply_panel(p->by, p->tiles, p->type, panel, p->inputs, &strip, p->now, sums);
      for (long r = 0; r < p->now; r++) {
        for (int o = 0; p->bias && o < PANEL; o++)
          sums[r][o] += n * PANEL + o < p->outputs ? p->bias[n * PANEL + o] : 0;
        for (int o = 0; o < PANEL; o += LANES) store_bf16(results[n - first][r] + o, load_float(sums[r] + o));
      }
    }
    if (!pool_claim(place)) break;
    for (long n = first; n < last; n++)
      for (long r = 0; r < p->now; r++)
        memcpy(p->out + (p->row + r) * p->stride + n * PANEL, results[n - first][r],
               2 * smaller(PANEL, p->outputs - n * PANEL));
  }
  if (p->tiles) _tile_release();
}

/* out [rows][outputs], rows `stride` apart, = x [rows][inputs] times a packed matrix, plus bias (float, or NULL), by
 * `most` of the ways at best. Returns 0 if there is no memory for it. */
int ssd_multiply_packed(const bf16 *x, long rows, long inputs, int kind, const uint8_t *packed, const float *bias,
                        bf16 *out, long stride, long outputs, int most, int threads) {
  const packed_type *type = packed_types + kind;
  int number = best_way(most), tiles = number == BY_TILES && rows >= LEAST_TILE_ROWS && type->halves == 1;
  long size = part(rows, STRIP), strips = parts_of(rows, size);
  long strip_bytes = size * (inputs + 12 * (inputs / BLOCK * type->halves));
  int8_t *memory = pool_memory(strips * strip_bytes + TILE_ROWS * BLOCK); /* tiles read past the last row */
  if (!memory) return 0;
  product p = {type, ways[number], tiles, x, inputs, outputs, stride, size, strip_bytes, memory, packed, bias, out};
  POOL_RUN(quantise_rows, p, rows, ROWS_TOGETHER, threads);
  for (; p.row < rows; p.row += size) { /* outside of panels, so that few pages are written at a time */
    p.now = smaller(size, rows - p.row);
    POOL_RUN_AGAIN(multiply_panels, p, parts_of(outputs, PANEL),
                   smaller(PANELS_TOGETHER, piece_of(panel_bytes(type, inputs), p.now)), threads);
  }
  return 1;
}
