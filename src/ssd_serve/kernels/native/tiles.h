/* Matrix tiles (AMX): a thread's eight registers of up to 16 rows of 64 bytes each.
 *
 * Everywhere here tiles 0 to 3 are sums, 0 and 1 of a first group of rows, 2 and 3 of a second one; 4 and 5 are the
 * groups' inputs, 6 and 7 weights of 16 outputs each. Also what products by vectors share with those by tiles.
 */
#ifndef SSD_TILES_H
#define SSD_TILES_H

#include "parts.h"

#define AHEAD 4096 /* bytes; far enough to hide memory, near enough to stay in the first-level cache */

#if defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILES
#define TILE_ROWS 16
#define TILE_BYTES 64
#define ASK_FOR_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define STATE_OF_TILES 18    /* XFEATURE_XTILEDATA */

/* Whether this process may use tiles: Linux gives the memory for them only to who asks. */
static int tiles_allowed(void) {
  static int known = -1;
  if (known < 0) known = syscall(SYS_arch_prctl, ASK_FOR_STATE, STATE_OF_TILES) == 0;
  return known;
}

/* Rows of the two groups of a thread's tiles; 0, 0: not shaped yet. */
typedef struct {
  long first, second;
} tile_shape;

/* Give this thread's tiles `first` and `second` rows, at least one each, unless they have them. */
static inline void shape_tiles(tile_shape *shape, long first, long second) {
  if (shape->first == first && shape->second == second) return;
  *shape = (tile_shape){first, second};
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } all = {.palette = 1};
  uint8_t upper = (uint8_t)first, lower = (uint8_t)second;
  const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS};
  for (int tile = 0; tile < 8; tile++) {
    all.bytes[tile] = TILE_BYTES;
    all.rows[tile] = rows[tile];
  }
  _tile_loadconfig(&all);
}

/* Begin to read the two tiles of weights that are AHEAD of these. */
static inline void fetch_tiles(const void *weights) {
  for (int at = 0; at < 2 * TILE_ROWS * TILE_BYTES; at += 64)
    _mm_prefetch((const char *)weights + AHEAD + at, _MM_HINT_T0);
}

/* Macros, because the number of a tile is part of its instructions. */
#define ZERO_TILES() \
  do {               \
    _tile_zero(0);   \
    _tile_zero(1);   \
    _tile_zero(2);   \
    _tile_zero(3);   \
  } while (0)

#endif
#endif
