/* As many floats at a time as fill a register of 512 bits or else of 256, in the compilers' own vector types: the same
 * source on every processor. Vectors wider than registers are taken apart, and lie in memory in between. */
#ifndef SSD_VECTOR_H
#define SSD_VECTOR_H

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

typedef float vfloat __attribute__((vector_size(4 * LANES)));
typedef int32_t vint __attribute__((vector_size(4 * LANES)));
typedef uint32_t vuint __attribute__((vector_size(4 * LANES)));
typedef uint16_t vhalf __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16;

/* 0, 1, 2, ... */
static inline vint lane_numbers(void) {
  vint numbers = {0};
  for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
  return numbers;
}

static inline vfloat load_float(const float *from) {
  vfloat v;
  memcpy(&v, from, sizeof v);
  return v;
}

static inline void store_float(float *to, vfloat v) { memcpy(to, &v, sizeof v); }

static inline vfloat load_bf16(const bf16 *from) {
  vhalf half;
  memcpy(&half, from, sizeof half);
  return (vfloat)(__builtin_convertvector(half, vuint) << 16);
}

static inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

/* Rounded to the nearest, ties to even; a NaN stays one. */
static inline void store_bf16(bf16 *to, vfloat v) {
  vuint bits = (vuint)v;
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vuint nan = (vuint)(v != v);
  vhalf half = __builtin_convertvector((bits & ~nan) | (nan & 0x7fc0), vhalf);
  memcpy(to, &half, sizeof half);
}

/* Lanes are added in a fixed tree. */
static inline float sum_lanes(vfloat v) {
  float lanes[LANES];
  store_float(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

/* exp of numbers from -87 to 88, to about two units in the last place. */
static inline vfloat exp_within(vfloat x) {
  const float round = 12582912.0f; /* 1.5 * 2^23: the sum's lowest bits are the nearest integer */
  vfloat shifted = x * 1.44269504088896341f + round;
  vfloat n = shifted - round;
  vfloat r = x - n * 0.693145751953125f - n * 1.42860682030941723e-6f;
  vfloat p = (vfloat){} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vint exponent = ((vint)shifted - 0x4b400000 + 127) << 23;
  return p * (vfloat)exponent;
}

/* exp, to about two units in the last place; 0 below -87, and never infinite. */
static inline vfloat exp_float(vfloat x) {
  const vfloat low = (vfloat){} - 87.0f, high = (vfloat){} + 88.0f;
  vint tiny = x < low, huge = x > high, nan = x != x;
  x = (vfloat)(((vint)x & ~tiny) | ((vint)low & tiny));
  x = (vfloat)(((vint)x & ~huge) | ((vint)high & huge));
  vfloat result = exp_within(x);
  result = (vfloat)((vint)result & ~tiny);
  return (vfloat)((vint)result | nan);
}

#endif
