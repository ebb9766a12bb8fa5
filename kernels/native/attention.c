/* Tree attention in float32 for CPUs: a few rows of queries over scattered slots of a KV cache.
 *
 * A task is a block of rows of one request under one KV head; the query heads of its group are stacked as rows,
 * so that a key is transposed and a value is read once for all of them. Scores of the whole context are kept,
 * then turned into weights of the values, block by block.
 *
 * A row's result depends on nothing but its query and the ordered keys and values that it sees: not on the
 * batch, on threads, on blocks or on entries between that it does not see. A score is a sum over head_dim in
 * order; the greatest score does not depend on order; weights are summed exactly (see `accumulate`); values are
 * added entry by entry, where an unseen one has the weight 0. Multiplications and additions are fused by the
 * compiler in the same way everywhere, or nowhere.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#ifdef __AVX512F__
#include <immintrin.h>
#define SCORE_VECTORS 2 /* registers: 24 sums, 2 of keys, 1 of queries */
#define SCORE_QUERIES 12
#define MIX_VECTORS 4 /* 24 sums, 4 of values, 1 of weights */
#define MIX_QUERIES 6
#else
#define SCORE_VECTORS 1
#define SCORE_QUERIES 4
#define MIX_VECTORS 1
#define MIX_QUERIES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define WIDE 16
#define BLOCK 32           /* entries of the context that are scored together: half a word of ancestry */
#define MOST_STACKED 64    /* queries of a task, unless one row has more */
#define MOST_SCORES 131072 /* of a task, if it has several rows: they stay in the second-level cache */
#define FEWEST_PRODUCTS 500000 /* below, starting threads takes longer than the work */

typedef float floats __attribute__((vector_size(64)));
typedef float half_floats __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef int32_t masks __attribute__((vector_size(64)));
typedef double doubles __attribute__((vector_size(64)));

/* `ssd_serve.kernels.batch.Batch`, with the sizes of the model; filled in by attention.py. */
typedef struct {
  long requests, heads, kv_heads, head_dim, slots, ancestry_words, threads;
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
  const float *queries, *keys, *values; /* queries of row 0 of the batch, keys and values of the head */
  long query_stride;
} task;

/* A thread's memory, in floats; every part is a whole number of vectors. */
typedef struct {
  float *queries, *keys, *zeros, *tails, *scores, *greatest, *sums, *out;
  int32_t *used; /* the numbers of the blocks that any row of the task sees */
} scratch;

INLINE floats load(const float *from) {
  floats value;
  memcpy(&value, from, sizeof value);
  return value;
}

INLINE void store(float *to, floats value) { memcpy(to, &value, sizeof value); }

