/* Ranking tokens for a drafter, as sampling/ranking.py defines it: of scores x / temperature - log E the best few, and
 * what a softmax over scores * inverse makes of them.
 *
 * Scores are torch's bit for bit: single operations in float32. Sums over a row are taken in another order, by an
 * exponential of about two units in the last place.
 */
#include "pool.h"
#include "searching.h"

#include <stdatomic.h>
#include <stdlib.h>

#define LEAST -1e30f       /* stands for -inf and NaN: nothing that is computed from it is NaN */
#define NEGLIGIBLE 25.0f   /* what lies so far below the best weighs less than 2e-11 of it */
#define BLOCK (64 * LANES) /* summed in float32 before it is added up in float64 */
#define MAXIMA 2           /* vectors of maxima for LANES children */

typedef struct {
  float value;
  int32_t id;
} ranked;

/* Keep the `most` largest, best first; of equal ones those that came first. Returns how many there are. */
static inline long keep(ranked *best, long count, long most, float value, long id) {
  if (count == most && !(value > best[most - 1].value)) return count;
  long at = count < most ? count++ : most - 1;
  for (; at > 0 && value > best[at - 1].value; at--) best[at] = best[at - 1];
  best[at] = (ranked){value, (int32_t)id};
  return count;
}

/* `keep` of the values of a vector in the lanes that `which` names. */
static inline long keep_lanes(ranked *best, long count, long most, vfloat values, uint32_t which, long from) {
  float lanes[LANES];
  store_float(lanes, values);
  for (; which; which &= which - 1) {
    int lane = __builtin_ctz(which);
    count = keep(best, count, most, lanes[lane], from + lane);
  }
  return count;
}

/* row = (x / temperature - log E) * inverse up to whole vectors. Returns a number that at least `children` of the row's
 * values reach: the maxima of some parts of the row are as many values. */
static float scale(const float *x, const float *log_e, float temperature, float inverse, long count, long children,
                   float *row, ranked *best) {
  const vfloat least = (vfloat){} + LEAST;
  long vectors = (count + LANES - 1) / LANES, parts = (MAXIMA * children + LANES - 1) / LANES, found = 0;
  if (parts > vectors) parts = vectors;
  for (long part = 0; part < parts; part++) {
    vfloat most = (vfloat){} - INFINITY;
    for (long vector = vectors * part / parts; vector < vectors * (part + 1) / parts; vector++) {
      long at = vector * LANES, left = count - at;
      vfloat v = left >= LANES ? load_float(x + at) : load_tail(x + at, left, -INFINITY);
      if (temperature != 1.0f) v /= temperature;
      if (log_e) v -= left >= LANES ? load_float(log_e + at) : load_tail(log_e + at, left, 0.0f);
      v *= inverse;
      v = pick(v > least, v, least);
      if (left < LANES)
        for (long lane = left; lane < LANES; lane++) v[lane] = -INFINITY;
      store_float(row + at, v);
      most = pick(v > most, v, most);
    }
    found = keep_lanes(best, found, children, most, lanes_of(most >= LEAST), 0);
  }
  return found == children ? best[children - 1].value : LEAST;
}

/* One row: the best `children` ids, best first, of equal ones the lowest; their log-probabilities and scores; the mean
 * score. `row` has room for whole vectors, `best` for the children. */
