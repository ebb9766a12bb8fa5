/* Matrices of 4, 5, 6 or 8 bits in blocks of 32 inputs, as GGUF files store them, in panels of 32 outputs.
 *
 * A panel is [inputs / 256] groups of up to eight blocks. A block holds the codes of 32 inputs and 32 outputs, in the
 * order [8][32][4] of the products by bytes: two codes in a byte, the code 512 places later in its upper half, then the
 * bits above the fourth of each code. Scales follow, and minima where the type has them: in half precision, or for
 * types of two levels as bytes, whose factors in half precision come before the group. A weight is
 * (code - zero) * scale + minimum, exactly.
 */
#ifndef SSD_PACKED_H
#define SSD_PACKED_H

#include <stdint.h>
#include <string.h>

#include "parts.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define PANEL 32
#define BLOCK 32
#define CODES (PANEL * BLOCK)
#define GROUP 8 /* blocks */

typedef struct {
  int bits, zero, halves; /* halves of a block with scales of their own: 1 or 2 */
  int minimum, levels;
  int file_blocks, file_bytes; /* blocks and bytes of what the file stores together */
} packed_type;

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, PACKED_TYPES };

static const packed_type packed_types[PACKED_TYPES] = {
    [Q4_0] = {4, 8, 1, 0, 1, 1, 18},  [Q4_1] = {4, 0, 1, 1, 1, 1, 20},  [Q5_0] = {5, 16, 1, 0, 1, 1, 22},
    [Q5_1] = {5, 0, 1, 1, 1, 1, 24},  [Q8_0] = {8, 128, 1, 0, 1, 1, 34}, [Q4_K] = {4, 0, 1, 1, 2, 8, 144},
    [Q5_K] = {5, 0, 1, 1, 2, 8, 176}, [Q6_K] = {6, 32, 2, 0, 2, 8, 210},
};

static inline long code_bytes(const packed_type *type) { return type->bits * CODES / 8; }

static inline long head_bytes(const packed_type *type) { return type->levels == 2 ? 2 * PANEL * (1 + type->minimum) : 0; }

static inline long block_bytes(const packed_type *type) {
  long scales = type->levels == 2 ? PANEL * (type->halves + type->minimum) : 2 * PANEL * (1 + type->minimum);
  return code_bytes(type) + scales;
}

static inline long panel_bytes(const packed_type *type, long inputs) {
  long blocks = inputs / BLOCK;
  return blocks * block_bytes(type) + parts_of(blocks, GROUP) * head_bytes(type);
}

/* Where the group begins that holds this block. */
static inline const uint8_t *group_at(const packed_type *type, const uint8_t *panel, long block) {
  long group = block / GROUP;
  return panel + group * (head_bytes(type) + GROUP * block_bytes(type));
}

/* PANEL numbers in half precision as floats. */
static inline void widen_halves(const uint8_t *from, float *to) {
#ifdef __F16C__
  for (int i = 0; i < PANEL; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i))));
#else
  for (int i = 0; i < PANEL; i++) {
    uint16_t half;
    memcpy(&half, from + 2 * i, sizeof half);
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    memcpy(&bits, &value, sizeof bits);
    if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000;
    bits |= sign;
    memcpy(to + i, &bits, sizeof bits);
  }
#endif
}

/* Scales [halves][PANEL] and minima [PANEL] of a block. */
static inline void unpack_scales(const packed_type *type, const uint8_t *group, const uint8_t *block, float *scales,
                                 float *minima) {
  const uint8_t *from = block + code_bytes(type);
  if (type->levels == 1) {
    widen_halves(from, scales);
    if (type->minimum) widen_halves(from + 2 * PANEL, minima);
    return;
  }
  float factors[PANEL];
  widen_halves(group, factors);
  for (int half = 0; half < type->halves; half++)
    for (int i = 0; i < PANEL; i++) /* signed in the one type that has halves */
      scales[half * PANEL + i] =
          factors[i] * (type->halves == 2 ? (float)(int8_t)from[half * PANEL + i] : (float)from[i]);
  if (!type->minimum) return;
  widen_halves(group + 2 * PANEL, factors);
  for (int i = 0; i < PANEL; i++) minima[i] = -(factors[i] * (float)from[PANEL + i]);
}

/* The codes of a block, one in a byte, for less than 8 bits. */
static inline void unpack_codes(const packed_type *type, const uint8_t *restrict from, uint8_t *restrict to) {
  const uint8_t *above = from + CODES / 2;
  for (int i = 0; i < CODES / 2; i++) {
    to[i] = from[i] & 15;
    to[CODES / 2 + i] = from[i] >> 4;
  }
  if (type->bits == 5)
    _Pragma("GCC unroll 8") for (int part = 0; part < 8; part++)
      for (int i = 0; i < CODES / 8; i++) to[CODES / 8 * part + i] |= (uint8_t)((above[i] >> part & 1) << 4);
  if (type->bits == 6)
    _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++)
      for (int i = 0; i < CODES / 4; i++) to[CODES / 4 * part + i] |= (uint8_t)((above[i] >> 2 * part & 3) << 4);
}

#endif
