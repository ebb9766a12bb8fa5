/* One task of attention: a block of rows of one request under one KV head. The query heads of its group are stacked
 * as rows, so that a key is transposed and a value is read once for all of them. Scores of the whole context are
 * kept, then turned into weights of the values, block by block.
 *
 * A score is a sum over head_dim in order; the greatest score does not depend on order; weights are summed exactly
 * (see `accumulate`); values are added entry by entry, where an unseen one has the weight 0. Multiplications and
 * additions are fused by the compiler in the same way everywhere, or nowhere.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "attention_tiles.h"

#define MOST_STACKED 64 /* queries of a task, unless one row has more */

/* `ssd_serve.kernels.batch.Batch`, with the sizes of the model; filled in by attention.py. */
typedef struct {
  long requests, heads, kv_heads, head_dim, slots, ancestry_words, threads, kv_bytes; /* of a number in the cache */
  const int64_t *positions;
  const int32_t *request_offsets, *prefix_slots, *prefix_offsets, *tree_slots, *tree_offsets;
  const int64_t *tree_positions;
  const uint64_t *ancestry;
  float *scratch;
  long scratch_size; /* floats for one thread, from `ssd_attention_scratch` */
} batch;

/* One task: rows `row` to `row + rows` of a request, under one KV head. */
typedef struct {
  const batch *b;
  long row, rows, group, stacked, window;
  long prefix, tree, prefix_blocks, blocks; /* entries and blocks of the request's context */
  const int32_t *prefix_slots, *tree_slots;
  const int64_t *tree_positions;
  const float *queries; /* of row 0 of the batch */
  const char *keys, *values; /* of the head */
  long query_stride;
} task;

/* A thread's memory, in floats; every part is a whole number of vectors. */
typedef struct {
  float *queries, *keys, *zeros, *tails, *widened, *scores, *greatest, *sums, *out;
  int32_t *used; /* the numbers of the blocks that any row of the task sees */
} scratch;

/* keys [head_dim, BLOCK], the first `columns` of it, = the transpose of so many rows, a multiple of 16. */
static void transpose_block(const float *const *rows, long columns, long head_dim, float *keys) {
  long d = 0;
#ifdef SQUARE
  for (; d + SQUARE <= head_dim; d += SQUARE)
    for (long i = 0; i < columns; i += SQUARE) transpose(rows + i, d, keys + d * BLOCK + i);
#endif
  for (; d < head_dim; d++)
    for (long i = 0; i < columns; i++) keys[d * BLOCK + i] = rows[i][d];
}

/* Where a block's keys or values lie. Returns their number. Those beyond it point to `missing`. */
static int block_rows(const task *t, long number, const char *heads, const void *missing, const float **rows) {
  int tree = number >= t->prefix_blocks;
  long start = (tree ? number - t->prefix_blocks : number) * BLOCK;
  const int32_t *slots = (tree ? t->tree_slots : t->prefix_slots) + start;
  int count = (int)smaller((tree ? t->tree : t->prefix) - start, BLOCK);
  long size = t->b->head_dim * t->b->kv_bytes;
  for (int i = 0; i < count; i++) rows[i] = (const float *)(heads + slots[i] * size);
  for (int i = count; i < BLOCK; i++) rows[i] = missing;
  return count;
}

/* `block_rows` as floats: rows in bf16 are widened, which is exact. */
static int float_rows(const task *t, long number, const char *heads, const scratch *s, const float **rows) {
  int count = block_rows(t, number, heads, s->zeros, rows);
  long head_dim = t->b->head_dim, width = parts_of(head_dim, WIDE) * WIDE;
  for (int i = 0; t->b->kv_bytes == 2 && i < count; i++) {
    const uint16_t *from = (const uint16_t *)rows[i];
    float *to = s->widened + i * width;
    long d = 0;
    for (; d + WIDE <= head_dim; d += WIDE) store(to + d, load_bf16(from + d));
    for (; d < head_dim; d++) to[d] = widen_bf16(from[d]);
    rows[i] = to;
  }
  return count;
}