static void rank(const float *x, const float *log_e, float temperature, float inverse, long count, long children,
                 float *row, ranked *best, int32_t *ids, float *log_probabilities, float *scores, float *mean) {
  float least = scale(x, log_e, temperature, inverse, count, children, row, best);
  float top = best[0].value, far = top - NEGLIGIBLE;
  double total = 0.0, weighted = 0.0;
  long found = 0;
  for (long start = 0; start < count; start += BLOCK) {
    vfloat sum = {}, product = {};
    for (long at = start; at < count && at < start + BLOCK; at += LANES) {
      vfloat v = load_float(row + at);
      uint32_t reaching = lanes_of(v >= least);
      if (reaching) {
        found = keep_lanes(best, found, children, v, reaching, at);
        if (found == children && best[children - 1].value > least) least = best[children - 1].value;
      }
      if (!any_of(v >= far)) continue;
      vfloat weight = exp_within(pick(v > far, v - top, (vfloat){} - NEGLIGIBLE));
      sum += weight;
      product += weight * pick(v > far, v, (vfloat){} + far);
    }
    total += sum_lanes(sum), weighted += sum_lanes(product);
  }
  float log_total = (float)log(total);
  for (long child = 0; child < children; child++) {
    long id = ids[child] = best[child].id;
    float score = x[id];
    if (temperature != 1.0f) score /= temperature;
    if (log_e) score -= log_e[id];
    scores[child] = score;
    log_probabilities[child] = best[child].value - top - log_total;
  }
  *mean = (float)(weighted / total) / inverse;
}

/* What `ssd_rank` is given. */
typedef struct {
  const float *logits;
  long vocabulary;
  const float *temperatures, *table;
  const int64_t *lines;
  const int32_t *proposed;
  const uint64_t *seeds;
  const int64_t *positions;
  const float *scales;
  long children;
  int32_t *ids;
  float *log_probabilities, *scores, *means;
  atomic_int *failed;
} ranked_rows;

static void rank_rows(const void *work, long from, long to, pool_place *place) {
  const ranked_rows *r = work;
  long padded = rounded_up(r->vocabulary, GROUP > LANES ? GROUP : LANES);
  float *row = malloc(sizeof(float) * (size_t)padded);
  float *noise = malloc(sizeof(float) * (size_t)padded);
  ranked *best = malloc(sizeof(ranked) * (size_t)r->children);
  if (!row || !noise || !best) *r->failed = 1;
  for (long index = from; index < to && !*r->failed; index++) {
    const float *log_e = r->lines[index] ? r->table + r->lines[index] * r->vocabulary : NULL;
    if (log_e && r->proposed) {
      source from = {1, (uint32_t)r->positions[index], schedule_of(r->seeds[index])};
      for (long i = 0; i < r->vocabulary; i += GROUP)
        log_e_of(r->proposed + i, smaller(GROUP, r->vocabulary - i), &from, noise + i);
      log_e = noise;
    }
    float temperature = r->temperatures[index] > 0.0f ? r->temperatures[index] : 1.0f;
    long at = index * r->children;
    rank(r->logits + index * r->vocabulary, log_e, temperature, 1.0f / r->scales[index], r->vocabulary, r->children,
         row, best, r->ids + at, r->log_probabilities + at, r->scores + at, r->means + index);
    for (long child = at; r->proposed && child < at + r->children; child++) r->ids[child] = r->proposed[r->ids[child]];
  }
  free(row), free(noise), free(best);
}

/* All rows of logits [rows, vocabulary]; temperature 0 is as 1. Line `lines[row]` of `table` [lines, vocabulary] is the
 * row's log E; line 0: it has none. `proposed` [vocabulary] are the ids of the logits, if they are not 0, 1, 2, ...: then
 * there is no table, and a line that is not 0 stands for the noise of the row's seed and position. Results are [rows,
 * children], the mean scores [rows]. Returns 0 where memory is short. */
int ssd_rank(const float *logits, long rows, long vocabulary, const float *temperatures, const float *table,
             const int64_t *lines, const float *scales, long children, const int32_t *proposed, const uint64_t *seeds,
             const int64_t *positions, int32_t *ids, float *log_probabilities, float *scores, float *means,
             int threads) {
  atomic_int failed = 0;
  ranked_rows work = {logits, vocabulary, temperatures, table, lines,  proposed, seeds, positions,
                      scales, children,   ids,          log_probabilities, scores, means, &failed};
  POOL_RUN(rank_rows, work, rows, 1, threads);
  return !failed;
}
