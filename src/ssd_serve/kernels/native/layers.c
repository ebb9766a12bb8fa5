/* Layers of a dense decoder whose matrices are packed, in one call: from Python each layer is a dozen calls, which take
 * as long as the products of a single row. Every step is the kernel that Python calls otherwise, with the same bits. */
#include <stdint.h>
#include <stdlib.h>

#include "parts.h"
#include "vector.h"

/* Some outputs of a product, from `start` on; see `ssd_multiply_packed`. */
typedef struct {
  long kind;
  const uint8_t *packed;
  const float *bias;
  long start, outputs;
} packed_part;

typedef struct {
  const packed_part *parts;
  long count, inputs, outputs;
} packed_matrix;

typedef struct {
  packed_matrix qkv, output, gate_up, down;
  const float *input_norm, *mlp_norm;
  double input_floor, mlp_floor;
  char *keys, *values;
  long window;
  long feature; /* where its output goes in a row of features, or -1 */
} layer;

/* The other kernels; a batch is that of attention_task.h. */
int ssd_multiply_packed(const bf16 *, long, long, int, const uint8_t *, const float *, bf16 *, long, long, int, int);
void ssd_norm_bf16(bf16 *, const bf16 *, const float *, float, bf16 *, long, long, int);
void ssd_gate_bf16(const bf16 *, bf16 *, long, long, int);
void ssd_rotate_bf16(const bf16 *, const float *, float *, long, long, long, long, int);
void ssd_attend(const void *, long, const float *, long, const char *, const char *, float *, float *);
void ssd_store_keys_values(const void *, const float *, long, long, const int64_t *, char *);

static int multiply(const packed_matrix *m, const bf16 *x, long rows, bf16 *out, int way, int threads) {
  for (const packed_part *p = m->parts; p < m->parts + m->count; p++)
    if (!ssd_multiply_packed(x, rows, m->inputs, (int)p->kind, p->packed, p->bias, out + p->start, m->outputs,
                             p->outputs, way, threads))
      return 0;
  return 1;
}

/* What the layers of a forward share: the batch, sizes, and memory for the steps of one layer. */
typedef struct {
  const void *batch;
  const int64_t *slots;
  const float *rotations;
  long rows, heads, kv_heads, head_dim;
  int way, threads;
  float *turned, *attended;
  bf16 *normed, *products, *inputs;
} forward;

/* Memory for layers of this shape, `wide` numbers at least in each row of products and inputs; NULL: there is none. */
static void *prepare(forward *f, const layer *l, long wide) {
  long all_heads = (f->heads + 2 * f->kv_heads) * f->head_dim, queries = f->heads * f->head_dim;
  if (l->gate_up.outputs > wide) wide = l->gate_up.outputs;
  if (all_heads > wide) wide = all_heads;
  if (queries > wide) wide = queries;
  float *memory = malloc(f->rows * (4 * (all_heads + queries) + 2 * (l->qkv.inputs + l->output.outputs + 2 * wide)) + 1);
  f->turned = memory;
  f->attended = memory + f->rows * all_heads;
  f->normed = (bf16 *)(f->attended + f->rows * queries);
  f->products = f->normed + f->rows * (l->qkv.inputs + l->output.outputs);
  f->inputs = f->products + f->rows * wide;
  return memory;
}

/* A layer whose attention reads `rows`; its results are in `hidden` and `added`, to be added. */
static int run_layer(const forward *f, const layer *l, const bf16 *rows, bf16 *hidden, bf16 *added) {
  long size = l->output.outputs, all_heads = f->heads + 2 * f->kv_heads, queries = f->heads * f->head_dim;
  int done = multiply(&l->qkv, rows, f->rows, f->products, f->way, f->threads);
  ssd_rotate_bf16(f->products, f->rotations, f->turned, f->rows, all_heads, f->heads + f->kv_heads, f->head_dim,
                  f->threads);
  ssd_store_keys_values(f->batch, f->turned + queries, all_heads * f->head_dim, f->rows, f->slots, l->keys);
  ssd_attend(f->batch, l->window, f->turned, all_heads * f->head_dim, l->keys, l->values, f->attended, NULL);
  for (long i = 0; i < f->rows * queries; i += LANES) store_bf16(f->inputs + i, load_float(f->attended + i));
  done &= multiply(&l->output, f->inputs, f->rows, added, f->way, f->threads);
  ssd_norm_bf16(hidden, added, l->mlp_norm, (float)l->mlp_floor, f->normed, f->rows, size, f->threads);
  done &= multiply(&l->gate_up, f->normed, f->rows, f->products, f->way, f->threads);
  ssd_gate_bf16(f->products, f->inputs, f->rows, l->gate_up.outputs / 2, f->threads);
  return done & multiply(&l->down, f->inputs, f->rows, added, f->way, f->threads);
}

