/* What happens to rows between two products: norms, rotations, gates. Computed in float32, rounded once. */
#include <math.h>

#include "vector.h"

#define WORK 65536 /* elements from which several threads pay */

#define NAME(what) what##_float
#define ELEMENT float
#define LOAD load_float
#define STORE store_float
#define ONE(x) (x)
#define ROUND(x) (x)
#include "rows.inc.h"

static inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

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
