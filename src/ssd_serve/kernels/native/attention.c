/* Tree attention for CPUs, computed in float32: a few rows of queries over scattered slots of a KV cache in float32 or
 * bf16.
 *
 * A row's result depends on nothing but its query and the ordered keys and values that it sees: not on the batch, on
 * threads, on blocks or on entries between that it does not see (see attention_task.h).
 */
#include "attention_task.h"
#include "pool.h"

#define MOST_SCORES 131072     /* of a task, if it has several rows: they stay in the second-level cache */
#define PIECE_PRODUCTS 100000 /* of a piece of tasks: some tens of microseconds */

/* Lay out a thread's memory from `base`. Returns the floats it takes. */
static long lay_out(scratch *s, float *base, long stacked, long head_dim, long blocks) {
  long width = parts_of(head_dim, WIDE) * WIDE, at = 0;
#define PART(NAME, SIZE) (s->NAME = (void *)(base + at), at += parts_of(SIZE, WIDE) * WIDE)
  PART(queries, stacked * head_dim), PART(keys, BLOCK * width), PART(zeros, width), PART(tails, BLOCK * WIDE);
  PART(widened, BLOCK * width);
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

/* What `ssd_attend` is given. */
typedef struct {
  const batch *b;
  long window;
  const float *queries;
  long query_stride;
  const char *keys, *values;
  float *out, *lse;
} layer;

static void attend_tasks(const void *work, long from, long to, pool_place *place) {
  const layer *l = work;
  const batch *b = l->b;
  long request = -1, first = 0, end = 0; /* the request of the last task, and the tasks of that request */
  task whole = {0};
  scratch s;
  for (long number = from; number < to; number++) {
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
    t.window = l->window;
    t.keys = l->keys + head * b->slots * b->head_dim * b->kv_bytes;
    t.values = l->values + head * b->slots * b->head_dim * b->kv_bytes;
    t.queries = l->queries + head * t.group * b->head_dim;
    t.query_stride = l->query_stride;
    lay_out(&s, b->scratch + place->thread * b->scratch_size, t.stacked, b->head_dim, t.blocks);
    run_task(&t, &s, l->out + head * t.group * b->head_dim, l->lse ? l->lse + head * t.group : NULL);
  }
}

/* out [rows, heads * head_dim] and, unless it is NULL, lse [rows, heads] from queries (rows `query_stride` floats
 * apart), and keys and values [kv_heads, slots, head_dim] of one layer with a window (0: none). */
void ssd_attend(const batch *b, long window, const float *queries, long query_stride, const char *keys,
                const char *values, float *out, float *lse) {
  long tasks = 0, products = 0;
  for (long request = 0; request < b->requests; request++) {
    task t = request_task(b, request);
    long rows = b->request_offsets[request + 1] - t.row;
    tasks += parts_of(rows, t.rows) * b->kv_heads;
    products += rows * (t.prefix + t.tree) * b->heads * b->head_dim;
  }
  layer work = {b, window, queries, query_stride, keys, values, out, lse};
  POOL_RUN(attend_tasks, work, tasks, parts_of(tasks * PIECE_PRODUCTS, products + 1), b->threads);
}

/* Store rows of keys and values [2 * kv_heads, head_dim], `stride` floats apart, in slots of a layer's cache
 * [2 * kv_heads, slots, head_dim]. */
void ssd_store_keys_values(const batch *b, const float *rows, long stride, long count, const int64_t *slots,
                           char *cache) {
  long head_dim = b->head_dim;
  for (long row = 0; row < count; row++)
    for (long head = 0; head < 2 * b->kv_heads; head++) {
      const float *from = rows + row * stride + head * head_dim;
      char *to = cache + (head * b->slots + slots[row]) * head_dim * b->kv_bytes;
      if (b->kv_bytes == sizeof(float))
        memcpy(to, from, head_dim * sizeof(float));
      else
        for (long d = 0; d < head_dim; d++) ((uint16_t *)to)[d] = narrow_bf16(from[d]);
    }
}
