/* What happens to rows between two products: norms, rotations, gates. Computed in float32, rounded once. */
#include <math.h>

#include "pool.h"
#include "vector.h"

#define PIECE 32768 /* elements of a piece; fewer are computed by one thread */

typedef struct {
  void *hidden;
  const void *added;
  void *out;
  const float *weight;
  float floor;
  long size;
} norm_work;

typedef struct {
  const void *x;
  void *out;
  long width;
} gate_work;

typedef struct {
  const void *x;
  const float *rotations;
  float *out;
  long heads, rotated, head_dim;
} rotate_work;

#define NAME(what) what##_float
#define ELEMENT float
#define LOAD load_float
#define STORE store_float
#define ONE(x) (x)
#define ROUND(x) (x)
#include "rows.inc.h"

static inline bf16 narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return f != f ? 0x7fc0 : (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#undef NAME
#undef ELEMENT
#undef LOAD
#undef STORE
#undef ONE
#undef ROUND
#define NAME(what) what##_bf16
#define ELEMENT bf16
#define LOAD load_bf16
#define STORE store_bf16
#define ONE(x) widen(x)
#define ROUND(x) narrow(x)
#include "rows.inc.h"
