/* Choosing tokens: argmax of processed logits minus log E, as sampling/choice.py and processors.py define it.
 *
 * Division and subtraction are single operations in float32, as in torch, so that plain rows choose the same
 * token bit for bit. Every row is computed by itself.
 */
#include "pool.h"
#include "searching.h"
#include "truncating.h"

#include <stdatomic.h>
#include <stdlib.h>

/* One request's rows: `whole` numbers and `real` ones, as laid out in choosing.py. */
enum { ROWS, FIRST, LOGITS, PROCESSED, TOKENS, COUNTS, KNOWN, TOP_K, TOP_P, DRAWN, SEED, POSITION, WHOLES };
enum { TEMPERATURE, LOG_MIN_P, SMALLEST, REPETITION, FREQUENCY, PRESENCE, REALS };

/* row = logits, a NaN being -inf. */
static void copy(const scratch *work, const float *logits) {
  const vfloat impossible = (vfloat){} - INFINITY;
  for (long at = 0; at < work->padded; at += LANES) {
    long left = work->vocabulary - at;
    vfloat v = left >= LANES ? load_float(logits + at) : load_tail(logits + at, left, -INFINITY);
    store_float(work->row + at, pick(v == v, v, impossible));
  }
}

static float divide(const scratch *work, float temperature) {
  vfloat most = (vfloat){} - INFINITY;
  for (long at = 0; at < work->padded; at += LANES) {
    vfloat v = load_float(work->row + at) / temperature;
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

static void add_noise(const int32_t *ids, long count, const source *noise, float *scores) {
  float log_e[GROUP];
  log_e_of(ids, count, noise, log_e);
  for (long index = 0; index < count; index++) scores[index] -= log_e[index];
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

/* The row below row `at` of a request whose token was chosen there; `rows` where there is none. */
static long chosen_child(const int64_t *tokens, const int64_t *parents, long rows, long at, int64_t choice) {
  for (long row = at + 1; row < rows; row++)
    if (parents[row] + 1 == at && tokens[row] == choice) return row;
  return rows;
}

static int prepare(scratch *work, long vocabulary) {
  long padded = (vocabulary + LANES - 1) / LANES * LANES;
  *work = (scratch){vocabulary, padded, NULL, NULL, NULL, NULL, NULL, NULL};
  work->row = malloc(sizeof(float) * (size_t)padded);
  work->times = malloc(sizeof(int32_t) * (size_t)padded);
  work->ids = malloc(sizeof(int32_t) * (size_t)(padded + LANES));
  work->weights = malloc(sizeof(double) * (size_t)(padded + WORDS));
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

/* What `ssd_choose` is given. */
typedef struct {
  const int64_t *wholes;
  const double *reals;
  long vocabulary;
  const int64_t *depths, *path_ends, *paths, *tokens, *parents;
  int64_t *choices;
  atomic_int *failed;
} chosen_rows;

static void choose_requests(const void *given, long from, long to, pool_place *place) {
  const chosen_rows *c = given;
  const int64_t *tokens = c->tokens;
  scratch work;
  if (!prepare(&work, c->vocabulary)) *c->failed = 1;
  for (long request = from; request < to && !*c->failed; request++) {
    const int64_t *whole = c->wholes + request * WHOLES;
    const double *real = c->reals + request * REALS;
    long first = whole[FIRST];
    source noise = {(int)whole[DRAWN], 0, schedule_of((uint64_t)whole[SEED])};
    int plain = !truncated(whole, real) && !penalised(real) && !whole[PROCESSED];
    if (plain && !tokens) {
      choose_plain(whole, real, c->vocabulary, c->depths + first, &noise, c->choices + first);
      continue;
    }
    for (long index = 0; index < whole[ROWS];) {
      const float *logits = (const float *)whole[LOGITS] + index * c->vocabulary;
      float *processed = whole[PROCESSED] ? (float *)whole[PROCESSED] + index * c->vocabulary : NULL;
      const int64_t *ends = c->path_ends + first + index;
      noise.position = (uint32_t)(whole[POSITION] + c->depths[first + index]);
      c->choices[first + index] =
          plain ? best(logits, &noise, (float)real[TEMPERATURE], c->vocabulary)
                : choose(&work, whole, real, logits, &noise, c->paths + ends[0], ends[1] - ends[0], processed);
      index = tokens
                  ? chosen_child(tokens + first, c->parents + first, whole[ROWS], index, c->choices[first + index])
                  : index + 1;
    }
  }
  release(&work);
}

/* One choice for each row of each request. `depths` [rows]: how far the row's position is beyond its request's.
 * `path_ends` [rows + 1] into `paths`: the tokens beyond the counted output. Where there are `tokens` [rows] and
 * `parents` [rows] (-1: the request's first row, 0: its second), only the first row chooses, and each whose token was
 * chosen at its parent. The others keep what stands in `choices` [rows], which is -1. Returns 0 where memory is short.
 */
int ssd_choose(const int64_t *wholes, const double *reals, long requests, long vocabulary, const int64_t *depths,
               const int64_t *path_ends, const int64_t *paths, const int64_t *tokens, const int64_t *parents,
               int64_t *choices, int threads) {
  atomic_int failed = 0;
  chosen_rows work = {wholes, reals, vocabulary, depths, path_ends, paths, tokens, parents, choices, &failed};
  POOL_RUN(choose_requests, work, requests, parts_of(requests, threads), threads);
  return !failed;
}
