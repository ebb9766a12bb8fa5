/* A pool of threads for the kernels (pool.h).
 *
 * Each thread has a share of the pieces and takes those of others when its own are done. Helpers wait for the next
 * job with a bounded spin, because a step has hundreds, and then sleep. One thread uses the pool at a time; others
 * work alone.
 *
 * A job is open while `turn` is odd. A helper counts itself as `inside` before it looks whether the job is still open;
 * the calling thread closes the job before it looks whether anyone is inside: one of them sees the other. A job whose
 * pieces can be done again is closed with helpers inside. Each of its pieces has a state, 4 * turn: free, 1 more: its
 * results are being written, 2 more: done. All are done at the end, so that a late helper can claim none.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST_THREADS 64
#define MOST_PIECES 2048
#define MOST_WORK 192
#define HELPER_SPIN_NS 100000
#define AGAIN_NS 8000  /* a piece that takes longer than the last ones is done again */
#define YIELD_NS 20000 /* of waiting, then the core is offered to others */
#define TURNS 8        /* of a spin between two looks at the clock */
#define LEAST_PAUSE_NS 300000 /* between two calls that wake a thread; longer while it wakes on the caller's core */
#define MOST_PAUSE_NS 20000000

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() (void)0
#endif

#ifdef __linux__
#define CORE() sched_getcpu()
#else
#define CORE() (-1)
#endif

typedef struct {
  pool_body body;
  long first, items, size;
  int threads, again;
  unsigned long turn;
  _Alignas(16) char work[MOST_WORK];
} job;

typedef struct {
  _Alignas(64) atomic_long next; /* the first piece of the share that nobody has taken */
  atomic_long end;
} share;

typedef struct {
  _Alignas(64) atomic_int asleep;
  pthread_mutex_t lock;
  pthread_cond_t woken;
  int posted, number;
  pthread_t thread;
  int64_t woken_at, pause; /* the calling thread's */
  atomic_int crowded;      /* it went to sleep because it was on the calling thread's core */
} helper;

static struct {
  _Alignas(64) atomic_ulong turn;
  atomic_int core; /* the calling thread's */
  _Alignas(64) atomic_int inside;
  _Alignas(64) atomic_flag used;
  int started, refused, threads;
  job job;
  share shares[MOST_THREADS];
  helper helpers[MOST_THREADS];
  atomic_ulong states[MOST_PIECES];
} pool = {.used = ATOMIC_FLAG_INIT};

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

int pool_claim(pool_place *place) {
  unsigned long free = place->free;
  place->claimed = !place->state || atomic_compare_exchange_strong(place->state, &free, free + 1);
  return place->claimed;
}

/* Does one piece, unless it is claimed already. */
static void do_piece(const job *j, long piece, int thread) {
  long from = j->first + piece * j->size;
  pool_place place = {thread, j->again ? pool.states + piece : NULL, 4 * j->turn, 0};
  if (place.state && atomic_load(place.state) != place.free) return;
  j->body(j->work, from, smaller(from + j->size, j->items), &place);
  if (place.state && place.claimed) atomic_store(place.state, place.free + 2);
}

static void take_pieces(const job *j, int thread) {
  for (int i = 0; i < j->threads; i++) {
    share *from = pool.shares + (thread + i) % j->threads;
    while (atomic_load_explicit(&from->next, memory_order_relaxed) < atomic_load(&from->end)) {
      long piece = atomic_fetch_add(&from->next, 1);
      if (piece >= atomic_load(&from->end)) break;
      do_piece(j, piece, thread);
    }
  }
}

/* Waits for another turn than `seen`; returns it. On the calling thread's core it would only keep that from running. */
static unsigned long next_turn(helper *self, unsigned long seen) {
  int crowded = 0;
  for (int64_t until = now_ns() + HELPER_SPIN_NS; now_ns() < until && !crowded; crowded = CORE() == pool.core)
    for (int i = 0; i < TURNS; i++, RELAX())
      if (atomic_load_explicit(&pool.turn, memory_order_relaxed) != seen) return atomic_load(&pool.turn);
  atomic_store(&self->crowded, crowded);
  atomic_store(&self->asleep, 1);
  if (atomic_load(&pool.turn) != seen && atomic_exchange(&self->asleep, 0)) return atomic_load(&pool.turn);
  pthread_mutex_lock(&self->lock);
  while (!self->posted) pthread_cond_wait(&self->woken, &self->lock);
  self->posted = 0;
  pthread_mutex_unlock(&self->lock);
  return atomic_load(&pool.turn);
}

static void wake(helper *helper) {
  if (!atomic_load(&helper->asleep)) return;
  int64_t now = now_ns();
  if (now - helper->woken_at < helper->pause || !atomic_exchange(&helper->asleep, 0)) return;
  helper->woken_at = now;
  helper->pause = atomic_load(&helper->crowded) ? smaller(2 * helper->pause + LEAST_PAUSE_NS, MOST_PAUSE_NS) : LEAST_PAUSE_NS;
  pthread_mutex_lock(&helper->lock);
  helper->posted = 1;
  pthread_cond_signal(&helper->woken);
  pthread_mutex_unlock(&helper->lock);
}

