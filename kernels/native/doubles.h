/* Vectors of eight, in the compiler's own notation: one instruction where the processor has 512-bit registers,
 * several elsewhere. */
#ifndef SSD_DOUBLES_H
#define SSD_DOUBLES_H

#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define EIGHT 8

typedef uint64_t words __attribute__((vector_size(8 * EIGHT)));
typedef int64_t integers __attribute__((vector_size(8 * EIGHT)));
typedef double doubles __attribute__((vector_size(8 * EIGHT)));
typedef float floats __attribute__((vector_size(4 * EIGHT)));

#define LOW_HALF 0xffffffffull
#define MANTISSA 0xfffffffffffffull
#define TWO_52 0x4330000000000000ull /* 2^52: an integer below it, put into the mantissa, is a double */
#define SQRT_HALF 0x3fe6a09e667f3bcdull

/* The product of the lower halves. */
static inline words low_product(words a, words b) {
#ifdef __AVX512F__
  return (words)_mm512_mul_epu32((__m512i)a, (__m512i)b);
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

/* Natural logarithm of normal positive numbers, to about one unit in the last place of a double.
 *
 * x = 2^k m with sqrt(1/2) <= m < sqrt(2); log m = 2 artanh(s) with s = (m - 1) / (m + 1), whose odd series is
 * approximated by a polynomial of degree 14 in s (coefficients of FreeBSD's e_log.c, Sun Microsystems 1993).
 */
static inline doubles logarithm(doubles x) {
  words bits = (words)x - SQRT_HALF + 0x3ff0000000000000ull;
  doubles k = (doubles)((bits >> 52) | TWO_52) - (0x1p52 + 1023.0);
  doubles f = (doubles)((bits & MANTISSA) + SQRT_HALF) - 1.0;
  doubles s = f / (f + 2.0), z = s * s, w = z * z, half = 0.5 * f * f;
  doubles odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  doubles even = z * (6.666666666666735130e-01 +
                      w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  return k * 6.93147180369123816490e-01 - ((half - (s * (half + (odd + even)) + k * 1.90821492927058770002e-10)) - f);
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
