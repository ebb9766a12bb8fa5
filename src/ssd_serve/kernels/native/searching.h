/* The best token of whole rows: of x / temperature, or of x / temperature - log E. Noise is not looked up but computed
 * on the way, its logarithms only where they could matter: the words alone bound them.
 */
#include "noise.h"
#include "vector.h"

#include <math.h>

#define CHAINS 4
#define TOGETHER 8

/* What the noise of a row depends on; not drawn at temperature 0. */
typedef struct {
  int drawn;
  uint32_t position;
  schedule keys;
} source;

/* log E [GROUP] of up to GROUP tokens: their own blocks' words, one of four each. */
static inline void log_e_of(const int32_t *ids, long count, const source *noise, float *log_e) {
  words word[4], chosen[4];
  for (int j = 0; j < 4; j++) {
    words id = {0};
    for (int lane = 0; lane < WORDS; lane++) id[lane] = (uint64_t)ids[WORDS * j + lane < count ? WORDS * j + lane : 0];
    philox(id >> 2, noise->position, 0, &noise->keys, word);
    words in = id & 3;
    chosen[j] = (word[0] & (words)(in == 0)) | (word[1] & (words)(in == 1)) | (word[2] & (words)(in == 2)) |
                (word[3] & (words)(in == 3));
  }
  floats found[4];
  race(chosen, found);
  memcpy(log_e, found, sizeof found);
}

static inline vfloat pick(vint which, vfloat yes, vfloat no) { return (vfloat)(((vint)yes & which) | ((vint)no & ~which)); }

static inline vfloat load_tail(const float *from, long count, float rest) {
  vfloat v = (vfloat){} + rest;
  memcpy(&v, from, (size_t)count * sizeof *from);
  return v;
}

/* The lowest id of the largest x / temperature; NaN is never chosen, 0 is where nothing is above -inf.
 *
 * CHAINS searches at once: each must wait for its last comparison.
 */
static long largest(const float *x, float temperature, long count) {
  vfloat most[CHAINS];
  vint where[CHAINS] = {}, ids = lane_numbers();
  for (int chain = 0; chain < CHAINS; chain++) most[chain] = (vfloat){} - INFINITY;
  for (long at = 0; at < count; at += CHAINS * LANES) {
    int whole = at + CHAINS * LANES <= count;
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; chain++, ids += LANES) {
      long from = at + chain * LANES, left = count - from;
      vfloat v = whole ? load_float(x + from) : load_tail(x + from, left > LANES ? LANES : left > 0 ? left : 0, -INFINITY);
      if (temperature != 1.0f) v /= temperature;
      vint better = v > most[chain];
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

static inline vfloat magnitude(vfloat v) { return (vfloat)((vint)v & 0x7fffffff); }

static inline int any_of(vint which) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)which, (__m512i)which) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)which) != 0;
#else
  int64_t parts[LANES / 2];
  memcpy(parts, &which, sizeof parts);
  return (parts[0] | parts[1] | parts[2] | parts[3]) != 0;
#endif
}

/* Bit j: whether lane j is set. */
static inline uint32_t lanes_of(vint which) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)which, (__m512i)which);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)which);
#else
  uint32_t bits = 0;
  if (any_of(which))
    for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(which[lane] & 1) << lane;
  return bits;
#endif
}

/* A number that log E of each word does not fall below: E >= w, and log2(1 + m) >= m for a mantissa m. What float32
 * rounds away is far less than the 1e-4 taken off. */
static inline vfloat least_log(vuint h) {
  vint bits = (vint)__builtin_convertvector((vint)(h >> 1), vfloat);
  return __builtin_convertvector(bits, vfloat) * (0.6931472f * 0x1p-23f) - (158 * 0.6931472f + 1e-4f);
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
  words lanes = {0};
  for (int lane = 0; lane < WORDS; lane++) lanes[lane] = (uint64_t)lane;
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
#ifdef __AVX512F__
    vfloat least_low = least_log((vuint)SHUFFLE_WORDS(even, odd, 0, 8, 1, 9, 2, 10, 3, 11));
    vfloat least_high = least_log((vuint)SHUFFLE_WORDS(even, odd, 4, 12, 5, 13, 6, 14, 7, 15));
#else
    vfloat least_low = least_log((vuint)SHUFFLE_WORDS(even, odd, 0, 4, 1, 5));
    vfloat least_high = least_log((vuint)SHUFFLE_WORDS(even, odd, 2, 6, 3, 7));
#endif
    for (long row = 0; row < rows; row++) {
      const float *values = group_at(x[row], first, count, room);
      vfloat low = load_float(values), high = load_float(values + LANES);
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
