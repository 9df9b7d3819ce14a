// y = x W^T for a weight in groups of 32 (blocks.h): rows are quantised first, then each thread takes a range of channels.
#include <stdlib.h>

#include "blocks.h"
#include "threads.h"

#define PREFETCH_BYTES 1536  // ahead in the stream of weights, which rarely fit a cache
#define STACK_GROUPS 512     // rows this small are quantised on the stack (24 KB), larger ones on the heap
#define GRAIN 96             // groups of 16 channels times (2 + rows) that are worth a thread

// Sixteen channels of R rows. R and q4 are constants where this is inlined.
ALWAYS void tile(const uint8_t *w, const RowGroup *x, float *y, int64_t groups, int64_t n, int lanes, int R, int q4) {
  const int64_t bytes = q4 ? Q4_BYTES : Q8_BYTES;
  f32x16 sum[MOST_ROWS];
  for (int r = 0; r < R; r++) sum[r] = f_zero();
  for (int64_t g = 0; g < groups; g++, w += bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(w + PREFETCH_BYTES + line);
    i32x16 c[MOST_ROWS];
    if (q4) dots_q4(w, x + g, groups, R, c);
    else dots_q8(w, x + g, groups, R, c);
    const uint16_t *scales = (const uint16_t *)(w + (q4 ? 256 : 512));
    f32x16 d = f_load_f16(scales), m = q4 ? f_load_f16(scales + LANES) : f_zero();
    for (int r = 0; r < R; r++) {
      const RowGroup *row = x + r * groups + g;
      sum[r] = f_fma(f_mul(d, f_set1(row->scale)), i_to_float(c[r]), sum[r]);
      if (q4) sum[r] = f_fma(m, f_set1(row->offset), sum[r]);
    }
  }
  for (int r = 0; r < R; r++) {
    if (lanes == LANES) f_store(y + r * n, sum[r]);
    else f_store_n(y + r * n, sum[r], lanes);
  }
}

ALWAYS void channels(const uint8_t *w, const RowGroup *x, float *y, int64_t rows, int64_t groups, int64_t n, int lanes, int q4) {
  int64_t r = 0;
#define ROWS(R) tile(w, x + r * groups, y + r * n, groups, n, lanes, R, q4)
  for (; r + MOST_ROWS <= rows; r += MOST_ROWS) ROWS(MOST_ROWS);
  if (rows - r >= 4) ROWS(4), r += 4;
  switch (rows - r) {
    case 3: ROWS(3); break;
    case 2: ROWS(2); break;
    case 1: ROWS(1); break;
  }
#undef ROWS
}

static void product(const uint8_t *w, const RowGroup *x, float *y, int64_t rows, int64_t n, int64_t groups, int q4) {
  const int64_t blocks = (n + LANES - 1) / LANES, bytes = groups * (q4 ? Q4_BYTES : Q8_BYTES);
  const int threads = threads_for(blocks * groups * (2 + rows), GRAIN * 16);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t b = 0; b < blocks; b++) {
    const int lanes = n - b * LANES < LANES ? (int)(n - b * LANES) : LANES;
    if (q4) channels(w + b * bytes, x, y + b * LANES, rows, groups, n, lanes, 1);
    else channels(w + b * bytes, x, y + b * LANES, rows, groups, n, lanes, 0);
  }
}

// x [rows, k], y [rows, n] contiguous; q4 or else q8. Returns 1 where there was no memory for the quantised rows.
KERNEL(int, block_linear)(const float *x, const uint8_t *w, float *y, int64_t rows, int64_t n, int64_t k, int q4) {
  RowGroup small[STACK_GROUPS];
  const int64_t groups = k / GROUP, total = rows * groups;
  RowGroup *quantised = total <= STACK_GROUPS ? small : malloc((size_t)total * sizeof(RowGroup));
  if (!quantised) return 1;
  const int threads = threads_for(total, STACK_GROUPS);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < total; i++) quantise(x + i * GROUP, quantised + i);
  product(w, quantised, y, rows, n, groups, q4);
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
