// y = x W^T for a weight in groups of 32 (blocks.h): rows are quantised first, then each thread takes a range of channels.
#include <stdlib.h>

#include "products.h"
#include "threads.h"
#if SPECDEC_TILES
#include "tiles.h"
#endif

#define PREFETCH_BYTES 1536  // ahead in the stream of weights, which rarely fit a cache
#define STACK_GROUPS 512     // rows this small are quantised on the stack (24 KB), larger ones on the heap
#define UNPACK_ROWS 24       // rows from which AVX2 gains by unpacking a block of q4 weights beforehand
#define UNPACK_GROUPS 64     // the most groups of it (40 KB)
#define GRAIN 96             // groups of 16 channels times (2 + rows) that are worth a thread

ALWAYS f32x16 scales(const uint8_t *w, int q4) { return f_load_f16((const uint16_t *)(w + (q4 ? 256 : 512))); }
ALWAYS f32x16 offsets(const uint8_t *w, int q4) { return q4 ? f_load_f16((const uint16_t *)(w + 288)) : f_zero(); }

// The float steps of one group for R rows, whose integer sums are c.
ALWAYS void scale(f32x16 *sum, const i32x16 *c, f32x16 d, f32x16 m, const RowGroup *x, int64_t stride, int R, int q4) {
  for (int r = 0; r < R; r++) {
    const RowGroup *row = x + r * stride;
    sum[r] = f_fma(f_mul(d, f_set1(row->scale)), i_to_float(c[r]), sum[r]);
    if (q4) sum[r] = f_fma(m, f_set1(row->offset), sum[r]);
  }
}

ALWAYS void finish(float *y, const float *add, f32x16 *sum, int64_t ld, int lanes, int R) {
  for (int r = 0; r < R; r++) {
    if (add) sum[r] = f_add(lanes == LANES ? f_load(add + r * ld) : f_load_n(add + r * ld, lanes), sum[r]);
    if (lanes == LANES) f_store(y + r * ld, sum[r]);
    else f_store_n(y + r * ld, sum[r], lanes);
  }
}

ALWAYS void prefetch(const uint8_t *w, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(w + PREFETCH_BYTES + line);
}

// Sixteen channels of R rows. R and q4 are constants where this is inlined.
ALWAYS void few(const uint8_t *w, const RowGroup *x, float *y, const float *add, int64_t groups, int64_t ld, int lanes, int R,
                int q4) {
  const int64_t bytes = q4 ? Q4_BYTES : Q8_BYTES;
  f32x16 sum[MOST_ROWS];
  for (int r = 0; r < R; r++) sum[r] = f_zero();
  for (int64_t g = 0; g < groups; g++, w += bytes) {
    prefetch(w, bytes);
    i32x16 c[MOST_ROWS];
    if (q4) dots_q4(w, x + g, groups, R, c);
    else dots_q8(w, x + g, groups, R, c);
    scale(sum, c, scales(w, q4), offsets(w, q4), x + g, groups, R, q4);
  }
  finish(y, add, sum, ld, lanes, R);
}

// Rows that go faster in company: `many` computes the first ones, as many as it can, and returns their number.
#if SPECDEC_TILES
ALWAYS int64_t many(const uint8_t *w, const RowGroup *x, float *y, const float *add, int64_t rows, int64_t groups, int64_t ld,
                    int lanes, int q4) {
  const int64_t bytes = q4 ? Q4_BYTES : Q8_BYTES;
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS, x += TILE_ROWS * groups) {
    f32x16 sum[TILE_ROWS];
    for (int i = 0; i < TILE_ROWS; i++) sum[i] = f_zero();
    for (int64_t g = 0; g < groups; g += STAGE) {
      const int count = groups - g < STAGE ? (int)(groups - g) : STAGE;
      const uint8_t *from = w + g * bytes;
      i32x16 c[STAGE][TILE_ROWS];
      prefetch(from, count * bytes);
      tile_dots(from, x + g, groups, count, q4, c);
      for (int i = 0; i < count; i++, from += bytes)
        scale(sum, c[i], scales(from, q4), offsets(from, q4), x + g + i, groups, TILE_ROWS, q4);
    }
    finish(y + r * ld, add ? add + r * ld : 0, sum, ld, lanes, TILE_ROWS);
  }
  return r;
}
#elif SPECDEC_LEVEL == 1
ALWAYS int64_t many(const uint8_t *w, const RowGroup *x, float *y, const float *add, int64_t rows, int64_t groups, int64_t ld,
                    int lanes, int q4) {
  if (!q4 || rows < UNPACK_ROWS || groups > UNPACK_GROUPS) return 0;
  _Alignas(64) uint8_t unpacked[UNPACK_GROUPS][UNPACKED_BYTES];
  for (int64_t g = 0; g < groups; g++, w += Q4_BYTES) {
    prefetch(w, Q4_BYTES);
    unpack_q4(w, unpacked[g]);
  }
  int64_t r = 0;
  for (; r + MOST_ROWS <= rows; r += MOST_ROWS, x += MOST_ROWS * groups) {
    f32x16 sum[MOST_ROWS];
    for (int i = 0; i < MOST_ROWS; i++) sum[i] = f_zero();
    for (int64_t g = 0; g < groups; g++) {
      const float *d = (const float *)(unpacked[g] + 512);
      i32x16 c[MOST_ROWS];
      dots_codes(unpacked[g], x + g, groups, MOST_ROWS, 1, c);
      scale(sum, c, f_load(d), f_load(d + LANES), x + g, groups, MOST_ROWS, 1);
    }
    finish(y + r * ld, add ? add + r * ld : 0, sum, ld, lanes, MOST_ROWS);
  }
  return r;
}
#else
#define many(...) 0
#endif

