/* Choosing tokens: argmax of processed logits minus log E, as kernels/sampling.py and processors.py define it.
 *
 * Division and subtraction are single operations in float32, as in torch, so that plain rows choose the same
 * token bit for bit. Truncation never sorts a vocabulary: a threshold is found by partition, after a bound on it
 * has left few candidates. Noise is not looked up but computed on the way, its logarithms only where they could
 * matter: the words alone bound them. Every row is computed by itself.
 */
#include "noise.h"
#include "vector.h"

#include <math.h>
#include <stdlib.h>

#define MOST_MAXIMA 2 /* for each token that stays */
#define UNITS 0x1p50
#define CHAINS 4
#define TOGETHER 8

/* One request's rows: `whole` numbers and `real` ones, as laid out in choosing.py. */
enum { ROWS, FIRST, LOGITS, PROCESSED, TOKENS, COUNTS, KNOWN, TOP_K, TOP_P, DRAWN, SEED, POSITION, WHOLES };
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

/* What the noise of a row depends on; not drawn at temperature 0. */
typedef struct {
  int drawn;
  uint32_t position;
  schedule keys;
} source;

static inline v16 pick(i16 which, v16 yes, v16 no) { return (v16)(((i16)yes & which) | ((i16)no & ~which)); }

static inline v16 load_tail(const float *from, long count, float rest) {
  v16 v = (v16){} + rest;
  memcpy(&v, from, (size_t)count * sizeof *from);
  return v;
}

/* The lowest id of the largest x / temperature; NaN is never chosen, 0 is where nothing is above -inf.
 *
 * CHAINS searches at once: each must wait for its last comparison.
 */
static long largest(const float *x, float temperature, long count) {
  v16 most[CHAINS];
  i16 where[CHAINS] = {}, ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int chain = 0; chain < CHAINS; chain++) most[chain] = (v16){} - INFINITY;
  for (long at = 0; at < count; at += CHAINS * LANES) {
    int whole = at + CHAINS * LANES <= count;
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; chain++, ids += LANES) {
      long from = at + chain * LANES, left = count - from;
      v16 v = whole ? load_float(x + from) : load_tail(x + from, left > LANES ? LANES : left > 0 ? left : 0, -INFINITY);
      if (temperature != 1.0f) v /= temperature;
      i16 better = v > most[chain];
      most[chain] = pick(better, v, most[chain]);
      where[chain] = (ids & better) | (where[chain] & ~better);
    }
  }
  long found = 0;
  float value = -INFINITY;
  for (int chain = 0; chain < CHAINS; chain++)
    for (int lane = 0; lane < LANES; lane++) {
      float here = most[chain][lane];
      if (here > value || (here == value && where[chain][lane] < found)) value = here, found = where[chain][lane];
    }
  return found;
}

static inline v16 magnitude(v16 v) { return (v16)((i16)v & 0x7fffffff); }

static inline int any_of(i16 which) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)which, (__m512i)which) != 0;
#else
  int64_t parts[8];
  memcpy(parts, &which, sizeof parts);
  return (parts[0] | parts[1] | parts[2] | parts[3] | parts[4] | parts[5] | parts[6] | parts[7]) != 0;
#endif
}

/* A number that log E of each word does not fall below: E >= w, and log2(1 + m) >= m for a mantissa m. What float32
 * rounds away is far less than the 1e-4 taken off. */
static inline v16 least_log(u16 h) {
  i16 bits = (i16)__builtin_convertvector((i16)(h >> 1), v16);
  return __builtin_convertvector(bits, v16) * (0.6931472f * 0x1p-23f) - (158 * 0.6931472f + 1e-4f);
}

/* GROUP values from `first` on, -inf beyond the vocabulary; `room` holds them where they end there. */
static const float *group_at(const float *x, long first, long count, float *room) {
  if (first + GROUP <= count) return x + first;
  for (long index = 0; index < GROUP; index++) room[index] = first + index < count ? x[first + index] : -INFINITY;
  return room;
}

/* The best of a group of tokens by their exact scores: equal ones by the lowest id. */
static void best_of_group(const float *x, long first, float temperature, const source *noise, float *most,
                          long *found) {
  float scores[GROUP], log_e[GROUP];
  group(&noise->keys, noise->position, 0, (uint32_t)(first / 4), log_e);
  for (int index = 0; index < GROUP; index++) scores[index] = x[index] / temperature - log_e[index];
  for (int index = 0; index < GROUP; index++)
    if (scores[index] > *most || (scores[index] == *most && first + index < *found))
      *most = scores[index], *found = first + index;
}

