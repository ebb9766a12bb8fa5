/* Goes on with the sums of some rows over the blocks of a group, for one panel. Included once for each set of
 * instructions, which defines:
 *
 * NAME(x): x with a suffix. INTEGERS, FLOATS: vector types, of which VECTORS make a panel. SAME(from): four bytes in
 * every lane. EACH(number), EACH_FLOAT(number), ADD_FLOATS(a, b, c): a * b + c rounded once, TIMES, AS_FLOATS,
 * LOAD_INTEGERS, LOAD_FLOATS, STORE_FLOATS. DOT(sums, codes, four, level): adds the products of `level` steps of four
 * inputs, `codes[level]` and `four[level]`. SIGNED(level): it takes 128 off the codes. MOST_ROWS: a kernel's.
 *
 * Products of a block are exact. A sum takes one rounded step for a block and one for its minimum, in their order.
 */

static inline __attribute__((always_inline)) void NAME(multiply)(const unpacked *at, const quantised *x, long row,
                                                                 const int rows, const int steps, const int level,
                                                                 float (*sums)[PANEL]) {
  const long next = x->rows;
  const int8_t *numbers = x->numbers + (at->chunk * next + row) * 4 * steps;
  long index = at->chunk * next + row;
  FLOATS total[MOST_ROWS][VECTORS];
  _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
    _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)
      total[r][v] = LOAD_FLOATS(sums[r] + PANEL / VECTORS * v);
  for (long chunk = 0; chunk < at->chunks; chunk++, index += next, numbers += next * 4 * steps) {
    const uint8_t *codes = codes_of(at, chunk, steps);
    INTEGERS dots[MOST_ROWS][VECTORS];
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
      _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)
        dots[r][v] = EACH(SIGNED(level) ? 0 : x->starts[index + r]);
    _Pragma("GCC unroll 8") for (int s = 0; s < steps; s += level)
      _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) {
        INTEGERS weights[4], four[4];
        _Pragma("GCC unroll 4") for (int k = 0; k < level; k++)
          weights[k] = LOAD_INTEGERS(codes + 4 * (PANEL * (s + k) + PANEL / VECTORS * v));
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
          _Pragma("GCC unroll 4") for (int k = 0; k < level; k++) four[k] = SAME(numbers + 4 * (steps * r + s + k));
          dots[r][v] = DOT(dots[r][v], weights, four, level);
        }
      }
    _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++) {
      FLOATS scales = LOAD_FLOATS(at->scales + chunk * PANEL + PANEL / VECTORS * v);
      _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
        total[r][v] = ADD_FLOATS(AS_FLOATS(dots[r][v]), TIMES(scales, EACH_FLOAT(x->scales[index + r])), total[r][v]);
      if (!at->minima) continue;
      FLOATS minima = LOAD_FLOATS(at->minima + chunk * PANEL + PANEL / VECTORS * v);
      _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
        total[r][v] = ADD_FLOATS(minima, EACH_FLOAT(x->sums[index + r]), total[r][v]);
    }
  }
  _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++)
    _Pragma("GCC unroll 4") for (int v = 0; v < VECTORS; v++)
      STORE_FLOATS(sums[r] + PANEL / VECTORS * v, total[r][v]);
}

#define KERNEL(ROWS, STEPS, LEVEL)                                                                                \
  static void NAME(rows_##ROWS##_##STEPS##_##LEVEL)(const unpacked *at, const quantised *x, long row, float (*sums)[PANEL]) { \
    NAME(multiply)(at, x, row, ROWS, STEPS, LEVEL, sums);                                                         \
  }
