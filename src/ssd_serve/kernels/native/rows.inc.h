/* The bodies of rows.c for one type of element. */

/* hidden += added (if there is any); out = hidden * weight / hypot(|hidden|, floor). [rows, size] all. */
void NAME(ssd_norm)(ELEMENT *hidden, const ELEMENT *added, const float *weight, float floor, ELEMENT *out, long rows,
                    long size, int threads) {
  long whole = size / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size >= WORK)
  for (long row = 0; row < rows; row++) {
    ELEMENT *h = hidden + row * size, *o = out + row * size;
    const ELEMENT *a = added ? added + row * size : added;
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
    float length = sqrtf(sum_lanes(squares) + rest + floor * floor);
    for (long i = 0; i < whole; i += LANES) STORE(o + i, LOAD(h + i) / length * load_float(weight + i));
    for (long i = whole; i < size; i++) o[i] = ROUND(ONE(h[i]) / length * weight[i]);
  }
}

/* out [rows, width] = silu(x[:, :width]) * x[:, width:]. */
void NAME(ssd_gate)(const ELEMENT *x, ELEMENT *out, long rows, long width, int threads) {
  long whole = width / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * width >= WORK)
  for (long row = 0; row < rows; row++) {
    const ELEMENT *gate = x + 2 * row * width, *up = gate + width;
    ELEMENT *o = out + row * width;
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

/* out [rows, heads, head_dim] = x in float; the first `rotated` heads times the row's rotation.
 * A rotation is head_dim / 2 pairs of cosine and sine, a head as many pairs of real and imaginary part. */
void NAME(ssd_rotate)(const ELEMENT *x, const float *rotations, float *out, long rows, long heads, long rotated,
                      long head_dim, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * heads * head_dim >= WORK)
  for (long row = 0; row < rows; row++) {
    const float *turn = rotations + row * head_dim;
    const ELEMENT *from = x + row * heads * head_dim;
    float *to = out + row * heads * head_dim;
    for (long head = 0; head < rotated; head++, from += head_dim, to += head_dim)
      for (long i = 0; i < head_dim; i += 2) {
        float real = ONE(from[i]), imaginary = ONE(from[i + 1]);
        to[i] = real * turn[i] - imaginary * turn[i + 1];
        to[i + 1] = real * turn[i + 1] + imaginary * turn[i];
      }
    for (long i = 0; i < (heads - rotated) * head_dim; i++) to[i] = ONE(from[i]);
  }
}
