/* Brings matrices of GGUF files into panels (packed.h), and reads single outputs of them.
 *
 * The blocks of the file are those of the GGUF specification (ggml, docs/gguf.md and its list of types).
 */
#include "packed.h"
#include "pool.h"
#include "vector.h"

/* One output's codes, scales and minima of one block, as bytes of a panel hold them. */
typedef struct {
  uint8_t codes[BLOCK];
  uint16_t factors[2]; /* in half precision: scale or its factor, minimum or its factor */
  uint8_t levels[2];   /* types of two levels: scale and minimum, or both scales */
} output_block;

static uint16_t half_at(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

/* Two codes in a byte, 16 inputs apart, and one more bit of each in 4 bytes. */
static void read_nibbles(const uint8_t *nibbles, const uint8_t *above, uint8_t *codes) {
  for (int i = 0; i < 16; i++) {
    codes[i] = nibbles[i] & 15;
    codes[16 + i] = nibbles[i] >> 4;
  }
  for (int i = 0; above && i < BLOCK; i++) codes[i] |= (uint8_t)((above[i / 8] >> i % 8 & 1) << 4);
}

/* Block `j` of the eight whose scales and minima of 6 bits lie in 12 bytes. */
static void read_levels(const uint8_t *all, int j, uint8_t *levels) {
  levels[0] = j < 4 ? all[j] & 63 : (all[j + 4] & 15) | (all[j - 4] >> 6) << 4;
  levels[1] = j < 4 ? all[j + 4] & 63 : all[j + 4] >> 4 | (all[j] >> 6) << 4;
}

/* Block `j` of what begins at `from`. */
static void read_block(int kind, const uint8_t *from, int j, output_block *block) {
  const uint8_t *codes = from + 16;
  *block = (output_block){.factors = {half_at(from), half_at(from + 2)}};
  switch (kind) {
    case Q4_0: read_nibbles(from + 2, 0, block->codes); return;
    case Q4_1: read_nibbles(from + 4, 0, block->codes); return;
    case Q5_0: read_nibbles(from + 6, from + 2, block->codes); return;
    case Q5_1: read_nibbles(from + 8, from + 4, block->codes); return;
    case Q8_0:
      for (int i = 0; i < BLOCK; i++) block->codes[i] = from[2 + i] ^ 0x80;
      return;
    case Q4_K:
    case Q5_K:
      read_levels(from + 4, j, block->levels);
      if (kind == Q5_K) codes += BLOCK;
      for (int i = 0; i < BLOCK; i++) {
        block->codes[i] = codes[j / 2 * BLOCK + i] >> 4 * (j % 2) & 15;
        if (kind == Q5_K) block->codes[i] |= (uint8_t)((from[16 + i] >> j & 1) << 4);
      }
      return;
    default: /* Q6_K */
      for (int i = 0; i < BLOCK; i++)
        block->codes[i] = (from[64 * (j / 4) + 32 * (j % 2) + i] >> 4 * (j % 4 / 2) & 15) |
                          (uint8_t)((from[128 + 32 * (j / 4) + i] >> 2 * (j % 4) & 3) << 4);
      memcpy(block->levels, from + 192 + 2 * j, 2);
      block->factors[0] = half_at(from + 208);
  }
}

/* Where a code lies among those of a block. */
static inline int place_of(int input, int output) { return (input / 4 * PANEL + output) * 4 + input % 4; }

static void write_codes(const packed_type *type, const uint8_t *codes, uint8_t *to) {
  if (type->bits == 8) {
    memcpy(to, codes, CODES);
    return;
  }
  int more = type->bits - 4, parts = more ? 8 / more : 0, size = CODES * more / 8;
  for (int i = 0; i < CODES / 2; i++) to[i] = (uint8_t)((codes[i] & 15) | codes[CODES / 2 + i] << 4);
  for (int i = 0; i < size; i++) {
    unsigned above = 0;
    for (int part = 0; part < parts; part++) above |= (unsigned)(codes[size * part + i] >> 4) << more * part;
    to[CODES / 2 + i] = (uint8_t)above;
  }
}

static void write_scales(const packed_type *type, const output_block *block, int output, uint8_t *group, uint8_t *to) {
  uint8_t *halves = type->levels == 2 ? group : to;
  for (int which = 0; which <= type->minimum; which++)
    memcpy(halves + 2 * (which * PANEL + output), block->factors + which, 2);
  if (type->levels == 2) memcpy(to + output, block->levels, 1), memcpy(to + PANEL + output, block->levels + 1, 1);
}

/* The bytes of a matrix in panels. */
long ssd_packed_bytes(int kind, long outputs, long inputs) {
  return parts_of(outputs, PANEL) * panel_bytes(packed_types + kind, inputs);
}

typedef struct {
  int kind;
  const uint8_t *stored;
  long outputs, inputs;
  uint8_t *packed;
} matrix;

static void pack_panels(const void *work, long from, long to, pool_place *place) {
  const matrix *m = work;
  const packed_type *type = packed_types + m->kind;
  long blocks = m->inputs / BLOCK, row = blocks / type->file_blocks * type->file_bytes;
  for (long panel = from; panel < to; panel++)
    for (long b = 0; b < blocks; b++) {
      uint8_t codes[CODES];
      uint8_t *group = (uint8_t *)group_at(type, m->packed + panel * panel_bytes(type, m->inputs), b);
      uint8_t *to = group + head_bytes(type) + b % GROUP * block_bytes(type);
      for (int o = 0; o < PANEL; o++) {
        output_block block = {.codes = {0}};
        if (panel * PANEL + o < m->outputs)
          read_block(m->kind, m->stored + (panel * PANEL + o) * row + b / type->file_blocks * type->file_bytes,
                     (int)(b % type->file_blocks), &block);
        for (int i = 0; i < BLOCK; i++) codes[place_of(i, o)] = block.codes[i];
        write_scales(type, &block, o, group, to + code_bytes(type));
      }
      write_codes(type, codes, to);
    }
}

/* Packs a matrix [outputs][inputs] of a file. Inputs: a multiple of those that the file stores together. */
void ssd_pack(int kind, const uint8_t *stored, long outputs, long inputs, uint8_t *packed, int threads) {
  matrix m = {kind, stored, outputs, inputs, packed};
  POOL_RUN(pack_panels, m, parts_of(outputs, PANEL), 1, threads);
}

/* Rows of the matrix itself, rounded once to bf16: out [count][inputs]. */
void ssd_packed_rows(int kind, const uint8_t *packed, long inputs, const int64_t *wanted, long count, bf16 *out) {
  const packed_type *type = packed_types + kind;
  for (long n = 0; n < count; n++) {
    int o = (int)(wanted[n] % PANEL);
    for (long b = 0; b < inputs / BLOCK; b++) {
      const uint8_t *group = group_at(type, packed + wanted[n] / PANEL * panel_bytes(type, inputs), b);
      const uint8_t *from = group + head_bytes(type) + b % GROUP * block_bytes(type);
      float scales[2 * PANEL], minima[PANEL] = {0}, values[BLOCK];
      unpack_scales(type, group, from, scales, minima);
      for (int i = 0; i < BLOCK; i++) {
        int place = place_of(i, o), more = type->bits - 4, size = CODES * more / 8, code = from[place];
        if (type->bits < 8) code = from[place % (CODES / 2)] >> (place < CODES / 2 ? 0 : 4) & 15;
        if (more && type->bits < 8)
          code |= (from[CODES / 2 + place % size] >> place / size * more & ((1 << more) - 1)) << 4;
        values[i] = (float)(code - type->zero) * scales[i * type->halves / BLOCK * PANEL + o] + minima[o];
      }
      for (int i = 0; i < BLOCK; i += LANES) store_bf16(out + n * inputs + b * BLOCK + i, load_float(values + i));
    }
  }
}