ALWAYS void block(const uint8_t *w, const RowGroup *x, float *y, const float *add, int64_t rows, int64_t groups, int64_t ld,
                  int lanes, int q4) {
  int64_t r = many(w, x, y, add, rows, groups, ld, lanes, q4);
#define ROWS(R) few(w, x + r * groups, y + r * ld, add ? add + r * ld : 0, groups, ld, lanes, R, q4)
  for (; r + MOST_ROWS <= rows; r += MOST_ROWS) ROWS(MOST_ROWS);
  if (rows - r >= 4) ROWS(4), r += 4;
  switch (rows - r) {
    case 3: ROWS(3); break;
    case 2: ROWS(2); break;
    case 1: ROWS(1); break;
  }
#undef ROWS
}

void block_channels(const uint8_t *w, int q4, const RowGroup *x, int64_t rows, int64_t groups, int64_t n, int64_t first,
                    int64_t last, float *y, const float *add, int64_t ld) {
  const int64_t bytes = groups * (q4 ? Q4_BYTES : Q8_BYTES);
#if SPECDEC_TILES
  if (rows >= TILE_ROWS) tiles_begin();
#endif
  for (int64_t b = first; b < last; b++) {
    const int lanes = n - b * LANES < LANES ? (int)(n - b * LANES) : LANES;
    float *to = y + (b - first) * LANES;
    const float *from = add ? add + (b - first) * LANES : 0;
    if (q4) block(w + b * bytes, x, to, from, rows, groups, ld, lanes, 1);
    else block(w + b * bytes, x, to, from, rows, groups, ld, lanes, 0);
  }
#if SPECDEC_TILES
  if (rows >= TILE_ROWS) tiles_end();
#endif
}

typedef struct {
  const float *x;
  const uint8_t *w;
  float *y;
  RowGroup *quantised;
  int64_t rows, n, groups, chunks;
  int q4;
} Call;

static void quantise_chunk(void *context, int64_t i) {
  const Call *c = context;
  const int64_t total = c->rows * c->groups;
  for (int64_t g = part(total, c->chunks, i); g < part(total, c->chunks, i + 1); g++) quantise(c->x + g * GROUP, c->quantised + g);
}

static void product_chunk(void *context, int64_t i) {
  const Call *c = context;
  const int64_t blocks = (c->n + LANES - 1) / LANES;
  const int64_t first = part(blocks, c->chunks, i), last = part(blocks, c->chunks, i + 1);
  block_channels(c->w, c->q4, c->quantised, c->rows, c->groups, c->n, first, last, c->y + first * LANES, 0, c->n);
}

// x [rows, k], y [rows, n] contiguous; q4 or else q8. Returns 1 where there was no memory for the quantised rows.
KERNEL(int, block_linear)(const float *x, const uint8_t *w, float *y, int64_t rows, int64_t n, int64_t k, int q4) {
  RowGroup small[STACK_GROUPS];
  const int64_t groups = k / GROUP, total = rows * groups;
  RowGroup *quantised = total <= STACK_GROUPS ? small : malloc((size_t)total * sizeof(RowGroup));
  if (!quantised) return 1;
  Call c = {x, w, y, quantised, rows, n, groups, 0, q4};
  int threads = threads_for(total, STACK_GROUPS);
  c.chunks = chunks_for(threads, total);
  specdec_parallel(threads, c.chunks, quantise_chunk, &c);
  const int64_t blocks = (n + LANES - 1) / LANES;
  threads = threads_for(blocks * groups * (2 + rows), GRAIN * 16);
  c.chunks = chunks_for(threads, blocks);
  specdec_parallel(threads, c.chunks, product_chunk, &c);
  if (quantised != small) free(quantised);
  return 0;
}

// The quantised rows themselves, for checks: q int8 [total, 32], scale and offset float32 [total], total = rows * k / 32.
KERNEL(void, quantise_rows)(const float *x, int8_t *q, float *scale, float *offset, int64_t total) {
  for (int64_t i = 0; i < total; i++) {
    RowGroup group;
    quantise(x + i * GROUP, &group);
    memcpy(q + i * GROUP, group.q, GROUP);
    scale[i] = group.scale;
    offset[i] = group.offset;
  }
}
