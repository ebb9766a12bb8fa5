/* Choosing tokens: argmax of processed logits minus log E, as kernels/sampling.py and processors.py define it.
 *
 * Division and subtraction are single operations in float32, as in torch, so that plain rows choose the same
 * token bit for bit. Truncation never sorts a vocabulary: a threshold is found by partition, after a bound on it
 * has left few candidates. Every row is computed by itself.
 */
#include "doubles.h"
#include "vector.h"

#include <math.h>
#include <stdlib.h>

#define MOST_MAXIMA 4 /* for each token that stays: few candidates, and few maxima to select from */
#define UNITS 0x1p50

/* One request's rows: `whole` numbers and `real` ones, as laid out in choosing.py. */
enum { ROWS, FIRST, LOGITS, PROCESSED, TOKENS, COUNTS, KNOWN, TOP_K, TOP_P, WHOLES };
enum { TEMPERATURE, LOG_MIN_P, SMALLEST, REPETITION, FREQUENCY, PRESENCE, REALS };

typedef struct {
  float value;
  int64_t weight;
} weighted;

typedef struct {
  long vocabulary, padded;
  float *row;       /* [padded]: processed logits, -inf beyond the vocabulary */
  int32_t *times;   /* [vocabulary], -1: neither in the prompt nor in the output; restored after use */
  int32_t *ids;     /* [padded]: candidates, ascending */
  double *weights;  /* [padded + 8] */
  int64_t *units;   /* [padded] */
  weighted *sorted; /* [padded + 16] */
} scratch;

static inline v16 pick(i16 which, v16 yes, v16 no) { return (v16)(((i16)yes & which) | ((i16)no & ~which)); }

static inline v16 load_tail(const float *from, long count, float rest) {
  v16 v = (v16){} + rest;
  memcpy(&v, from, (size_t)count * sizeof *from);
  return v;
}

/* The lowest id of the largest x / temperature - noise; 0 where nothing is above -inf. NaN is never chosen. */
static long best(const float *x, const float *noise, float temperature, long count) {
  v16 most = (v16){} - INFINITY;
  i16 where = {}, ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (long at = 0; at < count; at += LANES, ids += LANES) {
    int whole = at + LANES <= count;
    v16 v = whole ? load_float(x + at) : load_tail(x + at, count - at, -INFINITY);
    if (temperature != 1.0f) v /= temperature;
    if (noise) v -= whole ? load_float(noise + at) : load_tail(noise + at, count - at, 0.0f);
    i16 better = v > most;
    most = pick(better, v, most);
    where = (ids & better) | (where & ~better);
  }
  long found = where[0];
  float value = most[0];
  for (int lane = 1; lane < LANES; lane++)
    if (most[lane] > value || (most[lane] == value && where[lane] < found)) value = most[lane], found = where[lane];
  return found;
}

/* The smallest value t such that what is larger weighs less than `target`; `above` is what that weighs.
 * -inf where everything weighs less. Reorders `items`. */
static float threshold(weighted *items, long count, int64_t target, int64_t *above) {
  int64_t larger = 0;
  uint64_t random = 0x9E3779B97F4A7C15ull;
  while (count > 0) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    float pivot = items[(random >> 33) % (uint64_t)count].value;
    long high = 0, middle = 0; /* [0, high) are larger, [high, middle) equal */
    int64_t high_weight = 0, equal_weight = 0;
    for (long at = 0; at < count; at++) {
      weighted item = items[at];
      if (item.value < pivot) continue;
      items[at] = items[middle];
      items[middle] = item;
      if (item.value == pivot) {
        equal_weight += item.weight;
      } else {
        items[middle] = items[high];
        items[high++] = item;
        high_weight += item.weight;
      }
      middle++;
    }
    if (larger + high_weight >= target) {
      count = high;
    } else if (larger + high_weight + equal_weight >= target) {
      *above = larger + high_weight;
      return pivot;
    } else {
      larger += high_weight + equal_weight;
      items += middle;
      count -= middle;
    }
  }
  *above = larger;
  return -INFINITY;
}

/* A number that at least `k` of the row's values reach, found from the maxima of groups of vectors. */
static float bound(const scratch *work, long k) {
  long vectors = work->padded / LANES, groups = (MOST_MAXIMA * k + LANES - 1) / LANES;
  if (groups > vectors) groups = vectors;
  if (groups * LANES < k) return -INFINITY;
  for (long group = 0; group < groups; group++) {
    v16 most = (v16){} - INFINITY;
    for (long at = vectors * group / groups; at < vectors * (group + 1) / groups; at++) {
      v16 v = load_float(work->row + at * LANES);
      most = pick(v > most, v, most);
    }
    for (int lane = 0; lane < LANES; lane++) work->sorted[group * LANES + lane] = (weighted){most[lane], 1};
  }
  int64_t above;
  return threshold(work->sorted, groups * LANES, k, &above);
}