/* For each row the lowest id of the largest x / temperature - log E; 0 where nothing is above -inf. The rows, at most
 * TOGETHER, share their noise.
 *
 * The search starts with the score of the largest x. Elsewhere quotients are bounded by products with 1 / temperature
 * and a little more: division would take longer.
 */
static void best_with_noise(const float *const *x, long rows, const source *noise, float temperature, long count,
                            long *found) {
  const words lanes = {0, 1, 2, 3, 4, 5, 6, 7};
  const float inverse = 1.0f / temperature, slack = inverse * 0x1p-20f;
  float room[GROUP], most[TOGETHER];
  for (long row = 0; row < rows; row++) {
    long first = (found[row] = largest(x[row], 1.0f, count)) / GROUP * GROUP;
    most[row] = -INFINITY;
    best_of_group(group_at(x[row], first, count, room), first, temperature, noise, &most[row], &found[row]);
  }
  for (long first = 0; first < count; first += GROUP) {
    words word[4];
    philox(lanes + (uint64_t)(first / 4), noise->position, 0, &noise->keys, word);
    words even = word[0] | word[1] << 32, odd = word[2] | word[3] << 32;
    v16 least_low = least_log((u16)SHUFFLE_WORDS(even, odd, 0, 8, 1, 9, 2, 10, 3, 11));
    v16 least_high = least_log((u16)SHUFFLE_WORDS(even, odd, 4, 12, 5, 13, 6, 14, 7, 15));
    for (long row = 0; row < rows; row++) {
      const float *values = group_at(x[row], first, count, room);
      v16 low = load_float(values), high = load_float(values + LANES);
      low = low * inverse + magnitude(low) * slack - least_low;
      high = high * inverse + magnitude(high) * slack - least_high;
      if (any_of((low >= most[row]) | (high >= most[row])))
        best_of_group(values, first, temperature, noise, &most[row], &found[row]);
    }
  }
  for (long row = 0; row < rows; row++)
    if (!(most[row] > -INFINITY)) found[row] = 0;
}