INLINE floats splat(float x) { return (floats){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE floats choose(masks where, floats yes, floats no) {
  return (floats)(((masks)yes & where) | ((masks)no & ~where));
}

/* e^x for x <= 0 to about an ulp, exactly 0 below -87: 2^n times a Taylor series on [-ln 2 / 2, ln 2 / 2]. */
INLINE floats exponential(floats x) {
  const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, in the lowest bits */
  floats shifted = x * 1.44269504f + shift, n = shifted - shift;
  floats r = x - n * 0.693359375f; /* ln 2 in two parts, the first of few bits */
  r = r - n * -2.12194440e-4f;
  floats y = r * (1.0f / 5040) + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  words power = ((words)shifted << 23) + (127u << 23);
  return choose(x < -87.0f, (floats){0}, y * (floats)power);
}

/* Add 16 weights of at most 1 to 8 sums. Each is rounded to a multiple of 2^-36 first, so that sums up to 2^17
 * are exact and hence the same in any order. */
INLINE doubles accumulate(doubles sum, floats weights) {
  const double shift = 98304.0; /* 1.5 * 2^16 */
  half_floats halves[2];
  memcpy(halves, &weights, sizeof halves);
  for (int h = 0; h < 2; h++) sum += (__builtin_convertvector(halves[h], doubles) + shift) - shift;
  return sum;
}

INLINE long smaller(long a, long b) { return a < b ? a : b; }

INLINE long parts_of(long number, long most) { return (number + most - 1) / most; }

/* The size of the first of the fewest nearly equal parts of `number`, none larger than `most`. */
INLINE long part(long number, long most) {
  return number <= most ? number : parts_of(number, parts_of(number, most));
}

/* Call FUNCTION with its first argument, the number of queries, as a constant. */
#define CASE(NUMBER, FUNCTION, ...) \
  case NUMBER: FUNCTION(NUMBER, __VA_ARGS__); break;
#define SWITCH(NUMBER, FUNCTION, ...)                                                                       \
  switch (NUMBER) {                                                                                         \
    CASE(1, FUNCTION, __VA_ARGS__) CASE(2, FUNCTION, __VA_ARGS__) CASE(3, FUNCTION, __VA_ARGS__)            \
    CASE(4, FUNCTION, __VA_ARGS__) CASE(5, FUNCTION, __VA_ARGS__) CASE(6, FUNCTION, __VA_ARGS__)            \
    CASE(7, FUNCTION, __VA_ARGS__) CASE(8, FUNCTION, __VA_ARGS__) CASE(9, FUNCTION, __VA_ARGS__)            \
    CASE(10, FUNCTION, __VA_ARGS__) CASE(11, FUNCTION, __VA_ARGS__) CASE(12, FUNCTION, __VA_ARGS__)         \
  }

/* scores [Q, BLOCK] = queries [head_dim, Q] times keys [head_dim, BLOCK], for 16 * V entries. */
INLINE void score(const int Q, const int V, const float *queries, const float *keys, long head_dim,
                  float *scores) {
  if (Q > SCORE_QUERIES) return;
  floats sums[SCORE_QUERIES][SCORE_VECTORS];
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[q][v] = (floats){0};
  for (long d = 0; d < head_dim; d++, queries += Q, keys += BLOCK) {
    floats key[SCORE_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) key[v] = load(keys + v * WIDE);
#pragma GCC unroll 16
    for (int q = 0; q < Q; q++) {
      floats query = splat(queries[q]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[q][v] = query * key[v] + sums[q][v];
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(scores + q * BLOCK + v * WIDE, sums[q][v]);
}

/* out [Q, stride] += weights [Q, BLOCK] times `count` values, for 16 * V numbers of each value. */
INLINE void mix(const int Q, const int V, const float *weights, const float *const *values, long offset,
                long count, float *out, long stride) {
  if (Q > MIX_QUERIES) return;
  floats sums[MIX_QUERIES][MIX_VECTORS];
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[q][v] = load(out + q * stride + v * WIDE);
  for (long entry = 0; entry < count; entry++, weights++) {
    const float *at = values[entry] + offset;
    floats value[MIX_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) value[v] = load(at + v * WIDE);
#pragma GCC unroll 16
    for (int q = 0; q < Q; q++) {
      floats weight = splat(weights[q * BLOCK]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[q][v] = weight * value[v] + sums[q][v];
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(out + q * stride + v * WIDE, sums[q][v]);
}

static void score_tile(long tile, int vectors, const float *queries, const float *keys, long head_dim,
                       float *scores) {
  if (SCORE_VECTORS > 1 && vectors > 1) {
    SWITCH(tile, score, SCORE_VECTORS, queries, keys, head_dim, scores)
    return;
  }
  for (int v = 0; v < vectors; v++)
    SWITCH(tile, score, 1, queries, keys + v * WIDE, head_dim, scores + v * WIDE)
}

static void mix_tile(long tile, const float *weights, const float *const *values, long count, float *out,
                     long numbers, long stride) {
  long d = 0;
  for (; d + MIX_VECTORS * WIDE <= numbers; d += MIX_VECTORS * WIDE)
    SWITCH(tile, mix, MIX_VECTORS, weights, values, d, count, out + d, stride)
  for (; d < numbers; d += WIDE) SWITCH(tile, mix, 1, weights, values, d, count, out + d, stride)
}

#ifdef __AVX512F__
/* out [16, BLOCK], 16 columns of it, = the transpose of 16 rows of 16 numbers. */
INLINE void transpose(const float *const *rows, long offset, float *out) {
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    __m512 line[4]; /* line r: 4 numbers of each of the rows r, r + 4, r + 8, r + 12 */
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      __m512 value = _mm512_castps128_ps512(_mm_loadu_ps(rows[r] + offset + 4 * c));
      value = _mm512_insertf32x4(value, _mm_loadu_ps(rows[r + 4] + offset + 4 * c), 1);
      value = _mm512_insertf32x4(value, _mm_loadu_ps(rows[r + 8] + offset + 4 * c), 2);
      line[r] = _mm512_insertf32x4(value, _mm_loadu_ps(rows[r + 12] + offset + 4 * c), 3);
    }
    /* Quarter by quarter, the four lines are a square of 4 rows by 4 numbers. */
    __m512d low01 = (__m512d)_mm512_unpacklo_ps(line[0], line[1]);
    __m512d high01 = (__m512d)_mm512_unpackhi_ps(line[0], line[1]);
    __m512d low23 = (__m512d)_mm512_unpacklo_ps(line[2], line[3]);
    __m512d high23 = (__m512d)_mm512_unpackhi_ps(line[2], line[3]);
    _mm512_storeu_pd((double *)(out + (4 * c + 0) * BLOCK), _mm512_unpacklo_pd(low01, low23));
    _mm512_storeu_pd((double *)(out + (4 * c + 1) * BLOCK), _mm512_unpackhi_pd(low01, low23));
    _mm512_storeu_pd((double *)(out + (4 * c + 2) * BLOCK), _mm512_unpacklo_pd(high01, high23));
    _mm512_storeu_pd((double *)(out + (4 * c + 3) * BLOCK), _mm512_unpackhi_pd(high01, high23));
  }
}
#endif

/* keys [head_dim, BLOCK] = the transpose of 16 or 32 rows. */
static void transpose_block(const float *const *rows, int vectors, long head_dim, float *keys) {
  for (int v = 0; v < vectors; v++, rows += WIDE, keys += WIDE) {
    long d = 0;
#ifdef __AVX512F__
    for (; d + WIDE <= head_dim; d += WIDE) transpose(rows, d, keys + d * BLOCK);
#endif
    for (; d < head_dim; d++)
      for (int i = 0; i < WIDE; i++) keys[d * BLOCK + i] = rows[i][d];
  }
}

/* Where a block's keys or values lie. Returns their number. Those beyond it point to `missing`. */
static int block_rows(const task *t, long number, const float *heads, const float *missing, const float **rows) {
  int tree = number >= t->prefix_blocks;
  long start = (tree ? number - t->prefix_blocks : number) * BLOCK;
  const int32_t *slots = (tree ? t->tree_slots : t->prefix_slots) + start;
  int count = (int)smaller((tree ? t->tree : t->prefix) - start, BLOCK);
  for (int i = 0; i < count; i++) rows[i] = heads + slots[i] * t->b->head_dim;
  for (int i = count; i < BLOCK; i++) rows[i] = missing;
  return count;
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
static void mask_scores(const task *t, const uint32_t *bits, int vectors, float *scores, float *greatest) {
  const words lanes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  for (long row = 0; row < t->rows; row++)
    for (long head = 0; head < t->group; head++, scores += BLOCK, greatest += WIDE) {
      floats most = load(greatest);
      for (int v = 0; v < vectors; v++) {
        floats found = load(scores + v * WIDE);
        uint32_t half = bits[row] >> v * WIDE & 0xffff;
        if (half != 0xffff) {
          masks where = (lanes & half) != 0;
          found = choose(where, found, splat(-INFINITY));
          store(scores + v * WIDE, found);
        }
        most = choose(found > most, found, most);
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
    int vectors = block_rows(t, number, t->keys, s->zeros, rows) > WIDE ? 2 : 1;
    transpose_block(rows, vectors, head_dim, s->keys);
    float *scores = s->scores + used * t->stacked * BLOCK;
    for (long first = 0, tile; first < t->stacked; first += tile) {
      tile = part(t->stacked - first, SCORE_QUERIES);
      score_tile(tile, vectors, s->queries + first * head_dim, s->keys, head_dim, scores + first * BLOCK);
    }
    mask_scores(t, bits, vectors, scores, s->greatest);
    s->used[used++] = (int32_t)number;
  }
  return used;
}

/* Turn one block's scores into weights, and add them to each query's sum. */
static void weigh(const task *t, int vectors, const float *greatest, float *scores, float *sums) {
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
static void mix_block(const task *t, scratch *s, const float *weights, const float *const *rows, int count,
                      long width) {
  const float *tails[BLOCK];
  long whole = t->b->head_dim / WIDE * WIDE, rest = t->b->head_dim - whole;
  for (int i = 0; rest && i < count; i++) {
    tails[i] = s->tails + i * WIDE;
    memcpy(s->tails + i * WIDE, rows[i] + whole, rest * sizeof(float));
  }
  for (long first = 0, tile; first < t->stacked; first += tile) {
    tile = part(t->stacked - first, MIX_QUERIES);
    mix_tile(tile, weights + first * BLOCK, rows, count, s->out + first * width, whole, width);
    if (rest) mix_tile(tile, weights + first * BLOCK, tails, count, s->out + first * width + whole, WIDE, width);
  }
}

/* Divide by the sums and write the rows of `out` [rows of the batch, heads * head_dim], from this head's first. */
static void write_out(const task *t, const scratch *s, float *out, long width) {
  long head_dim = t->b->head_dim;
  for (long q = 0; q < t->stacked; q++) {
    double parts[8], sum = 0;
    memcpy(parts, s->sums + q * WIDE, sizeof parts);
    for (int i = 0; i < 8; i++) sum += parts[i];
    float divisor = sum > 0 ? (float)sum : 1.0f; /* a row that sees nothing gets zeros */
    float *to = out + ((t->row + q / t->group) * t->b->heads + q % t->group) * head_dim;
    for (long d = 0; d < head_dim; d++) to[d] = s->out[q * width + d] / divisor;
  }
}

static void run_task(const task *t, scratch *s, float *out) {
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
    int count = block_rows(t, s->used[i], t->values, s->zeros, rows);
    weigh(t, count > WIDE ? 2 : 1, s->greatest, scores, s->sums);
    mix_block(t, s, scores, rows, count, width);
  }
  write_out(t, s, out, width);
}

/* Lay out a thread's memory from `base`. Returns the floats it takes. */
static long lay_out(scratch *s, float *base, long stacked, long head_dim, long blocks) {
  long width = parts_of(head_dim, WIDE) * WIDE, at = 0;
#define PART(NAME, SIZE) (s->NAME = (void *)(base + at), at += parts_of(SIZE, WIDE) * WIDE)
  PART(queries, stacked * head_dim), PART(keys, BLOCK * width), PART(zeros, width), PART(tails, BLOCK * WIDE);
  PART(scores, stacked * blocks * BLOCK), PART(greatest, stacked * WIDE), PART(sums, stacked * WIDE);
  PART(out, stacked * width), PART(used, blocks);
#undef PART
  return at;
}

/* The part of a task that does not depend on rows and head. */
static task request_task(const batch *b, long request) {
  task t = {.b = b, .group = b->heads / b->kv_heads, .row = b->request_offsets[request]};
  t.prefix = b->prefix_offsets[request + 1] - b->prefix_offsets[request];
  t.tree = b->tree_offsets[request + 1] - b->tree_offsets[request];
  t.prefix_blocks = parts_of(t.prefix, BLOCK);
  t.blocks = t.prefix_blocks + parts_of(t.tree, BLOCK);
  t.prefix_slots = b->prefix_slots + b->prefix_offsets[request];
  t.tree_slots = b->tree_slots + b->tree_offsets[request];
  t.tree_positions = b->tree_positions + b->tree_offsets[request];
  long rows = b->request_offsets[request + 1] - t.row;
  long most = smaller(MOST_STACKED, MOST_SCORES / (t.blocks * BLOCK + 1)) / t.group;
  if (b->threads > 1) most = smaller(most, rows * b->requests * b->kv_heads / (2 * b->threads));
  t.rows = rows > 1 && most > 1 ? part(rows, most) : 1;
  t.stacked = t.rows * t.group;
  return t;
}

/* The floats that one thread needs as scratch memory. */
long ssd_attention_scratch(const batch *b) {
  scratch s;
  float base[1];
  long most = 0;
  for (long request = 0; request < b->requests; request++) {
    task t = request_task(b, request);
    long size = lay_out(&s, base, t.stacked, b->head_dim, t.blocks);
    most = size > most ? size : most;
  }
  return most;
}

/* out [rows, heads * head_dim] from queries (rows `query_stride` floats apart), and keys and values
 * [kv_heads, slots, head_dim] of one layer with a window (0: none). */
void ssd_attend(const batch *b, long window, const float *queries, long query_stride, const float *keys,
                const float *values, float *out) {
  long tasks = 0, products = 0;
  for (long request = 0; request < b->requests; request++) {
    task t = request_task(b, request);
    long rows = b->request_offsets[request + 1] - t.row;
    tasks += parts_of(rows, t.rows) * b->kv_heads;
    products += rows * (t.prefix + t.tree) * b->heads * b->head_dim;
  }
#pragma omp parallel num_threads(b->threads) if (b->threads > 1 && tasks > 1 && products > FEWEST_PRODUCTS)
  {
    long request = -1, first = 0, end = 0; /* the request of the last task, and the tasks of that request */
    task whole = {0};
    scratch s;
#pragma omp for schedule(monotonic : dynamic)
    for (long number = 0; number < tasks; number++) {
      while (number >= end) {
        whole = request_task(b, ++request);
        first = end;
        end += parts_of(b->request_offsets[request + 1] - whole.row, whole.rows) * b->kv_heads;
      }
      task t = whole;
      long blocks = (end - first) / b->kv_heads, head = (number - first) / blocks;
      long skipped = (number - first) % blocks * t.rows;
      t.row += skipped;
      t.rows = smaller(t.rows, b->request_offsets[request + 1] - t.row);
      t.stacked = t.rows * t.group;
      t.window = window;
      t.keys = keys + head * b->slots * b->head_dim;
      t.values = values + head * b->slots * b->head_dim;
      t.queries = queries + head * t.group * b->head_dim;
      t.query_stride = query_stride;
      lay_out(&s, b->scratch + THREAD * b->scratch_size, t.stacked, b->head_dim, t.blocks);
      run_task(&t, &s, out + head * t.group * b->head_dim);
    }
  }
}

/* Store rows of keys and values [2 * kv_heads, head_dim], `stride` floats apart, in slots of a layer's cache
 * [2 * kv_heads, slots, head_dim]. */
void ssd_store_keys_values(const batch *b, const float *rows, long stride, long count, const int64_t *slots,
                           float *cache) {
  for (long row = 0; row < count; row++)
    for (long head = 0; head < 2 * b->kv_heads; head++)
      memcpy(cache + (head * b->slots + slots[row]) * b->head_dim, rows + row * stride + head * b->head_dim,
             b->head_dim * sizeof(float));
}
