/* Packed products by AVX2: products of bytes are added up in 16 bits, as many as cannot overflow. */
#ifndef SSD_PACKED_AVX2_H
#define SSD_PACKED_AVX2_H

#include <immintrin.h>

#define NAME(x) x##_avx2
#define INTEGERS __m256i
#define FLOATS __m256
#define VECTORS 4
#define MOST_ROWS 3
#define SAME(from) same_avx2(from)
#define EACH(number) _mm256_set1_epi32(number)
#define EACH_FLOAT(number) _mm256_set1_ps(number)
#define ADD_FLOATS(a, b, c) _mm256_fmadd_ps(a, b, c)
#define TIMES(a, b) _mm256_mul_ps(a, b)
#define AS_FLOATS(v) _mm256_cvtepi32_ps(v)
#define LOAD_INTEGERS(from) _mm256_loadu_si256((const __m256i *)(from))
#define LOAD_FLOATS(from) _mm256_loadu_ps(from)
#define STORE_FLOATS(to, v) _mm256_storeu_ps(to, v)
#define SIGNED(level) ((level) == 1)
#define DOT(sums, codes, four, level) dot_avx2(sums, codes, four, level)

static inline __attribute__((always_inline)) __m256i same_avx2(const int8_t *from) {
  int four;
  memcpy(&four, from, sizeof four);
  return _mm256_set1_epi32(four);
}

/* One step of codes of 8 bits, whose sign moves to the rows; two of 6 bits; four of at most 5. */
static inline __attribute__((always_inline)) __m256i dot_avx2(__m256i sums, const __m256i *codes, const __m256i *four,
                                                              const int level) {
  __m256i pairs;
  if (SIGNED(level)) {
    __m256i number = _mm256_xor_si256(codes[0], _mm256_set1_epi8((char)0x80));
    pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(number), _mm256_sign_epi8(four[0], number));
  } else {
    pairs = _mm256_maddubs_epi16(codes[0], four[0]);
    _Pragma("GCC unroll 4") for (int k = 1; k < level; k++)
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes[k], four[k]));
  }
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#include "packed_panels.inc.h"

KERNEL(1, 8, 4) KERNEL(2, 8, 4) KERNEL(3, 8, 4)
KERNEL(1, 4, 2) KERNEL(2, 4, 2) KERNEL(3, 4, 2)
KERNEL(1, 8, 1) KERNEL(2, 8, 1) KERNEL(3, 8, 1)

static const way avx2_way = {MOST_ROWS,
                             {{0, rows_1_8_4_avx2, rows_2_8_4_avx2, rows_3_8_4_avx2},
                              {0, rows_1_4_2_avx2, rows_2_4_2_avx2, rows_3_4_2_avx2},
                              {0, rows_1_8_1_avx2, rows_2_8_1_avx2, rows_3_8_1_avx2}}};

#include "packed_end.inc.h"

#endif
