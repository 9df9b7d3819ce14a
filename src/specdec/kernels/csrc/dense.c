// y = x W^T for float32 or bfloat16 weights packed [ceil(N / 16)][K][16]: y = fma(w[k], x[k], y) for k in order, whatever the
// number of rows. A tile is C blocks of 16 channels by R rows: as many independent sums as it takes to hide an fma's latency.
#include "products.h"
#include "threads.h"

#define WIDE 6  // rows of a tile
#define MOST_BLOCKS 4
#define GRAIN 65536  // weights times (1 + rows / 2) that are worth a thread

ALWAYS f32x16 weights(const void *w, int64_t i, int bf16) {
  return bf16 ? f_load_bf16((const uint16_t *)w + i) : f_load((const float *)w + i);
}

// C, R and bf16 are constants where this is inlined; y points at the first of the C blocks' channels, `left` of which exist.
ALWAYS void tile(const void *w, const float *x, float *y, const float *add, int64_t ld, int64_t k, int64_t left, int C, int R,
                 int bf16) {
  f32x16 sum[WIDE * MOST_BLOCKS];
  for (int i = 0; i < C * R; i++) sum[i] = f_zero();
  for (int64_t j = 0; j < k; j++) {
    for (int c = 0; c < C; c++) {
      f32x16 v = weights(w, (c * k + j) * LANES, bf16);
      for (int r = 0; r < R; r++) sum[c * R + r] = f_fma(v, f_set1(x[r * k + j]), sum[c * R + r]);
    }
  }
  for (int c = 0; c < C; c++) {
    const int64_t lanes = left - c * LANES;
    for (int r = 0; r < R && lanes > 0; r++) {
      float *to = y + r * ld + c * LANES;
      const float *from = add + r * ld + c * LANES;
      f32x16 s = sum[c * R + r];
      if (lanes >= LANES) f_store(to, add ? f_add(f_load(from), s) : s);
      else f_store_n(to, add ? f_add(f_load_n(from, (int)lanes), s) : s, (int)lanes);
    }
  }
}

// Four blocks of channels: rows by sixes, the rest in the shape that keeps most sums in flight.
ALWAYS void several(const char *w, const float *x, float *y, const float *add, int64_t rows, int64_t ld, int64_t k, int64_t left,
                    int blocks, int bf16) {
  const int64_t block_bytes = k * LANES * (bf16 ? 2 : 4);
  int64_t r = 0;
#define AT(c) w + (c) * block_bytes, x + r * k, y + r * ld + (c) * LANES, add ? add + r * ld + (c) * LANES : 0, ld, k, left - (c) * LANES
  while (rows - r >= 4) {
    int64_t wide = rows - r >= WIDE ? WIDE : 4;
    for (int c = 0; c < blocks; c++) {
      if (wide == WIDE) tile(AT(c), 1, WIDE, bf16);
      else tile(AT(c), 1, 4, bf16);
    }
    r += wide;
  }
  for (; r < rows; r++) {
    if (blocks == MOST_BLOCKS) tile(AT(0), MOST_BLOCKS, 1, bf16);
    else
      for (int c = 0; c < blocks; c++) tile(AT(c), 1, 1, bf16);
  }
#undef AT
}

void dense_channels(const void *w, int bf16, const float *x, int64_t rows, int64_t k, int64_t n, int64_t first, int64_t last,
                    float *y, const float *add, int64_t ld) {
  for (int64_t b = first; b < last; b += MOST_BLOCKS) {
    const int count = last - b < MOST_BLOCKS ? (int)(last - b) : MOST_BLOCKS;
    const char *from = (const char *)w + b * LANES * k * (bf16 ? 2 : 4);
    float *to = y + (b - first) * LANES;
    const float *added = add ? add + (b - first) * LANES : 0;
    if (bf16) several(from, x, to, added, rows, ld, k, n - b * LANES, count, 1);
    else several(from, x, to, added, rows, ld, k, n - b * LANES, count, 0);
  }
}

typedef struct {
  const float *x;
  const void *w;
  float *y;
  int64_t rows, n, k, blocks, chunks;
  int bf16;
} Call;

static void dense_chunk(void *context, int64_t i) {
  const Call *c = context;
  const int64_t first = part(c->blocks, c->chunks, i), last = part(c->blocks, c->chunks, i + 1);
  dense_channels(c->w, c->bf16, c->x, c->rows, c->k, c->n, first, last, c->y + first * LANES, 0, c->n);
}

// x [rows, k], y [rows, n] contiguous.
KERNEL(void, dense_linear)(const float *x, const void *w, float *y, int64_t rows, int64_t n, int64_t k, int bf16) {
  const int64_t blocks = (n + LANES - 1) / LANES;
  const int threads = threads_for(n * k / 2 * (2 + rows), GRAIN);
  Call c = {x, w, y, rows, n, k, blocks, chunks_for(threads, (blocks + MOST_BLOCKS - 1) / MOST_BLOCKS), bf16};
  specdec_parallel(threads, c.chunks, dense_chunk, &c);
}