/* Ids, ascending, of the values that are possible and at least `least`. */
static long candidates(const scratch *work, float least) {
  long count = 0;
  const v16 impossible = (v16){} - INFINITY;
  for (long at = 0; at < work->padded; at += LANES) {
    v16 v = load_float(work->row + at);
    i16 stay = (v >= least) & (v > impossible);
    int64_t any[8];
    memcpy(any, &stay, sizeof any);
    if (!(any[0] | any[1] | any[2] | any[3] | any[4] | any[5] | any[6] | any[7])) continue;
    for (int lane = 0; lane < LANES; lane++) {
      work->ids[count] = (int32_t)(at + lane);
      count -= stay[lane];
    }
  }
  return count;
}

/* Keep those above the threshold and, of those at it, the lowest ids until `target` is reached. */
static long keep(const scratch *work, long count, float at, int64_t above, int64_t target, const int64_t *weight) {
  long kept = 0;
  for (long index = 0; index < count; index++) {
    int32_t id = work->ids[index];
    float value = work->row[id];
    if (value < at) continue;
    if (value == at) {
      if (above >= target) continue;
      above += weight ? weight[index] : 1;
    }
    work->ids[kept++] = id;
  }
  return kept;
}

static long keep_top_k(const scratch *work, long count, long k) {
  int64_t above;
  for (long index = 0; index < count; index++) work->sorted[index] = (weighted){work->row[work->ids[index]], 1};
  float at = threshold(work->sorted, count, k, &above);
  return keep(work, count, at, above, k, NULL);
}

static long keep_top_p(const scratch *work, long count, float most, int64_t target, double smallest) {
  double sum = 0.0;
  for (long index = 0; index < count; index += EIGHT) {
    doubles x = {0};
    for (int lane = 0; lane < EIGHT; lane++) {
      long from = index + lane < count ? index + lane : index;
      x[lane] = (double)work->row[work->ids[from]] - most;
    }
    x = exponential(x);
    memcpy(work->weights + index, &x, sizeof x);
    for (int lane = 0; lane < EIGHT && index + lane < count; lane++) sum += x[lane];
  }
  long left = 0;
  int64_t above;
  for (long index = 0; index < count; index++) {
    double share = work->weights[index] / sum;
    if (share < smallest) continue;
    int32_t id = work->ids[left] = work->ids[index];
    work->units[left] = (int64_t)(share * UNITS);
    work->sorted[left] = (weighted){work->row[id], work->units[left]};
    left++;
  }
  float at = threshold(work->sorted, left, target, &above);
  return keep(work, left, at, above, target, work->units);
}

/* row = logits, a NaN being -inf. */
static void copy(const scratch *work, const float *logits) {
  const v16 impossible = (v16){} - INFINITY;
  for (long at = 0; at < work->padded; at += LANES) {
    long left = work->vocabulary - at;
    v16 v = left >= LANES ? load_float(logits + at) : load_tail(logits + at, left, -INFINITY);
    store_float(work->row + at, pick(v == v, v, impossible));
  }
}

static float divide(const scratch *work, float temperature) {
  v16 most = (v16){} - INFINITY;
  for (long at = 0; at < work->padded; at += LANES) {
    v16 v = load_float(work->row + at) / temperature;
    store_float(work->row + at, v);
    most = pick(v > most, v, most);
  }
  float value = most[0];
  for (int lane = 1; lane < LANES; lane++) value = most[lane] > value ? most[lane] : value;
  return value;
}

static inline void penalise_one(const scratch *work, long token, const double *real) {
  if (token < 0 || token >= work->vocabulary || work->times[token] < 0) return;
  float value = work->row[token], repetition = (float)real[REPETITION];
  int32_t times = work->times[token];
  if (repetition != 1.0f) value = value > 0.0f ? value / repetition : value * repetition;
  volatile float often = (float)real[FREQUENCY] * (float)times; /* rounded before it is subtracted */
  value -= often;
  if (times > 0) value -= (float)real[PRESENCE];
  work->row[token] = value;
  work->times[token] = -1;
}

static void penalise(const scratch *work, const int64_t *whole, const double *real, const int64_t *path, long length) {
  const int64_t *tokens = (const int64_t *)whole[TOKENS];
  const int32_t *counts = (const int32_t *)whole[COUNTS];
  for (long index = 0; index < whole[KNOWN]; index++)
    if (tokens[index] >= 0 && tokens[index] < work->vocabulary) work->times[tokens[index]] = counts[index];
  for (long index = 0; index < length; index++)
    if (path[index] >= 0 && path[index] < work->vocabulary)
      work->times[path[index]] = (work->times[path[index]] < 0 ? 0 : work->times[path[index]]) + 1;
  for (long index = 0; index < whole[KNOWN]; index++) penalise_one(work, tokens[index], real);
  for (long index = 0; index < length; index++) penalise_one(work, path[index], real);
}

