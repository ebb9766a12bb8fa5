/* Top-k, top-p and min-p of one row. A vocabulary is never sorted: a threshold is found by partition, after a bound on
 * it has left few candidates. `searching.h` comes first.
 */
#define MOST_MAXIMA 2 /* for each token that stays */
#define UNITS 0x1p50

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
    vfloat most = (vfloat){} - INFINITY;
    for (long at = vectors * group / groups; at < vectors * (group + 1) / groups; at++) {
      vfloat v = load_float(work->row + at * LANES);
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
  const vfloat impossible = (vfloat){} - INFINITY;
  const vint lanes = lane_numbers();
  for (long at = 0; at < work->padded; at += LANES) {
    vfloat v = load_float(work->row + at);
    vint stay = (v >= least) & (v > impossible);
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
  for (long index = 0; index < count; index += WORDS) {
    floats values;
    float gathered[WORDS];
    long here = count - index < WORDS ? count - index : WORDS;
    for (int lane = 0; lane < WORDS; lane++) gathered[lane] = -INFINITY;
    for (int lane = 0; lane < here; lane++) gathered[lane] = work->row[work->ids[index + lane]];
    memcpy(&values, gathered, sizeof values);
    doubles weights = exponential(__builtin_convertvector(values, doubles) - (double)most);
    memcpy(work->weights + index, &weights, sizeof weights);
    total += weights;
  }
  double sum = 0.0;
  for (int lane = 0; lane < WORDS; lane++) sum += total[lane];
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
