/* Shared noise: log E of whole rows, as sampling/noise.py defines it.
 *
 * Philox4x32-10 on eight blocks at a time, a block's four words being four neighbouring tokens; the integers are
 * exactly those of the definition. E = -log(1 - w): 1 - w is exact in a double, so that one logarithm serves for
 * both. A token's value depends on nothing but its seed, position and id.
 */
#include "noise.h"

/* log E of each pair of seed and position into its line of `table` [lines, vocabulary]. */
void ssd_log_exponential(const uint64_t *seeds, const int64_t *positions, long rows, long vocabulary, uint32_t stream,
                         float *table, const int64_t *lines) {
  for (long row = 0; row < rows; row++) {
    uint32_t position = (uint32_t)positions[row];
    schedule keys = schedule_of(seeds[row]);
    float *out = table + lines[row] * vocabulary;
    long token = 0;
    for (; token + GROUP <= vocabulary; token += GROUP)
      group(&keys, position, stream, (uint32_t)(token / 4), out + token);
    if (token < vocabulary) {
      float last[GROUP];
      group(&keys, position, stream, (uint32_t)(token / 4), last);
      memcpy(out + token, last, (size_t)(vocabulary - token) * sizeof *last);
    }
  }
}
