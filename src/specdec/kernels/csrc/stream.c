// Reading memory and nothing else, as fast as the threads can: what a pass over that many bytes of weights is bound by.
#include "simd.h"
#include "threads.h"

#define LINE 128  // bytes that a step reads
#define CHUNK (1 << 20)

typedef struct {
  const char *p;
  int64_t bytes, chunks;
  _Atomic uint64_t sum;
} Stream;

static void stream_chunk(void *context, int64_t i) {
  Stream *s = context;
  const char *p = s->p + part(s->bytes / LINE, s->chunks, i) * LINE, *end = s->p + part(s->bytes / LINE, s->chunks, i + 1) * LINE;
  uint64_t a[LINE / 8] = {0}, sum = 0;
  for (; p < end; p += LINE)
    for (int k = 0; k < LINE / 8; k++) {
      uint64_t word;
      memcpy(&word, p + 8 * k, 8);
      a[k] ^= word;
    }
  for (int k = 0; k < LINE / 8; k++) sum ^= a[k];
  s->sum ^= sum;
}

// The exclusive or of all words in whole lines.
KERNEL(int64_t, stream)(const void *p, int64_t bytes) {
  Stream s = {p, bytes, bytes < CHUNK ? 1 : bytes / CHUNK, 0};
  specdec_parallel(specdec_threads(), s.chunks, stream_chunk, &s);
  return (int64_t)s.sum;
}