static long best(const float *x, const source *noise, float temperature, long count) {
  long found;
  if (!noise->drawn) return largest(x, temperature, count);
  best_with_noise(&x, 1, noise, temperature, count, &found);
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
  const i16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (long at = 0; at < work->padded; at += LANES) {
    v16 v = load_float(work->row + at);
    i16 stay = (v >= least) & (v > impossible);
    if (!any_of(stay)) continue;
#ifdef __AVX512F__
    __mmask16 mask = _mm512_test_epi32_mask((__m512i)stay, (__m512i)stay);
    _mm512_storeu_si512(work->ids + count, _mm512_maskz_compress_epi32(mask, (__m512i)(lanes + (int32_t)at)));
    count += __builtin_popcount(mask);
#else
    for (int lane = 0; lane < LANES; lane++) {
      work->ids[count] = (int32_t)at + lanes[lane];
      count -= stay[lane];
    }
#endif
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
  doubles total = {0};
  for (long index = 0; index < count; index += EIGHT) {
    floats values;
    float gathered[EIGHT];
    long here = count - index < EIGHT ? count - index : EIGHT;
    for (int lane = 0; lane < EIGHT; lane++) gathered[lane] = -INFINITY;
    for (int lane = 0; lane < here; lane++) gathered[lane] = work->row[work->ids[index + lane]];
    memcpy(&values, gathered, sizeof values);
    doubles weights = exponential(__builtin_convertvector(values, doubles) - (double)most);
    memcpy(work->weights + index, &weights, sizeof weights);
    total += weights;
  }
  double sum = 0.0;
  for (int lane = 0; lane < EIGHT; lane++) sum += total[lane];
  long left = 0;
  int64_t above;
  double lightest = smallest * sum * (1.0 - 0x1p-40); /* spares most divisions */
  for (long index = 0; index < count; index++) {
    if (work->weights[index] < lightest) continue;
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

/* Scores of up to 32 candidates: their own blocks' words, one of four each. */
static void add_noise(const int32_t *ids, long count, const source *noise, float *scores) {
  words word[4], chosen[4];
  floats log_e[4];
  for (int j = 0; j < 4; j++) {
    words id = {0};
    for (int lane = 0; lane < EIGHT; lane++) id[lane] = (uint64_t)ids[EIGHT * j + lane < count ? EIGHT * j + lane : 0];
    philox(id >> 2, noise->position, 0, &noise->keys, word);
    words in = id & 3;
    chosen[j] = (word[0] & (words)(in == 0)) | (word[1] & (words)(in == 1)) | (word[2] & (words)(in == 2)) |
                (word[3] & (words)(in == 3));
  }
  race(chosen, log_e);
  for (long index = 0; index < count; index++) scores[index] -= log_e[index / EIGHT][index % EIGHT];
}

/* Choose among the candidates, and write the processed logits where they are wanted. */
static long best_candidate(const scratch *work, long count, const source *noise, float *processed) {
  long found = 0;
  float most = -INFINITY, scores[GROUP];
  for (long start = 0; start < count; start += GROUP) {
    const int32_t *ids = work->ids + start;
    long here = count - start < GROUP ? count - start : GROUP;
    for (long index = 0; index < here; index++) scores[index] = work->row[ids[index]];
    if (noise->drawn) add_noise(ids, here, noise, scores);
    for (long index = 0; index < here; index++)
      if (scores[index] > most) most = scores[index], found = ids[index];
  }
  if (processed) {
    for (long id = 0; id < work->vocabulary; id++) processed[id] = -INFINITY;
    for (long index = 0; index < count; index++) processed[work->ids[index]] = work->row[work->ids[index]];
  }
  return found;
}

static int truncated(const int64_t *whole, const double *real) {
  return !isnan(real[LOG_MIN_P]) || whole[TOP_K] || whole[TOP_P];
}

static int penalised(const double *real) {
  return real[REPETITION] != 1.0 || real[FREQUENCY] != 0.0 || real[PRESENCE] != 0.0;
}

static long choose(const scratch *work, const int64_t *whole, const double *real, const float *logits,
                   const source *noise, const int64_t *path, long length, float *processed) {
  float temperature = (float)real[TEMPERATURE];
  int truncates = truncated(whole, real);
  copy(work, logits);
  if (penalised(real)) penalise(work, whole, real, path, length);
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

/* Rows of which only the temperature is asked: those at one position together, for they share their noise. */
static void choose_plain(const int64_t *whole, const double *real, long vocabulary, const int64_t *depths,
                         source *noise, int64_t *choices) {
  const float *logits = (const float *)whole[LOGITS], *rows[TOGETHER];
  long where[TOGETHER], found[TOGETHER];
  float temperature = (float)real[TEMPERATURE];
  for (long index = 0; index < whole[ROWS]; index++) choices[index] = -1;
  for (long index = 0; index < whole[ROWS]; index++) {
    if (choices[index] >= 0) continue;
    long count = 0;
    for (long other = index; other < whole[ROWS] && count < TOGETHER; other++)
      if (choices[other] < 0 && depths[other] == depths[index])
        where[count] = other, rows[count++] = logits + other * vocabulary;
    noise->position = (uint32_t)(whole[POSITION] + depths[index]);
    if (noise->drawn)
      best_with_noise(rows, count, noise, temperature, vocabulary, found);
    else
      for (long row = 0; row < count; row++) found[row] = largest(rows[row], temperature, vocabulary);
    for (long row = 0; row < count; row++) choices[where[row]] = found[row];
  }
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

/* One choice for each row of each request. `depths` [rows]: how far the row's position is beyond its request's.
 * `path_ends` [rows + 1] into `paths`: the tokens beyond the counted output. Returns 0 where memory is short. */
int ssd_choose(const int64_t *wholes, const double *reals, long requests, long vocabulary, const int64_t *depths,
               const int64_t *path_ends, const int64_t *paths, int64_t *choices, int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed) if (threads > 1 && requests > 1)
  {
    scratch work;
    failed |= !prepare(&work, vocabulary);
#pragma omp for schedule(dynamic)
    for (long request = 0; request < requests; request++) {
      const int64_t *whole = wholes + request * WHOLES;
      const double *real = reals + request * REALS;
      long first = whole[FIRST];
      source noise = {(int)whole[DRAWN], 0, schedule_of((uint64_t)whole[SEED])};
      if (!truncated(whole, real) && !penalised(real) && !whole[PROCESSED]) {
        choose_plain(whole, real, vocabulary, depths + first, &noise, choices + first);
        continue;
      }
      for (long index = 0; index < whole[ROWS] && !failed; index++) {
        const float *logits = (const float *)whole[LOGITS] + index * vocabulary;
        float *processed = whole[PROCESSED] ? (float *)whole[PROCESSED] + index * vocabulary : NULL;
        const int64_t *ends = path_ends + first + index;
        noise.position = (uint32_t)(whole[POSITION] + depths[first + index]);
        choices[first + index] =
            choose(&work, whole, real, logits, &noise, paths + ends[0], ends[1] - ends[0], processed);
      }
    }
    release(&work);
  }
  return !failed;
}
