/* Vectors of 64-bit words, in the compiler's own notation: eight where the processor has 512-bit registers, else four. */
#ifndef SSD_DOUBLES_H
#define SSD_DOUBLES_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "vector.h"

#define WORDS (LANES / 2)

typedef uint64_t words __attribute__((vector_size(8 * WORDS)));
typedef int64_t integers __attribute__((vector_size(8 * WORDS)));
typedef double doubles __attribute__((vector_size(8 * WORDS)));
typedef float floats __attribute__((vector_size(4 * WORDS)));

#define LOW_HALF 0xffffffffull
#define MANTISSA 0xfffffffffffffull
#define TWO_52 0x4330000000000000ull /* 2^52: an integer below it, put into the mantissa, is a double */
#define EACH_OF_4 _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE_WORDS(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(4 * WORDS)))){__VA_ARGS__})
#define SHUFFLE_WORDS(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

/* The product of the lower halves. */
static inline words low_product(words a, words b) {
#ifdef __AVX512F__
  return (words)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (words)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (a & LOW_HALF) * (b & LOW_HALF);
#endif
}

/* Integers below 2^52, exactly. */
static inline doubles from_integers(words a) { return (doubles)(a | TWO_52) - 0x1p52; }

static inline doubles larger(doubles a, doubles b) {
  integers keep = a > b;
  return (doubles)(((words)a & (words)keep) | ((words)b & ~(words)keep));
}

/* Sixteen intervals of [0.703125, 1.40625): about 1 / c for a c inside each, with few bits, and log c. The
 * interval around 1 has c = 1, so that logarithms near 0 keep their relative precision. */
#define LEAST_MANTISSA 0x3fe6800000000000ull
static const double inverses[16] = {0x1.64p+0, 0x1.55p+0, 0x1.48p+0, 0x1.3bp+0, 0x1.30p+0, 0x1.25p+0,
                                    0x1.1bp+0, 0x1.11p+0, 0x1.08p+0, 0x1.00p+0, 0x1.e2p-1, 0x1.c8p-1,
                                    0x1.b0p-1, 0x1.9ap-1, 0x1.86p-1, 0x1.74p-1};
static const double logarithms_of[16] = {
    -0.329753286372468,   -0.2867050328039543,  -0.24783616390458127,  -0.2073951943460706,
    -0.17185025692665923, -0.13499516453750482, -0.10026945316367515,  -0.06429435070539725,
    -0.030771658666753687, 0.0,                 0.06038051098890748,   0.1158318155251217,
    0.16989903679539747,  0.2221674653411543,   0.27217788591581565,   0.3194307707663612};

/* The entries at `index` modulo 16. */
static inline doubles entries(const double *table, words index) {
#ifdef __AVX512F__
  return (doubles)_mm512_permutex2var_pd(_mm512_loadu_pd(table), (__m512i)index, _mm512_loadu_pd(table + 8));
#else
  doubles found;
  for (int lane = 0; lane < WORDS; lane++) found[lane] = table[index[lane] & 15];
  return found;
#endif
}

/* Natural logarithms of normal positive numbers, to a few units in the last place of a double.
 *
 * x = 2^k m, m c^-1 = 1 + f with |f| <= 1/32: log x = k log 2 + log c + f - f^2 / 2 + ... + f^9 / 9. Four
 * vectors at a time, step by step: a chain of dependent operations alone would leave the processor waiting.
 */
static inline void logarithms(doubles *x) {
  words index[4];
  doubles f[4], base[4], p[4];
  EACH_OF_4 {
    words bits = (words)x[j] - LEAST_MANTISSA;
    base[j] = (doubles)(((bits + 0x3ff0000000000000ull) >> 52) | TWO_52) - (0x1p52 + 1023.0); /* k */
    f[j] = (doubles)((bits & MANTISSA) + LEAST_MANTISSA);                                     /* m */
    index[j] = bits >> 48;
  }
  EACH_OF_4 f[j] = f[j] * entries(inverses, index[j]) - 1.0;
  EACH_OF_4 base[j] = base[j] * 6.93147180559945309417e-01 + entries(logarithms_of, index[j]);
  EACH_OF_4 p[j] = f[j] * (1.0 / 9) - 1.0 / 8;
  EACH_OF_4 p[j] = p[j] * f[j] + 1.0 / 7;
  EACH_OF_4 p[j] = p[j] * f[j] - 1.0 / 6;
  EACH_OF_4 p[j] = p[j] * f[j] + 1.0 / 5;
  EACH_OF_4 p[j] = p[j] * f[j] - 1.0 / 4;
  EACH_OF_4 p[j] = p[j] * f[j] + 1.0 / 3;
  EACH_OF_4 p[j] = p[j] * f[j] - 1.0 / 2;
  EACH_OF_4 p[j] = p[j] * f[j];
  EACH_OF_4 x[j] = p[j] * f[j] + f[j] + base[j];
}

/* exp of numbers that are not NaN and at most 0, to about one unit in the last place; 0 below -700. */
static inline doubles exponential(doubles x) {
  const doubles zero = {0};
  integers tiny = x < zero - 700.0;
  x = (doubles)((words)x & ~(words)tiny);
  doubles shifted = x * 1.44269504088896338700e+00 + 0x1.8p52; /* its lowest bits are the nearest integer */
  doubles n = shifted - 0x1.8p52;
  doubles r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  doubles p = zero + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800, p = p * r + 1.0 / 3628800, p = p * r + 1.0 / 362880, p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040, p = p * r + 1.0 / 720, p = p * r + 1.0 / 120, p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6, p = p * r + 0.5, p = p * r + 1.0, p = p * r + 1.0;
  return (doubles)(((words)p + ((words)shifted << 52)) & ~(words)tiny);
}

#endif
