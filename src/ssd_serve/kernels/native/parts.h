/* Sizes: what is rounded up, and what is shared out evenly. */
#ifndef SSD_PARTS_H
#define SSD_PARTS_H

static inline __attribute__((always_inline)) long smaller(long a, long b) { return a < b ? a : b; }

static inline __attribute__((always_inline)) long parts_of(long number, long most) { return (number + most - 1) / most; }

static inline __attribute__((always_inline)) long rounded_up(long number, long to) { return parts_of(number, to) * to; }

/* The size of the first of the fewest nearly equal parts of `number`, none larger than `most`. */
static inline __attribute__((always_inline)) long part(long number, long most) {
  return number <= most ? number : parts_of(number, parts_of(number, most));
}

#endif
