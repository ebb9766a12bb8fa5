/* The bodies of rows.c for one type of element. */

static void NAME(norm)(const void *work, long from, long to, pool_place *place) {
  const norm_work *w = work;
  const float *weight = w->weight;
  long size = w->size, whole = size / LANES * LANES;
  for (long row = from; row < to; row++) {
    ELEMENT *h = (ELEMENT *)w->hidden + row * size, *o = (ELEMENT *)w->out + row * size;
    const ELEMENT *a = w->added ? (const ELEMENT *)w->added + row * size : NULL;
    vfloat squares = {0};
    float rest = 0;
    for (long i = 0; i < whole; i += LANES) {
      vfloat x = LOAD(h + i);
      if (a) {
        STORE(h + i, x + LOAD(a + i));
        x = LOAD(h + i);
      }
      squares += x * x;
    }
    for (long i = whole; i < size; i++) {
      if (a) h[i] = ROUND(ONE(h[i]) + ONE(a[i]));
      rest += ONE(h[i]) * ONE(h[i]);
    }
    float length = sqrtf(sum_lanes(squares) + rest + w->floor * w->floor);
    for (long i = 0; i < whole; i += LANES) STORE(o + i, LOAD(h + i) / length * load_float(weight + i));
    for (long i = whole; i < size; i++) o[i] = ROUND(ONE(h[i]) / length * weight[i]);
  }
}

/* hidden += added (if there is any); out = hidden * weight / hypot(|hidden|, floor). [rows, size] all. */
void NAME(ssd_norm)(ELEMENT *hidden, const ELEMENT *added, const float *weight, float floor, ELEMENT *out, long rows,
                    long size, int threads) {
  norm_work work = {hidden, added, out, weight, floor, size};
  POOL_RUN(NAME(norm), work, rows, parts_of(PIECE, size), threads);
}

static void NAME(gate)(const void *work, long from, long to, pool_place *place) {
  const gate_work *w = work;
  long width = w->width, whole = width / LANES * LANES;
  for (long row = from; row < to; row++) {
    const ELEMENT *gate = (const ELEMENT *)w->x + 2 * row * width, *up = gate + width;
    ELEMENT *o = (ELEMENT *)w->out + row * width;
    for (long i = 0; i < whole; i += LANES) {
      vfloat g = LOAD(gate + i);
      STORE(o + i, g / (exp_float(-g) + 1.0f) * LOAD(up + i));
    }
    for (long i = whole; i < width; i++) {
      float g = ONE(gate[i]);
      o[i] = ROUND(g / (expf(-g) + 1.0f) * ONE(up[i]));
    }
  }
}

/* out [rows, width] = silu(x[:, :width]) * x[:, width:]. */
void NAME(ssd_gate)(const ELEMENT *x, ELEMENT *out, long rows, long width, int threads) {
  gate_work work = {x, out, width};
  POOL_RUN(NAME(gate), work, rows, parts_of(PIECE, width), threads);
}

static void NAME(rotate)(const void *work, long from, long to, pool_place *place) {
  const rotate_work *w = work;
  long head_dim = w->head_dim, size = w->heads * head_dim;
  for (long row = from; row < to; row++) {
    const float *turn = w->rotations + row * head_dim;
    const ELEMENT *x = (const ELEMENT *)w->x + row * size;
    float *out = w->out + row * size;
    for (long head = 0; head < w->rotated; head++, x += head_dim, out += head_dim)
      for (long i = 0; i < head_dim; i += 2) {
        float real = ONE(x[i]), imaginary = ONE(x[i + 1]);
        out[i] = real * turn[i] - imaginary * turn[i + 1];
        out[i + 1] = real * turn[i + 1] + imaginary * turn[i];
      }
    for (long i = 0; i < size - w->rotated * head_dim; i++) out[i] = ONE(x[i]);
  }
}

/* out [rows, heads, head_dim] = x in float; the first `rotated` heads times the row's rotation.
 * A rotation is head_dim / 2 pairs of cosine and sine, a head as many pairs of real and imaginary part. */
void NAME(ssd_rotate)(const ELEMENT *x, const float *rotations, float *out, long rows, long heads, long rotated,
                      long head_dim, int threads) {
  rotate_work work = {x, rotations, out, heads, rotated, head_dim};
  POOL_RUN(NAME(rotate), work, rows, parts_of(PIECE, heads * head_dim), threads);
}