static void *help(void *argument) {
  helper *self = argument;
  for (unsigned long seen = 0;;) {
    seen = next_turn(self, seen);
    if (seen % 2 == 0) continue;
    atomic_fetch_add(&pool.inside, 1);
    if (atomic_load(&pool.turn) == seen) {
      job copy = pool.job;
      atomic_thread_fence(memory_order_acquire);
      if (atomic_load(&pool.turn) == seen && self->number < copy.threads) take_pieces(&copy, self->number);
    }
    atomic_fetch_sub(&pool.inside, 1);
  }
  return NULL;
}

/* Lets helpers run where the calling thread may run: its cores change with the number of threads. */
static void follow_cores(int threads) {
  if (threads == pool.threads) return;
  pool.threads = threads;
#ifdef __linux__
  cpu_set_t cores;
  if (pthread_getaffinity_np(pthread_self(), sizeof cores, &cores)) return;
  for (int i = 1; i <= pool.started; i++) pthread_setaffinity_np(pool.helpers[i].thread, sizeof cores, &cores);
#endif
}

/* Starts threads; returns how many there can be, `wanted` at most. */
static int start_threads(long wanted) {
  if (wanted > MOST_THREADS) wanted = MOST_THREADS;
  while (pool.started < wanted - 1 && !pool.refused) {
    helper *next = pool.helpers + pool.started + 1;
    next->number = pool.started + 1;
    pthread_mutex_init(&next->lock, NULL);
    pthread_cond_init(&next->woken, NULL);
    pool.refused = pthread_create(&next->thread, NULL, help, next) != 0;
    pool.started += !pool.refused;
  }
  return (int)smaller(wanted, pool.started + 1);
}

static void open_job(const job *j, long pieces) {
  pool.job = *j;
  for (long piece = 0; j->again && piece < pieces; piece++)
    atomic_store_explicit(pool.states + piece, 4 * j->turn, memory_order_relaxed);
  for (int i = 0; i < j->threads; i++) {
    atomic_store_explicit(&pool.shares[i].next, pieces * i / j->threads, memory_order_relaxed);
    atomic_store_explicit(&pool.shares[i].end, pieces * (i + 1) / j->threads, memory_order_relaxed);
  }
  atomic_store(&pool.core, CORE());
  atomic_store(&pool.turn, j->turn);
  for (int i = 1; i < j->threads; i++) wake(pool.helpers + i);
}

/* Waits for a helper's piece, and does it after a while. */
static void finish_piece(const job *j, long piece, int64_t *until) {
  atomic_ulong *state = pool.states + piece;
  for (int i = 1; atomic_load(state) != 4 * j->turn + 2; i++, RELAX()) {
    if (i % TURNS) continue;
    if (!*until) *until = now_ns() + AGAIN_NS;
    if (now_ns() < *until) continue;
    do_piece(j, piece, 0);
    if (atomic_load(state) != 4 * j->turn + 2) sched_yield(); /* a helper is writing, maybe on this core */
  }
}

static void wait_for_helpers(void) {
  for (int64_t until = now_ns() + YIELD_NS; atomic_load(&pool.inside); RELAX())
    if (now_ns() > until) sched_yield();
}

static void run_job(job *j) {
  long pieces = parts_of(j->items - j->first, j->size);
  j->turn = atomic_load(&pool.turn) + 1;
  open_job(j, pieces);
  take_pieces(j, 0);
  int64_t until = 0;
  for (long piece = 0; j->again && piece < pieces; piece++) finish_piece(j, piece, &until);
  atomic_store(&pool.turn, j->turn + 1);
  if (!j->again) wait_for_helpers();
}

static void run(job *j, const void *work, size_t work_bytes, long items, long threads) {
  pool_place alone = {0, NULL, 0, 0};
  if (items <= 0) return;
  threads = smaller(threads, parts_of(items, j->size));
  if (threads <= 1 || work_bytes > MOST_WORK || atomic_flag_test_and_set(&pool.used)) {
    j->body(work, 0, items, &alone);
    return;
  }
  threads = start_threads(threads);
  follow_cores((int)threads);
  j->threads = (int)threads;
  memcpy(j->work, work, work_bytes);
  for (; j->first < items; j->first = j->items) {
    j->items = smaller(items, j->first + MOST_PIECES * j->size);
    if (threads > 1 && (j->again || !atomic_load(&pool.inside)))
      run_job(j);
    else
      j->body(work, j->first, j->items, &alone);
  }
  atomic_flag_clear(&pool.used);
}

void pool_run(pool_body body, const void *work, size_t work_bytes, long items, long size, int threads) {
  job j = {.body = body, .size = size};
  run(&j, work, work_bytes, items, threads);
}

void pool_run_again(pool_body body, const void *work, size_t work_bytes, long items, long size, int threads) {
  job j = {.body = body, .size = size, .again = 1};
  run(&j, work, work_bytes, items, threads);
}

/* Waits until no helper reads weights or memory of a job that is over. */
void ssd_pool_settle(void) {
  while (atomic_load(&pool.inside)) sched_yield();
}

void *pool_memory(size_t bytes) {
  static _Thread_local struct {
    void *at;
    size_t bytes;
  } kept;
  if (bytes > kept.bytes) {
    ssd_pool_settle();
    free(kept.at);
    kept.at = aligned_alloc(64, (bytes + 63) / 64 * 64);
    kept.bytes = kept.at ? bytes : 0;
  }
  return kept.at;
}
