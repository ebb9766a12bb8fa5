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

/* Adds the layers' results to `hidden` [rows, hidden], but for the last one's: that is left in `added`, which the next
 * norm adds. `any_added`: there is something in it already. `rotations` [rows, head_dim] and `slots` [rows] are the
 * rows'. Returns 0 if there is no memory. */
int ssd_packed_layers(const layer *layers, long count, const void *batch, const int64_t *slots, bf16 *hidden,
                      bf16 *added, int any_added, const float *rotations, long rows, long heads, long kv_heads,
                      long head_dim, int way, int threads) {
  long size = layers->output.outputs, all_heads = heads + 2 * kv_heads, queries = heads * head_dim;
  long gates = layers->gate_up.outputs, wide = gates > all_heads * head_dim ? gates : all_heads * head_dim;
  long narrow = gates / 2 > queries ? gates / 2 : queries;
  float *turned = malloc(rows * (4 * (all_heads * head_dim + queries) + 2 * (size + wide + narrow)));
  if (!turned && rows) return 0;
  float *attended = turned + rows * all_heads * head_dim;
  bf16 *normed = (bf16 *)(attended + rows * queries), *products = normed + rows * size;
  bf16 *inputs = products + rows * wide;
  int done = 1;
  for (const layer *l = layers; l < layers + count && done; l++, any_added = 1) {
    ssd_norm_bf16(hidden, any_added ? added : NULL, l->input_norm, (float)l->input_floor, normed, rows, size, threads);
    done &= multiply(&l->qkv, normed, rows, products, way, threads);
    ssd_rotate_bf16(products, rotations, turned, rows, all_heads, heads + kv_heads, head_dim, threads);
    ssd_store_keys_values(batch, turned + queries, all_heads * head_dim, rows, slots, l->keys);
    ssd_attend(batch, l->window, turned, all_heads * head_dim, l->keys, l->values, attended, NULL);
    for (long i = 0; i < rows * queries; i += LANES) store_bf16(inputs + i, load_float(attended + i));
    done &= multiply(&l->output, inputs, rows, added, way, threads);
    ssd_norm_bf16(hidden, added, l->mlp_norm, (float)l->mlp_floor, normed, rows, size, threads);
    done &= multiply(&l->gate_up, normed, rows, products, way, threads);
    ssd_gate_bf16(products, inputs, rows, gates / 2, threads);
    done &= multiply(&l->down, inputs, rows, added, way, threads);
  }
  free(turned);
  return done;
}