/* What to ask for of block `number` while tiles of at most `tile` queries are at work. */
static ahead ahead_of(const task *t, long number, const char *heads, long tile) {
  ahead next = {.left = parts_of(t->b->head_dim * t->b->kv_bytes, LINE * (long)sizeof(float))};
  next.lines = parts_of(next.left, parts_of(t->stacked, tile));
  block_rows(t, number, heads, heads, next.rows);
  return next;
}

/* Bit i: the row sees entry i of a block. */
static uint32_t seen(const task *t, long row, long number) {
  long oldest = t->window ? t->b->positions[row] - t->window : -1; /* the last position out of the window */
  if (number < t->prefix_blocks) {
    long start = number * BLOCK, count = smaller(t->prefix - start, BLOCK), hidden = oldest + 1 - start;
    uint32_t bits = UINT32_MAX >> (BLOCK - count);
    return hidden <= 0 ? bits : hidden >= BLOCK ? 0 : bits & UINT32_MAX << hidden;
  }
  long start = (number - t->prefix_blocks) * BLOCK;
  uint32_t bits = (uint32_t)(t->b->ancestry[row * t->b->ancestry_words + start / 64] >> start % 64);
  if (t->window)
    for (int i = 0; i < BLOCK && start + i < t->tree; i++)
      if (t->tree_positions[start + i] <= oldest) bits &= ~((uint32_t)1 << i);
  return bits;
}

/* Tiles of queries [tiles][head_dim, queries of the tile], scaled. */
static void pack_queries(const task *t, float *packed) {
  long head_dim = t->b->head_dim;
  float scale = 1.0f / sqrtf((float)head_dim);
  for (long first = 0, tile; first < t->stacked; first += tile) {
    tile = part(t->stacked - first, SCORE_QUERIES);
    for (long q = 0; q < tile; q++) {
      long row = t->row + (first + q) / t->group, head = (first + q) % t->group;
      const float *query = t->queries + row * t->query_stride + head * head_dim;
      for (long d = 0; d < head_dim; d++) packed[d * tile + q] = query[d] * scale;
    }
    packed += head_dim * tile;
  }
}