/* out = a + b, rounded; `count` numbers of each of `rows` rows, those of `out` `stride` apart. Rows are whole vectors, as
 * they are the inputs of packed matrices. */
static void add(const bf16 *a, const bf16 *b, bf16 *out, long rows, long count, long stride) {
  for (long row = 0; row < rows; row++, a += count, b += count, out += stride)
    for (long i = 0; i < count; i += LANES) store_bf16(out + i, load_bf16(a + i) + load_bf16(b + i));
}

/* Adds the layers' results to `hidden` [rows, hidden], but for the last one's: that is left in `added`, which the next
 * norm adds. `any_added`: there is something in it already. `rotations` [rows, head_dim] and `slots` [rows] are the
 * rows'. Outputs of layers that have a place in `features` [rows, feature_size] are written there. Returns 0 if there is
 * no memory. */
int ssd_packed_layers(const layer *layers, long count, const void *batch, const int64_t *slots, bf16 *hidden,
                      bf16 *added, int any_added, const float *rotations, long rows, long heads, long kv_heads,
                      long head_dim, bf16 *features, long feature_size, int way, int threads) {
  forward f = {batch, slots, rotations, rows, heads, kv_heads, head_dim, way, threads};
  void *memory = prepare(&f, layers, 0);
  if (!memory) return 0;
  long size = layers->output.outputs;
  int done = 1;
  for (const layer *l = layers; l < layers + count && done; l++, any_added = 1) {
    ssd_norm_bf16(hidden, any_added ? added : NULL, l->input_norm, (float)l->input_floor, f.normed, rows, size, threads);
    done = run_layer(&f, l, f.normed, hidden, added);
    if (l->feature >= 0) add(hidden, added, features + l->feature, rows, size, feature_size);
  }
  free(memory);
  return done;
}

typedef struct {
  layer layer;
  packed_matrix logits;
  const float *norms[3]; /* of tokens, of vectors, and before the logits */
  double floors[3];
  long adds_normed, keeps_normed; /* what the layer adds to, and what is kept of a row, is normed */
} eagle_head;

/* One forward of an EAGLE-3 head from embedded `tokens` and `vectors` [rows, hidden], which change: logits [wanted,
 * proposed] and the vectors `own` [wanted, hidden] of the rows `wanted`. Returns 0 if there is no memory. */
int ssd_packed_head(const eagle_head *h, const void *batch, const int64_t *slots, bf16 *tokens, bf16 *vectors,
                    const float *rotations, long rows, long heads, long kv_heads, long head_dim, const int64_t *wanted,
                    long count, float *logits, bf16 *own, int way, int threads) {
  forward f = {batch, slots, rotations, rows, heads, kv_heads, head_dim, way, threads};
  long size = h->layer.output.outputs, proposed = h->logits.outputs;
  void *memory = prepare(&f, &h->layer, proposed > 2 * size ? proposed : 2 * size);
  if (!memory) return 0;
  bf16 *both = f.normed, *normed = f.products, *added = f.inputs;
  ssd_norm_bf16(tokens, NULL, h->norms[0], (float)h->floors[0], normed, rows, size, threads);
  ssd_norm_bf16(vectors, NULL, h->norms[1], (float)h->floors[1], added, rows, size, threads);
  for (long row = 0; row < rows; row++) {
    memcpy(both + 2 * row * size, normed + row * size, 2 * size);
    memcpy(both + (2 * row + 1) * size, added + row * size, 2 * size);
  }
  if (h->adds_normed) memcpy(vectors, added, 2 * rows * size);
  added = tokens; /* they are not needed any more */
  int done = run_layer(&f, &h->layer, both, vectors, added);
  for (long i = 0; i < count; i++)
    add(vectors + wanted[i] * size, added + wanted[i] * size, own + i * size, 1, size, size);
  ssd_norm_bf16(own, NULL, h->norms[2], (float)h->floors[2], f.normed, count, size, threads);
  if (done && count) done = multiply(&h->logits, f.normed, count, f.products, way, threads);
  for (long i = 0; i < count * proposed; i++) logits[i] = widen(f.products[i]);
  if (h->keeps_normed) memcpy(own, f.normed, 2 * count * size);
  free(memory);
  return done;
}
