/* Philox4x32-10 on eight blocks at a time, and log E of its words. See noise.c. */
#ifndef SSD_NOISE_H
#define SSD_NOISE_H

#include "doubles.h"

#define ROUNDS 10
#define GROUP (4 * EIGHT) /* tokens */

static const uint64_t multiplier_0 = 0xD2511F53, multiplier_1 = 0xCD9E8D57;
static const uint32_t weyl_0 = 0x9E3779B9, weyl_1 = 0xBB67AE85;

/* log(-log(1 - w)) with w = (h + 1/2) 2^-32, at most 1 - 2^-24. */
static inline void race(const words *h, floats *log_e) {
  const doubles least = (doubles){0} + 0x1p-24;
  doubles x[4];
  EACH_OF_4 x[j] = larger(from_integers(0x1ffffffffull - 2 * h[j]) * 0x1p-33, least); /* 1 - w */
  logarithms(x);
  EACH_OF_4 x[j] = -x[j];
  logarithms(x);
  EACH_OF_4 log_e[j] = __builtin_convertvector(x[j], floats);
}

/* The 4 x 8 words of the blocks in `counter`: word[j] holds word j of every block. */
static inline void philox(words counter, uint32_t position, uint32_t stream, uint64_t seed, words *word) {
  words zero = {0}, x0 = zero + position, x1 = counter, x2 = zero + stream, x3 = zero;
  uint32_t key_0 = (uint32_t)seed, key_1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < ROUNDS; round++, key_0 += weyl_0, key_1 += weyl_1) {
    words p0 = low_product(x0, zero + multiplier_0), p1 = low_product(x2, zero + multiplier_1);
    x0 = (p1 >> 32) ^ x1 ^ (uint64_t)key_0; /* upper halves of x1 and x3 are left dirty between rounds */
    x2 = (p0 >> 32) ^ x3 ^ (uint64_t)key_1;
    x1 = p1;
    x3 = p0;
  }
  word[0] = x0 & LOW_HALF, word[1] = x1 & LOW_HALF, word[2] = x2 & LOW_HALF, word[3] = x3 & LOW_HALF;
}

#endif
