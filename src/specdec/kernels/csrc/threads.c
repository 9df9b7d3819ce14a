// The worker threads behind threads.h: started when first needed, spinning briefly for the next call, then asleep.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_WORKERS 63
#define SPINS 2000  // some tens of microseconds: longer than the gap between two calls of a layer

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

static atomic_int allowed = 1;
static pthread_mutex_t calling = PTHREAD_MUTEX_INITIALIZER;  // one call at a time has the workers; others run alone

// The current call. `open` counts its chunks that nobody has taken, under a serial number in the upper half, so that a
// worker which comes late cannot take a chunk of a call that it did not see. Chunk, context and count are only read by one
// who holds a chunk, and the call does not end before that chunk is done.
static struct {
  Chunk *chunk;
  void *context;
  int64_t chunks;
} call;
static _Atomic uint64_t open_chunks;
static _Atomic int64_t done_chunks;
static atomic_int seats;  // workers that may still join the current call

static int n_workers;  // changed by the holder of `calling` only
static atomic_int sleeping;
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell = PTHREAD_COND_INITIALIZER;

EXPORT void specdec_set_threads(int n) { allowed = n < 1 ? 1 : n > MOST_WORKERS + 1 ? MOST_WORKERS + 1 : n; }
EXPORT int specdec_threads(void) { return allowed; }

// Take chunks of call `serial` until none is left.
static void work(uint32_t serial) {
  uint64_t open = open_chunks;
  while (open >> 32 == serial && (uint32_t)open > 0) {
    if (!atomic_compare_exchange_weak(&open_chunks, &open, open - 1)) continue;
    call.chunk(call.context, call.chunks - (int64_t)(uint32_t)open);
    atomic_fetch_add(&done_chunks, 1);
    open = open_chunks;
  }
}

static int take_seat(void) {
  int free = seats;
  while (free > 0)
    if (atomic_compare_exchange_weak(&seats, &free, free - 1)) return 1;
  return 0;
}

static void *worker(void *unused) {
  (void)unused;
  uint32_t seen = 0;
  for (;;) {
    uint32_t serial = (uint32_t)(open_chunks >> 32);
    for (int spin = 0; serial == seen && spin < SPINS; spin++) {
      PAUSE();
      serial = (uint32_t)(open_chunks >> 32);
    }
    if (serial == seen) {
      pthread_mutex_lock(&bed);
      atomic_fetch_add(&sleeping, 1);
      while ((serial = (uint32_t)(open_chunks >> 32)) == seen) pthread_cond_wait(&bell, &bed);
      atomic_fetch_sub(&sleeping, 1);
      pthread_mutex_unlock(&bed);
    }
    seen = serial;
    if (take_seat()) work(serial);
  }
  return 0;
}

// After fork() the child has none of the workers: it starts its own when it first needs one.
static void forked(void) {
  open_chunks = open_chunks >> 32 << 32;  // another thread may have been in a call, whose chunks are not the child's
  seats = 0;
  done_chunks = 0;
  n_workers = 0;
  sleeping = 0;
  pthread_mutex_init(&calling, 0);
  pthread_mutex_init(&bed, 0);
  pthread_cond_init(&bell, 0);
}

// Start workers up to n; fewer where the system gives no more.
static void hire(int n) {
  static int watching;
  if (!watching) watching = 1, pthread_atfork(0, 0, forked);
  for (; n_workers < n; n_workers++) {
    pthread_t thread;
    if (pthread_create(&thread, 0, worker, 0)) return;
    pthread_detach(thread);
  }
}

EXPORT void specdec_parallel(int threads, int64_t chunks, Chunk *chunk, void *context) {
  if (threads < 2 || chunks < 2 || chunks > INT32_MAX || pthread_mutex_trylock(&calling)) {
    for (int64_t i = 0; i < chunks; i++) chunk(context, i);
    return;
  }
  hire(threads - 1 < MOST_WORKERS ? threads - 1 : MOST_WORKERS);
  call.chunk = chunk;
  call.context = context;
  call.chunks = chunks;
  done_chunks = 0;
  seats = threads - 1;
  uint32_t serial = (uint32_t)(open_chunks >> 32) + 1;
  open_chunks = (uint64_t)serial << 32 | (uint64_t)chunks;
  if (sleeping > 0) {
    pthread_mutex_lock(&bed);
    pthread_cond_broadcast(&bell);
    pthread_mutex_unlock(&bed);
  }
  work(serial);
  for (int spin = 0; done_chunks < chunks; spin++) {
    if (spin < SPINS) PAUSE();
    else sched_yield();  // a worker was interrupted in the middle of its chunk
  }
  pthread_mutex_unlock(&calling);
}
