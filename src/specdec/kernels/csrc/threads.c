// The worker threads behind threads.h: started when first needed, spinning briefly for the next call, then asleep.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_WORKERS 63
#define SPINS 50000  // of a worker without work, about a millisecond: longer than what happens between two passes
#define AHEAD 65536    // bytes of a share that are fetched before its call: they stay in the second-level cache until then
#define PATIENCE 2000  // of a caller whose worker is late, before it gives way to it

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

static atomic_int allowed = 1;
static pthread_mutex_t calling = PTHREAD_MUTEX_INITIALIZER;  // one call at a time has the workers; others run alone

// The current call: what to run, read only by one who holds a chunk of it, for the call does not end before that is done.
static struct {
  Chunk *chunk;
  void *context;
  int64_t chunks;
} call;
static _Atomic uint64_t current;  // its serial number, and below it, in one byte, its number of threads
static _Atomic int64_t done_chunks;

// Each thread has a share of the chunks, one behind the other, so that it streams through memory that lies together and
// meets no other thread; whoever is through with his own share helps with the others'. `open` counts the chunks of a share
// that nobody has taken, under the serial number in the upper half, so that a worker which comes late cannot take a chunk of
// a call that it did not see.
typedef struct {
  _Alignas(128) _Atomic uint64_t open;
} Share;
static Share shares[MOST_WORKERS + 1];

// What threads without work may fetch: the shares of the next call's memory, as it will be divided.
#define RANGES 2
#define LINE 64
static struct {
  _Atomic(const char *) start;
  _Atomic int64_t bytes;
} ahead[RANGES];

static int n_workers;  // changed by the holder of `calling` only
static atomic_int sleeping;
static pthread_mutex_t bed = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell = PTHREAD_COND_INITIALIZER;

EXPORT void specdec_set_threads(int n) { allowed = n < 1 ? 1 : n > MOST_WORKERS + 1 ? MOST_WORKERS + 1 : n; }
EXPORT int specdec_threads(void) { return allowed; }

void specdec_ahead(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes) {
  ahead[0].start = a;
  ahead[0].bytes = a_bytes;
  ahead[1].start = b;
  ahead[1].bytes = b_bytes;
}

// Fetch the beginning of a thread's own share while the call `now`, in which it has nothing left to do, is the current one.
static void fetch_ahead(uint64_t now, int me) {
  const int threads = (int)(now & 255);
  for (int i = 0; i < RANGES; i++) {
    const int64_t bytes = ahead[i].bytes, from = part(bytes, threads, me), to = part(bytes, threads, me + 1);
    const char *start = ahead[i].start;
    for (int64_t at = from; at < to && at < from + AHEAD && current == now; at += LINE)
      __builtin_prefetch(start + at, 0, 2);
  }
}

// Take chunks of a call, of one's own share first, until none is left.
static void work(uint64_t now, int me) {
  const int threads = (int)(now & 255);
  const uint32_t serial = (uint32_t)(now >> 8);
  int64_t done = 0;
  for (int k = 0; k < threads; k++) {
    const int owner = (me + k) % threads;
    uint64_t open = shares[owner].open;
    while (open >> 32 == serial && (uint32_t)open > 0) {
      if (!atomic_compare_exchange_weak(&shares[owner].open, &open, open - 1)) continue;
      call.chunk(call.context, part(call.chunks, threads, owner + 1) - (int64_t)(uint32_t)open);
      done++;
      open = shares[owner].open;
    }
  }
  if (done) atomic_fetch_add(&done_chunks, done);
}

static void *worker(void *number) {
  const int me = (int)(intptr_t)number;
  uint64_t seen = 0;
  for (;;) {
    uint64_t now = current;
    for (int spin = 0; now == seen && spin < SPINS; spin++) {
      PAUSE();
      now = current;
    }
    if (now == seen) {
      pthread_mutex_lock(&bed);
      atomic_fetch_add(&sleeping, 1);
      while ((now = current) == seen) pthread_cond_wait(&bell, &bed);
      atomic_fetch_sub(&sleeping, 1);
      pthread_mutex_unlock(&bed);
    }
    seen = now;
    if (me < (int)(now & 255)) {
      work(now, me);
      fetch_ahead(now, me);
    }
  }
  return 0;
}

// After fork() the child has none of the workers: it starts its own when it first needs one.
static void forked(void) {
  for (int i = 0; i <= MOST_WORKERS; i++) shares[i].open = 0;  // another thread may have been in a call that is not the child's
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
    if (pthread_create(&thread, 0, worker, (void *)(intptr_t)(n_workers + 1))) return;
    pthread_detach(thread);
  }
}

EXPORT void specdec_parallel(int threads, int64_t chunks, Chunk *chunk, void *context) {
  if (threads < 2 || chunks < 2 || chunks > INT32_MAX || pthread_mutex_trylock(&calling)) {
    for (int64_t i = 0; i < chunks; i++) chunk(context, i);
    return;
  }
  if (threads > MOST_WORKERS + 1) threads = MOST_WORKERS + 1;
  if (threads > chunks) threads = (int)chunks;
  hire(threads - 1);
  call.chunk = chunk;
  call.context = context;
  call.chunks = chunks;
  done_chunks = 0;
  const uint64_t serial = (uint32_t)((current >> 8) + 1);
  for (int i = 0; i < threads; i++)
    shares[i].open = serial << 32 | (uint64_t)(part(chunks, threads, i + 1) - part(chunks, threads, i));
  current = serial << 8 | (uint64_t)threads;
  if (sleeping > 0) {
    pthread_mutex_lock(&bed);
    pthread_cond_broadcast(&bell);
    pthread_mutex_unlock(&bed);
  }
  work(current, 0);
  for (int spin = 0; done_chunks < chunks; spin++) {
    if (spin < PATIENCE) PAUSE();
    else sched_yield();  // a worker was interrupted in the middle of its chunk
  }
  pthread_mutex_unlock(&calling);
}