/* Scores that a row does not see become -infinity; remember each query's greatest. */
static void mask_scores(const task *t, const uint32_t *bits, long vectors, float *scores, float *greatest) {
  static const uint32_t powers[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                      256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  const uint32_t all = UINT32_MAX >> (32 - WIDE);
  words lanes;
  memcpy(&lanes, powers, sizeof lanes);
  for (long row = 0; row < t->rows; row++)
    for (long head = 0; head < t->group; head++, scores += BLOCK, greatest += WIDE) {
      floats most = load(greatest);
      for (int v = 0; v < vectors; v++) {
        floats found = load(scores + v * WIDE);
        uint32_t some = bits[row] >> v * WIDE & all;
        if (some != all) {
          masks where = (lanes & some) != 0;
          found = choose(where, found, splat(-INFINITY));
          store(scores + v * WIDE, found);
        }
        most = greater(found, most);
      }
      store(greatest, most);
    }
}

/* All scores of a task, block by block. Returns the number of blocks that any of its rows sees. */
static long score_blocks(const task *t, scratch *s) {
  const float *rows[BLOCK];
  uint32_t bits[MOST_STACKED];
  long head_dim = t->b->head_dim, used = 0;
  for (long number = 0; number < t->blocks; number++) {
    uint32_t any = 0;
    for (long row = 0; row < t->rows; row++) any |= bits[row] = seen(t, t->row + row, number);
    if (!any) continue;
    long columns = float_rows(t, number, t->keys, s, rows) > BLOCK / 2 ? BLOCK : BLOCK / 2;
    transpose_block(rows, columns, head_dim, s->keys);
    float *scores = s->scores + used * t->stacked * BLOCK;
    ahead next = ahead_of(t, smaller(number + 1, t->blocks - 1), t->keys, SCORE_QUERIES);
    for (long first = 0, tile; first < t->stacked; first += tile) {
      tile = part(t->stacked - first, SCORE_QUERIES);
      const float *queries = s->queries + first * head_dim;
      score_tile(tile, columns / WIDE, queries, s->keys, head_dim, scores + first * BLOCK, &next);
      advance(&next);
    }
    mask_scores(t, bits, columns / WIDE, scores, s->greatest);
    s->used[used++] = (int32_t)number;
  }
  return used;
}

/* Turn one block's scores into weights, and add them to each query's sum. */
static void weigh(const task *t, long vectors, const float *greatest, float *scores, float *sums) {
  for (long q = 0; q < t->stacked; q++, scores += BLOCK, sums += WIDE) {
    doubles sum;
    memcpy(&sum, sums, sizeof sum);
    for (int v = 0; v < vectors; v++) {
      floats weights = exponential(load(scores + v * WIDE) - splat(greatest[q * WIDE]));
      store(scores + v * WIDE, weights);
      sum = accumulate(sum, weights);
    }
    memcpy(sums, &sum, sizeof sum);
  }
}

/* Add one block's weighted values to the output of all queries. */
static void mix_block(const task *t, scratch *s, const float *scores, const float *const *rows, int count,
                      long width, ahead *next) {
  const float *tails[BLOCK];
  long whole = t->b->head_dim / WIDE * WIDE, rest = t->b->head_dim - whole;
  for (int i = 0; rest && i < count; i++) {
    tails[i] = s->tails + i * WIDE;
    memcpy(s->tails + i * WIDE, rows[i] + whole, rest * sizeof(float));
  }
  for (long first = 0, tile; first < t->stacked; first += tile) {
    tile = part(t->stacked - first, MIX_QUERIES);
    const float *weights = scores + first * BLOCK;
    float *out = s->out + first * width;
    mix_tile(tile, weights, rows, count, out, whole, width, next);
    if (rest) mix_tile(tile, weights, tails, count, out + whole, WIDE, width, next);
    advance(next);
  }
}

/* Divide by the sums and write the rows of `out` [rows of the batch, heads * head_dim] and, unless it is NULL, of
 * `lse` [rows of the batch, heads], both from this head's first. */
static void write_out(const task *t, const scratch *s, float *out, float *lse, long width) {
  long head_dim = t->b->head_dim;
  for (long q = 0; q < t->stacked; q++) {
    double parts[WIDE / 2], sum = 0;
    memcpy(parts, s->sums + q * WIDE, sizeof parts);
    for (int i = 0; i < WIDE / 2; i++) sum += parts[i];
    float divisor = sum > 0 ? (float)sum : 1.0f; /* a row that sees nothing gets zeros */
    long place = (t->row + q / t->group) * t->b->heads + q % t->group;
    float *to = out + place * head_dim;
    if (lse) lse[place] = sum > 0 ? (float)(log(sum) + s->greatest[q * WIDE]) : -INFINITY;
    for (long d = 0; d < head_dim; d++) to[d] = s->out[q * width + d] / divisor;
  }
}

static void run_task(const task *t, scratch *s, float *out, float *lse) {
  const float *rows[BLOCK];
  long width = parts_of(t->b->head_dim, WIDE) * WIDE;
  memset(s->zeros, 0, width * sizeof(float));
  memset(s->tails, 0, BLOCK * WIDE * sizeof(float));
  memset(s->sums, 0, t->stacked * WIDE * sizeof(float));
  memset(s->out, 0, t->stacked * width * sizeof(float));
  for (long i = 0; i < t->stacked * WIDE; i++) s->greatest[i] = -INFINITY;
  pack_queries(t, s->queries);
  long used = score_blocks(t, s);
  for (long q = 0; q < t->stacked; q++) {
    float most = -INFINITY;
    for (int i = 0; i < WIDE; i++) most = s->greatest[q * WIDE + i] > most ? s->greatest[q * WIDE + i] : most;
    s->greatest[q * WIDE] = most == -INFINITY ? 0 : most; /* infinity less infinity is no number */
  }
  for (long i = 0; i < used; i++) {
    float *scores = s->scores + i * t->stacked * BLOCK;
    int count = float_rows(t, s->used[i], t->values, s, rows);
    weigh(t, (count > BLOCK / 2 ? BLOCK : BLOCK / 2) / WIDE, s->greatest, scores, s->sums);
    ahead next = ahead_of(t, s->used[smaller(i + 1, used - 1)], t->values, MIX_QUERIES);
    mix_block(t, s, scores, rows, count, width, &next);
  }
  write_out(t, s, out, lse, width);
}
