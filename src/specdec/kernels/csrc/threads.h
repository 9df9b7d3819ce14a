// Splitting a call over threads. A call is a number of chunks; whoever is free takes the next one, the caller included.
//
// The caller waits for chunks that somebody has begun, never for a thread to arrive: a worker that the system does not run,
// because other programs keep the cores busy, costs its help and nothing more. (A barrier that all threads must reach costs
// a scheduler's time slice, milliseconds, at each of the hundreds of calls of a pass.)
#ifndef SPECDEC_THREADS_H
#define SPECDEC_THREADS_H

#include <stdint.h>

typedef void Chunk(void *context, int64_t index);

// Runs chunk(context, i) for i = 0 .. chunks-1, in any order, on at most `threads` threads; returns when all are done.
void specdec_parallel(int threads, int64_t chunks, Chunk *chunk, void *context);

// Tells what memory the next call will stream through, in shares that follow each other: a thread that has nothing left to do
// in the current call fetches the beginning of its own. Two ranges, of which the second may be empty.
void specdec_ahead(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes);

// The most threads that a call may use.
int specdec_threads(void);

// How many threads some work deserves: one more for each full grain, for a second one costs a few microseconds.
static inline int threads_for(int64_t work, int64_t grain) {
  int64_t wanted = work / grain, most = specdec_threads();
  return (int)(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

// Chunks to cut `units` of equal work into for `threads` threads: a few for each, so that one which is late takes fewer.
static inline int64_t chunks_for(int threads, int64_t units) {
  int64_t wanted = threads > 1 ? 4 * (int64_t)threads : 1;
  return units < wanted ? units : wanted;
}

// Where the i-th of `chunks` nearly equal parts of `units` begins; it ends where the next one begins.
static inline int64_t part(int64_t units, int64_t chunks, int64_t i) { return units * i / chunks; }

#endif