/* Choose among the candidates, and write the processed logits where they are wanted. */
static long best_candidate(const scratch *work, long count, const float *noise, float *processed) {
  long found = 0;
  float most = -INFINITY;
  for (long index = 0; index < count; index++) {
    int32_t id = work->ids[index];
    float value = noise ? work->row[id] - noise[id] : work->row[id];
    if (value > most) most = value, found = id;
  }
  if (processed) {
    for (long id = 0; id < work->vocabulary; id++) processed[id] = -INFINITY;
    for (long index = 0; index < count; index++) processed[work->ids[index]] = work->row[work->ids[index]];
  }
  return found;
}

static long choose(const scratch *work, const int64_t *whole, const double *real, const float *logits,
                   const float *noise, const int64_t *path, long length, float *processed) {
  float temperature = (float)real[TEMPERATURE];
  int truncates = !isnan(real[LOG_MIN_P]) || whole[TOP_K] || whole[TOP_P];
  int penalises = real[REPETITION] != 1.0 || real[FREQUENCY] != 0.0 || real[PRESENCE] != 0.0;
  if (!truncates && !penalises && !processed) return best(logits, noise, temperature, work->vocabulary);
  copy(work, logits);
  if (penalises) penalise(work, whole, real, path, length);
  if (!truncates && !processed) return best(work->row, noise, temperature, work->vocabulary);
  float most = divide(work, temperature), least = -INFINITY;
  long k = whole[TOP_K];
  if (!isnan(real[LOG_MIN_P])) least = most + (float)real[LOG_MIN_P];
  if (k) {
    float reached = bound(work, k);
    least = reached > least ? reached : least;
  }
  long count = candidates(work, least);
  if (k) count = keep_top_k(work, count, k);
  if (whole[TOP_P]) count = isfinite(most) ? keep_top_p(work, count, most, whole[TOP_P], real[SMALLEST]) : 0;
  return best_candidate(work, count, noise, processed);
}

static int prepare(scratch *work, long vocabulary) {
  long padded = (vocabulary + LANES - 1) / LANES * LANES;
  *work = (scratch){vocabulary, padded, NULL, NULL, NULL, NULL, NULL, NULL};
  work->row = malloc(sizeof(float) * (size_t)padded);
  work->times = malloc(sizeof(int32_t) * (size_t)padded);
  work->ids = malloc(sizeof(int32_t) * (size_t)(padded + LANES));
  work->weights = malloc(sizeof(double) * (size_t)(padded + EIGHT));
  work->units = malloc(sizeof(int64_t) * (size_t)padded);
  work->sorted = malloc(sizeof(weighted) * (size_t)(padded + LANES));
  if (!work->row || !work->times || !work->ids || !work->weights || !work->units || !work->sorted) return 0;
  for (long token = 0; token < padded; token++) work->times[token] = -1;
  return 1;
}

static void release(scratch *work) {
  free(work->row), free(work->times), free(work->ids);
  free(work->weights), free(work->units), free(work->sorted);
}

/* One choice for each row of each request. `noise_at` [rows]: the row's line of the noise table, or -1;
 * `path_ends` [rows + 1] into `paths`: the tokens beyond the counted output. Returns 0 where memory is short. */
int ssd_choose(const int64_t *wholes, const double *reals, long requests, long vocabulary, const float *noise,
               const int64_t *noise_at, const int64_t *path_ends, const int64_t *paths, int64_t *choices,
               int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed) if (threads > 1 && requests > 1)
  {
    scratch work;
    failed |= !prepare(&work, vocabulary);
#pragma omp for schedule(dynamic)
    for (long request = 0; request < requests; request++) {
      const int64_t *whole = wholes + request * WHOLES;
      const double *real = reals + request * REALS;
      for (long index = 0; index < whole[ROWS] && !failed; index++) {
        long row = whole[FIRST] + index, start = path_ends ? path_ends[row] : 0;
        float *processed = (float *)whole[PROCESSED];
        choices[row] =
            choose(&work, whole, real, (const float *)whole[LOGITS] + index * vocabulary,
                   noise_at[row] < 0 ? NULL : noise + noise_at[row] * vocabulary, paths ? paths + start : NULL,
                   path_ends ? path_ends[row + 1] - start : 0, processed ? processed + index * vocabulary : NULL);
      }
    }
    release(&work);
  }
  return !failed;
}
