/* Work that several threads share in pieces (pool.c). */
#ifndef SSD_POOL_H
#define SSD_POOL_H

#include <stdatomic.h>
#include <stddef.h>

#include "parts.h"

/* Who does a piece. `thread`: below the number of threads, and no other thread's at the time. */
typedef struct {
  int thread;
  atomic_ulong *state; /* NULL: nobody else does the piece */
  unsigned long free;  /* the state of a piece that nobody has claimed */
  int claimed;
} pool_place;

/* Does items `from` to `to` of `work`, a copy of what `pool_run` was given. */
typedef void (*pool_body)(const void *work, long from, long to, pool_place *place);

/* Does `items` items, `size` in a piece, on at most `threads` threads. The calling thread takes part, and waits
 * only for pieces that others have begun. Pieces are done in any order, each once. */
void pool_run(pool_body body, const void *work, size_t work_bytes, long items, long size, int threads);

/* The same, but a piece that another thread has begun and does not finish is done again by the calling thread, which
 * then returns. So until `pool_claim` the body writes nothing but its own variables; it writes results only where
 * that returns 1; and it reads what outlives the call: weights, and `pool_memory`. */
void pool_run_again(pool_body body, const void *work, size_t work_bytes, long items, long size, int threads);

/* Returns 1 if this thread is to write the results of the piece, now. */
int pool_claim(pool_place *place);

/* Memory that is the calling thread's until it calls this again; NULL: there is none. */
void *pool_memory(size_t bytes);

#define POOL_RUN(body, work, items, size, threads) pool_run(body, &(work), sizeof(work), items, size, threads)
#define POOL_RUN_AGAIN(body, work, items, size, threads) \
  pool_run_again(body, &(work), sizeof(work), items, size, threads)

#define PIECE_BYTES 32768
#define ROWS_FREE 8 /* rows that a panel is multiplied with in about the time that reading it takes */

/* How many panels of a matrix make a piece of some microseconds, for `rows` rows. */
static inline long piece_of(long panel_bytes, long rows) {
  long most = PIECE_BYTES / (panel_bytes * (1 + rows / ROWS_FREE));
  return most > 1 ? most : 1;
}

#endif
