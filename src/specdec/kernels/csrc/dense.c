// y = x W^T for float32 or bfloat16 weights packed [ceil(N / 16)][K][16]: y = fma(w[k], x[k], y) for k in order, whatever the
// number of rows. A tile is C blocks of 16 channels by R rows: as many independent sums as it takes to hide an fma's latency.
#include "simd.h"
#include "threads.h"

#define MOST_ROWS 6
#define MOST_BLOCKS 4
#define GRAIN 65536  // weights times (1 + rows / 2) that are worth a thread

ALWAYS f32x16 weights(const void *w, int64_t i, int bf16) {
  return bf16 ? f_load_bf16((const uint16_t *)w + i) : f_load((const float *)w + i);
}

// C, R and bf16 are constants where this is inlined; y points at the first of the C blocks' channels, `left` of which exist.
ALWAYS void tile(const void *w, const float *x, float *y, int64_t n, int64_t k, int64_t left, int C, int R, int bf16) {
  f32x16 sum[MOST_ROWS * MOST_BLOCKS];
  for (int i = 0; i < C * R; i++) sum[i] = f_zero();
  for (int64_t j = 0; j < k; j++) {
    for (int c = 0; c < C; c++) {
      f32x16 v = weights(w, (c * k + j) * LANES, bf16);
      for (int r = 0; r < R; r++) sum[c * R + r] = f_fma(v, f_set1(x[r * k + j]), sum[c * R + r]);
    }
  }
  for (int c = 0; c < C; c++) {
    int64_t lanes = left - c * LANES;
    for (int r = 0; r < R; r++) {
      if (lanes >= LANES) f_store(y + r * n + c * LANES, sum[c * R + r]);
      else if (lanes > 0) f_store_n(y + r * n + c * LANES, sum[c * R + r], (int)lanes);
    }
  }
}

// Four blocks of channels: rows by sixes, the rest in the shape that keeps most sums in flight.
ALWAYS void channels(const char *w, const float *x, float *y, int64_t rows, int64_t n, int64_t k, int64_t left, int blocks, int bf16) {
  const int64_t block_bytes = k * LANES * (bf16 ? 2 : 4);
  int64_t r = 0;
  for (; rows - r >= 4; ) {
    int64_t wide = rows - r >= MOST_ROWS ? MOST_ROWS : 4;
    for (int c = 0; c < blocks; c++) {
      if (wide == MOST_ROWS) tile(w + c * block_bytes, x + r * k, y + r * n + c * LANES, n, k, left - c * LANES, 1, MOST_ROWS, bf16);
      else tile(w + c * block_bytes, x + r * k, y + r * n + c * LANES, n, k, left - c * LANES, 1, 4, bf16);
    }
    r += wide;
  }
  for (; r < rows; r++) {
    if (blocks == MOST_BLOCKS) tile(w, x + r * k, y + r * n, n, k, left, MOST_BLOCKS, 1, bf16);
    else
      for (int c = 0; c < blocks; c++) tile(w + c * block_bytes, x + r * k, y + r * n + c * LANES, n, k, left - c * LANES, 1, 1, bf16);
  }
}

typedef struct {
  const float *x;
  const void *w;
  float *y;
  int64_t rows, n, k, blocks, jobs, chunks;
  int bf16;
} Call;

static void dense_chunk(void *context, int64_t i) {
  const Call *c = context;
  for (int64_t job = part(c->jobs, c->chunks, i); job < part(c->jobs, c->chunks, i + 1); job++) {
    const int64_t b = job * MOST_BLOCKS, left = c->n - b * LANES;
    const int count = c->blocks - b < MOST_BLOCKS ? (int)(c->blocks - b) : MOST_BLOCKS;
    const char *from = (const char *)c->w + b * LANES * c->k * (c->bf16 ? 2 : 4);
    if (c->bf16) channels(from, c->x, c->y + b * LANES, c->rows, c->n, c->k, left, count, 1);
    else channels(from, c->x, c->y + b * LANES, c->rows, c->n, c->k, left, count, 0);
  }
}

// x [rows, k], y [rows, n] contiguous.
KERNEL(void, dense_linear)(const float *x, const void *w, float *y, int64_t rows, int64_t n, int64_t k, int bf16) {
  const int64_t blocks = (n + LANES - 1) / LANES, jobs = (blocks + MOST_BLOCKS - 1) / MOST_BLOCKS;
  const int threads = threads_for(n * k / 2 * (2 + rows), GRAIN);
  Call c = {x, w, y, rows, n, k, blocks, jobs, chunks_for(threads, jobs), bf16};
  specdec_parallel(threads, c.chunks, dense_chunk, &c);
}
