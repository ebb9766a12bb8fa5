/* Packed products by AVX-512 VNNI. */
#ifndef SSD_PACKED_AVX512_H
#define SSD_PACKED_AVX512_H

#include <immintrin.h>

#define NAME(x) x##_avx512
#define INTEGERS __m512i
#define FLOATS __m512
#define VECTORS 2
#define MOST_ROWS 6
#define SAME(from) same_avx512(from)
#define EACH(number) _mm512_set1_epi32(number)
#define EACH_FLOAT(number) _mm512_set1_ps(number)
#define ADD_FLOATS(a, b, c) _mm512_fmadd_ps(a, b, c)
#define TIMES(a, b) _mm512_mul_ps(a, b)
#define AS_FLOATS(v) _mm512_cvtepi32_ps(v)
#define LOAD_INTEGERS(from) _mm512_loadu_si512(from)
#define LOAD_FLOATS(from) _mm512_loadu_ps(from)
#define STORE_FLOATS(to, v) _mm512_storeu_ps(to, v)
#define SIGNED(level) 0
#define DOT(sums, codes, four, level) _mm512_dpbusd_epi32(sums, (codes)[0], (four)[0])

static inline __attribute__((always_inline)) __m512i same_avx512(const int8_t *from) {
  int four;
  memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

#include "packed_panels.inc.h"

KERNEL(1, 8, 1) KERNEL(2, 8, 1) KERNEL(3, 8, 1) KERNEL(4, 8, 1) KERNEL(5, 8, 1) KERNEL(6, 8, 1)
KERNEL(1, 4, 1) KERNEL(2, 4, 1) KERNEL(3, 4, 1) KERNEL(4, 4, 1) KERNEL(5, 4, 1) KERNEL(6, 4, 1)

#define ROWS(STEPS)                                                                              \
  {0, rows_1_##STEPS##_1_avx512, rows_2_##STEPS##_1_avx512, rows_3_##STEPS##_1_avx512,           \
   rows_4_##STEPS##_1_avx512, rows_5_##STEPS##_1_avx512, rows_6_##STEPS##_1_avx512}

static const way avx512_way = {MOST_ROWS, {ROWS(8), ROWS(4), ROWS(8)}};

#undef ROWS
#include "packed_end.inc.h"

#endif
