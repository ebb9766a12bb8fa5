/* Sixteen floats at a time, in the compilers' own vector types: the same source on every processor. */
#ifndef SSD_VECTOR_H
#define SSD_VECTOR_H

#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef uint16_t bf16;

static inline v16 load_float(const float *from) {
  v16 v;
  memcpy(&v, from, sizeof v);
  return v;
}

static inline void store_float(float *to, v16 v) { memcpy(to, &v, sizeof v); }

static inline v16 load_bf16(const bf16 *from) {
  h16 half;
  memcpy(&half, from, sizeof half);
  return (v16)(__builtin_convertvector(half, u16) << 16);
}

/* Rounded to the nearest, ties to even; a NaN stays one. */
static inline void store_bf16(bf16 *to, v16 v) {
  u16 bits = (u16)v;
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u16 nan = (u16)(v != v);
  h16 half = __builtin_convertvector((bits & ~nan) | (nan & 0x7fc0), h16);
  memcpy(to, &half, sizeof half);
}

/* Lanes are added in a fixed tree. */
static inline float sum_lanes(v16 v) {
  float lanes[LANES];
  store_float(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

/* exp of numbers from -87 to 88, to about two units in the last place. */
static inline v16 exp_within(v16 x) {
  const float round = 12582912.0f; /* 1.5 * 2^23: the sum's lowest bits are the nearest integer */
  v16 shifted = x * 1.44269504088896341f + round;
  v16 n = shifted - round;
  v16 r = x - n * 0.693145751953125f - n * 1.42860682030941723e-6f;
  v16 p = (v16){} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i16 exponent = ((i16)shifted - 0x4b400000 + 127) << 23;
  return p * (v16)exponent;
}

/* exp, to about two units in the last place; 0 below -87, and never infinite. */
static inline v16 exp_float(v16 x) {
  const v16 low = (v16){} - 87.0f, high = (v16){} + 88.0f;
  i16 tiny = x < low, huge = x > high, nan = x != x;
  x = (v16)(((i16)x & ~tiny) | ((i16)low & tiny));
  x = (v16)(((i16)x & ~huge) | ((i16)high & huge));
  v16 result = exp_within(x);
  result = (v16)((i16)result & ~tiny);
  return (v16)((i16)result | nan);
}

#endif
