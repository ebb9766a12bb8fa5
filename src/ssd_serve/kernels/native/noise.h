/* Philox4x32-10 on several blocks at a time, and log E of its words. See noise.c. */
#ifndef SSD_NOISE_H
#define SSD_NOISE_H

#include "doubles.h"

#define ROUNDS 10
#define GROUP (4 * WORDS) /* tokens */

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

/* The keys of all rounds, in memory: there are too many for registers. */
typedef struct {
  uint64_t even[ROUNDS], odd[ROUNDS];
} schedule;

static inline schedule schedule_of(uint64_t seed) {
  schedule keys;
  uint32_t key_0 = (uint32_t)seed, key_1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < ROUNDS; round++, key_0 += weyl_0, key_1 += weyl_1)
    keys.even[round] = key_0, keys.odd[round] = key_1;
  return keys;
}

/* The 4 x WORDS words of the blocks in `counter`: word[j] holds word j of every block. */
static inline void philox(words counter, uint32_t position, uint32_t stream, const schedule *keys, words *word) {
  words zero = {0}, x0 = zero + position, x1 = counter, x2 = zero + stream, x3 = zero;
#pragma GCC unroll 10
  for (int round = 0; round < ROUNDS; round++) {
    words p0 = low_product(x0, zero + multiplier_0), p1 = low_product(x2, zero + multiplier_1);
    x0 = (p1 >> 32) ^ x1 ^ keys->even[round]; /* upper halves of x1 and x3 are left dirty between rounds */
    x2 = (p0 >> 32) ^ x3 ^ keys->odd[round];
    x1 = p1;
    x3 = p0;
  }
  word[0] = x0 & LOW_HALF, word[1] = x1 & LOW_HALF, word[2] = x2 & LOW_HALF, word[3] = x3 & LOW_HALF;
}

#ifdef __AVX512F__

/* log E of GROUP tokens from block `first` on, in order: the lanes' blocks are such that interleaving leaves no
 * gaps. */
static inline void group(const schedule *keys, uint32_t position, uint32_t stream, uint32_t first, float *out) {
  words word[4], blocks = {0, 2, 4, 6, 1, 3, 5, 7};
  floats v[4], pairs[4];
  philox(blocks + first, position, stream, keys, word);
  race(word, v);
  pairs[0] = SHUFFLE(v[0], v[1], 0, 8, 1, 9, 4, 12, 5, 13);
  pairs[1] = SHUFFLE(v[2], v[3], 0, 8, 1, 9, 4, 12, 5, 13);
  pairs[2] = SHUFFLE(v[0], v[1], 2, 10, 3, 11, 6, 14, 7, 15);
  pairs[3] = SHUFFLE(v[2], v[3], 2, 10, 3, 11, 6, 14, 7, 15);
  for (int half = 0; half < 2; half++) {
    floats low = SHUFFLE(pairs[2 * half], pairs[2 * half + 1], 0, 1, 8, 9, 4, 5, 12, 13);
    floats high = SHUFFLE(pairs[2 * half], pairs[2 * half + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    memcpy(out + 16 * half, &low, sizeof low);
    memcpy(out + 16 * half + 8, &high, sizeof high);
  }
}

#else

/* log E of GROUP tokens from block `first` on, in order. */
static inline void group(const schedule *keys, uint32_t position, uint32_t stream, uint32_t first, float *out) {
  words word[4], blocks = {0, 1, 2, 3};
  floats v[4], ordered[4];
  philox(blocks + first, position, stream, keys, word);
  race(word, v);
  floats early = SHUFFLE(v[0], v[1], 0, 4, 1, 5), late = SHUFFLE(v[2], v[3], 0, 4, 1, 5);
  ordered[0] = SHUFFLE(early, late, 0, 1, 4, 5);
  ordered[1] = SHUFFLE(early, late, 2, 3, 6, 7);
  early = SHUFFLE(v[0], v[1], 2, 6, 3, 7), late = SHUFFLE(v[2], v[3], 2, 6, 3, 7);
  ordered[2] = SHUFFLE(early, late, 0, 1, 4, 5);
  ordered[3] = SHUFFLE(early, late, 2, 3, 6, 7);
  memcpy(out, ordered, sizeof ordered);
}

#endif

#endif
