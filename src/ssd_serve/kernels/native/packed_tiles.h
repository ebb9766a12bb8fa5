/* Packed products of many rows by tiles (AMX). Tiles take the products of a chunk, vectors scale them: the same sums as
 * by vectors alone, step by step.
 */
#ifndef SSD_PACKED_TILES_H
#define SSD_PACKED_TILES_H

#define LEAST_TILE_ROWS 12 /* for which tiles are not slower */

/* Shape this thread's tiles for products of blocks; half blocks are slower by tiles. */
static void shape_for_blocks(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } all = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) {
    all.bytes[tile] = tile == 4 ? BLOCK : TILE_BYTES; /* 4: rows, 6 and 7: the two halves of a panel */
    all.rows[tile] = tile >= 6 ? BLOCK / 4 : TILE_ROWS;
  }
  _tile_loadconfig(&all);
}

/* Goes on with the sums of 8 rows by the products of all chunks. */
static inline __attribute__((always_inline)) void scale_dots(const unpacked *at, const quantised *x, long row,
                                                             int32_t (*dots)[2][TILE_ROWS][16], long from,
                                                             const int minima, float (*sums)[PANEL]) {
  __m512 total[8][2];
  _Pragma("GCC unroll 8") for (int r = 0; r < 8; r++)
    _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++) total[r][v] = _mm512_loadu_ps(sums[from + r] + 16 * v);
  for (long chunk = 0; chunk < at->chunks; chunk++) {
    long index = (at->chunk + chunk) * x->rows + row + from;
    _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++) {
      __m512 scales = _mm512_loadu_ps(at->scales + chunk * PANEL + 16 * v), lowest = scales;
      if (minima) lowest = _mm512_loadu_ps(at->minima + chunk * PANEL + 16 * v);
      _Pragma("GCC unroll 8") for (int r = 0; r < 8; r++) {
        __m512i dot = _mm512_load_si512(dots[chunk][v][from + r]);
        if (!minima) dot = _mm512_add_epi32(dot, _mm512_set1_epi32(x->starts[index + r]));
        __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(x->scales[index + r]));
        total[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, total[r][v]);
        if (minima) total[r][v] = _mm512_fmadd_ps(lowest, _mm512_set1_ps(x->sums[index + r]), total[r][v]);
      }
    }
  }
  _Pragma("GCC unroll 8") for (int r = 0; r < 8; r++)
    _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++) _mm512_storeu_ps(sums[from + r] + 16 * v, total[r][v]);
}

/* A group of a panel for TILE_ROWS rows; those past the last one are computed from whatever follows, and not used. */
static void multiply_tiles(const unpacked *at, const quantised *x, long row, float (*sums)[PANEL]) {
  _Alignas(64) int32_t dots[GROUP][2][TILE_ROWS][16];
  for (long chunk = 0; chunk < at->chunks; chunk++) {
    const uint8_t *codes = codes_of(at, chunk, 8);
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x->numbers + ((at->chunk + chunk) * x->rows + row) * BLOCK, BLOCK);
    _tile_loadd(6, codes, 4 * PANEL);
    _tile_loadd(7, codes + 2 * PANEL, 4 * PANEL);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_stored(0, dots[chunk][0], TILE_BYTES);
    _tile_stored(1, dots[chunk][1], TILE_BYTES);
  }
  for (int from = 0; from < TILE_ROWS; from += 8)
    if (at->minima)
      scale_dots(at, x, row, dots, from, 1, sums);
    else
      scale_dots(at, x, row, dots, from, 0, sums);
}

#endif
