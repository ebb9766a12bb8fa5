/* Products of bf16 rows with a fixed int8 matrix, by AVX-512 VNNI or AVX2, or by tiles where there are some.
 *
 * The scheme of `kernels/products/int8.py`: a row becomes 16-bit numbers with a scale of its own. The matrix lies in
 * panels of 32 outputs: [panels][inputs / 4][32][4], inputs rounded up to whole tiles. Sums are exact, hence a row's
 * result does not depend on its batch.
 */
#include <limits.h>
#include <stdint.h>
#include <string.h>

#include "pool.h"
#include "tiles.h"

#define TILE_INPUTS 64

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VNNI
#endif

#if defined(VNNI) || defined(__AVX2__)

#define PANEL 32
#define LARGEST_ELEMENT 32639.0f
#define SMALLEST_TOP 1e-30f
#define ROWS_TOGETHER 8 /* that are split in one piece */

typedef uint16_t bf16;

/* What a product of a panel needs besides the rows; arrays hold whole panels. */
typedef struct {
  const int8_t *weights;
  const int32_t *start;  /* what takes the 128 of the unsigned bytes away again */
  const float *scales, *bias; /* bias may be NULL */
  long ahead;                 /* bytes */
} panel;

/* The panel that begins at output `from`, with so many inputs. */
static inline panel panel_at(panel all, long from, long inputs) {
  return (panel){all.weights + from * inputs, all.start + from, all.scales + from, all.bias ? all.bias + from : NULL,
                 all.ahead};
}

/* A product that threads share; see `ssd_multiply_int8`. */
typedef struct {
  const bf16 *x;
  long rows, inputs;
  panel all;
  bf16 *out;
  long outputs;
  uint8_t *bytes;
  float *row_scales;
} product;

#ifdef VNNI
#include "int8_avx512.h"
#else
#include "int8_avx2.h"
#endif

#ifndef LEAST_ROWS
#define LEAST_ROWS LONG_MAX
#define tiles_allowed() 0
#define split_by_planes split_rows
#define multiply_by_tiles multiply_by_panels
#endif

int ssd_can_multiply_int8(void) { return 1; }

/* out [rows, outputs] = x [rows, inputs] times the matrix, plus bias.
 *
 * Weights, start, scales and bias (float, or NULL) hold whole panels, weights also whole tiles of inputs. start:
 * -128 times the sum of an output's weights. bytes: room for 2 * rows * (inputs rounded up to whole tiles), aligned
 * to 2; row_scales: for rows floats. Inputs: at most 131,072, so that sums fit 32 bits. `tiles`: by tiles where they
 * can be used.
 */
void ssd_multiply_int8(const bf16 *x, long rows, long inputs, const int8_t *weights, const int32_t *start,
                       const float *scales, const float *bias, bf16 *out, long outputs, uint8_t *bytes,
                       float *row_scales, int tiles, int threads) {
  product p = {x, rows, inputs, {weights, start, scales, bias, AHEAD}, out, outputs, bytes, row_scales};
  int by_tiles = tiles && rows >= LEAST_ROWS && tiles_allowed();
  POOL_RUN(by_tiles ? split_by_planes : split_rows, p, rows, ROWS_TOGETHER, threads);
  POOL_RUN(by_tiles ? multiply_by_tiles : multiply_by_panels, p, parts_of(outputs, PANEL),
           piece_of(PANEL * inputs, rows), threads);
}

#else

int ssd_can_multiply_int8(void) { return 0; }
void ssd_multiply_int8(const uint16_t *x, long rows, long inputs, const int8_t *weights, const int32_t *start,
                       const float *scales, const float *bias, uint16_t *out, long outputs, uint8_t *bytes,
                       float *row_scales, int tiles, int threads) {}

#endif
