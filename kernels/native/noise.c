/* Shared noise: log E of whole rows, as kernels/noise.py defines it.
 *
 * Philox4x32-10 on eight blocks at a time, a block's four words being four neighbouring tokens; the integers are
 * exactly those of the definition. E = -log(1 - w): 1 - w is exact in a double, so that one logarithm serves for
 * both. A token's value depends on nothing but its seed, position and id.
 */
#include "noise.h"

/* GROUP tokens from block `first` on, in order: the lanes' blocks are such that interleaving leaves no gaps. */
static inline void group(uint64_t seed, uint32_t position, uint32_t stream, uint32_t first, float *out) {
  words word[4], blocks = {0, 2, 4, 6, 1, 3, 5, 7};
  floats v[4], pairs[4];
  philox(blocks + first, position, stream, seed, word);
  race(word, v);
  pairs[0] = SHUFFLE(v[0], v[1], 0, 8, 1, 9, 4, 12, 5, 13);
  pairs[1] = SHUFFLE(v[2], v[3], 0, 8, 1, 9, 4, 12, 5, 13);
  pairs[2] = SHUFFLE(v[0], v[1], 2, 10, 3, 11, 6, 14, 7, 15);
  pairs[3] = SHUFFLE(v[2], v[3], 2, 10, 3, 11, 6, 14, 7, 15);
  for (int half = 0; half < 2; half++) {
    floats low = SHUFFLE(pairs[2 * half], pairs[2 * half + 1], 0, 1, 8, 9, 4, 5, 12, 13);
    floats high = SHUFFLE(pairs[2 * half], pairs[2 * half + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    memcpy(out + 16 * half, &low, sizeof low);
    memcpy(out + 16 * half + 8, &high, sizeof high);
  }
}

/* log E of each pair of seed and position into its line of `table` [lines, vocabulary]. */
void ssd_log_exponential(const uint64_t *seeds, const int64_t *positions, long rows, long vocabulary, uint32_t stream,
                         float *table, const int64_t *lines) {
  for (long row = 0; row < rows; row++) {
    uint32_t position = (uint32_t)positions[row];
    float *out = table + lines[row] * vocabulary;
    long token = 0;
    for (; token + GROUP <= vocabulary; token += GROUP)
      group(seeds[row], position, stream, (uint32_t)(token / 4), out + token);
    if (token < vocabulary) {
      float last[GROUP];
      group(seeds[row], position, stream, (uint32_t)(token / 4), last);
      memcpy(out + token, last, (size_t)(vocabulary - token) * sizeof *last);
    }
  }
}
