// y = x W^T for a weight in groups of 32 (blocks.h): rows are quantised first, then each thread takes a range of channels.
#include <stdlib.h>

#include "products.h"
#include "threads.h"
#if SPECDEC_TILES
#include "tiles.h"
#endif

#define PREFETCH_BYTES 1536  // ahead in the stream of weights, which rarely fit a cache
#define STACK_GROUPS 512     // rows this small are quantised on the stack (24 KB), larger ones on the heap
#define UNPACK_ROWS 24       // rows that gain by unpacking q4 weights beforehand
#define UNPACK_GROUPS 64     // the most groups of them (40 KB a block)
#define GOOD_ROWS (SPECDEC_LEVEL == 2 ? 6 : 4)  // of many rows: where so many are at work, none of their sums leaves the registers
#define GRAIN 96             // groups of 16 channels times (2 + rows) that are worth a thread

// Forms of a weight's groups: as they are stored, and q4 taken apart.
enum { FORM_Q8, FORM_Q4, FORM_U4 };

ALWAYS int64_t group_bytes(int form) { return form == FORM_Q8 ? Q8_BYTES : form == FORM_Q4 ? Q4_BYTES : U4_BYTES; }
ALWAYS f32x16 scales(const uint8_t *w, int form) {
  if (form == FORM_U4) return f_load((const float *)(w + 512));
  return f_load_f16((const uint16_t *)(w + (form == FORM_Q4 ? 256 : 512)));
}
ALWAYS f32x16 offsets(const uint8_t *w, int form) {
  if (form == FORM_U4) return f_load((const float *)(w + 576));
  return form == FORM_Q4 ? f_load_f16((const uint16_t *)(w + 288)) : f_zero();
}

// The float steps of one group for R rows, whose integer sums are c.
ALWAYS void scale(f32x16 *sum, const i32x16 *c, f32x16 d, f32x16 m, const RowGroup *x, int64_t stride, int R, int form) {
  for (int r = 0; r < R; r++) {
    const RowGroup *row = x + r * stride;
    sum[r] = f_fma(f_mul(d, f_set1(row->scale)), i_to_float(c[r]), sum[r]);
    if (form != FORM_Q8) sum[r] = f_fma(m, f_set1(row->offset), sum[r]);
  }
}

ALWAYS void finish(float *y, const float *add, f32x16 *sum, int64_t ld, int lanes, int R) {
  for (int r = 0; r < R; r++) {
    if (add) sum[r] = f_add(lanes == LANES ? f_load(add + r * ld) : f_load_n(add + r * ld, lanes), sum[r]);
    if (lanes == LANES) f_store(y + r * ld, sum[r]);
    else f_store_n(y + r * ld, sum[r], lanes);
  }
}

// Lines of a later group of B blocks; the last groups fetch the first ones of the blocks that follow these.
ALWAYS void prefetch(const uint8_t *w, int64_t next, int64_t bytes, int64_t left, int B) {
  if (left * bytes <= PREFETCH_BYTES) w += (B - 1) * next;
  for (int b = 0; b < B; b++)
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(w + b * next + PREFETCH_BYTES + line);
}

// Sixteen channels of R rows, or B blocks of sixteen. B, R and form are constants where this is inlined. The first rows of a
// block find it `fresh`, in memory; the others find it in a cache.
ALWAYS void few(const uint8_t *w, const RowGroup *x, float *y, const float *add, int64_t groups, int64_t ld, int lanes, int B,
                int R, int form, int fresh) {
  const int64_t bytes = group_bytes(form), next = groups * bytes;
  f32x16 sum[MOST_BLOCKS][MOST_ROWS];
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) sum[b][r] = f_zero();
  for (int64_t g = 0; g < groups; g++, w += bytes) {
    i32x16 c[MOST_BLOCKS][MOST_ROWS];
    if (fresh) prefetch(w, next, bytes, groups - g, B);
    if (form == FORM_Q8) dots_q8(w, next, x + g, groups, B, R, c);
    else if (form == FORM_Q4) dots_q4(w, next, x + g, groups, B, R, c);
    else dots_u4(w, next, x + g, groups, B, R, c);
    for (int b = 0; b < B; b++)
      scale(sum[b], c[b], scales(w + b * next, form), offsets(w + b * next, form), x + g, groups, R, form);
  }
  for (int b = 0; b < B; b++) finish(y + b * LANES, add ? add + b * LANES : 0, sum[b], ld, lanes, R);
}

// All rows, in parts that are about as large and no larger than registers allow.
ALWAYS void all(const uint8_t *w, const RowGroup *x, float *y, const float *add, int64_t rows, int64_t groups, int64_t ld,
                int lanes, int B, int form) {
  const int64_t most = B < MOST_BLOCKS ? 4 : MOST_ROWS, good = B < MOST_BLOCKS ? 4 : GOOD_ROWS;
  int64_t r = 0;
  for (int64_t parts = rows <= most ? rows > 0 : (rows + good - 1) / good; parts > 0; parts--) {
    const int64_t R = (rows - r + parts - 1) / parts;
    const int fresh = form != FORM_U4 && !r;
    switch (R) {
#define ROWS(R) case R: few(w, x + r * groups, y + r * ld, add ? add + r * ld : 0, groups, ld, lanes, B, R, form, fresh); break
      ROWS(1);
      ROWS(2);
      ROWS(3);
      ROWS(4);
    }
#if SPECDEC_LEVEL == 2
    if (B == MOST_BLOCKS) {
      switch (R) {
        ROWS(5);
        ROWS(6);
        ROWS(7);
        ROWS(8);
      }
    }
#endif
#undef ROWS
    r += R;
  }
}

#if SPECDEC_TILES
// Rows that go faster in company: the first ones, as many as fill tiles. Returns their number.
ALWAYS int64_t many(const uint8_t *w, const RowGroup *x, float *y, const float *add, int64_t rows, int64_t groups, int64_t ld,
                    int lanes, int form) {
  const int64_t bytes = group_bytes(form);
  int64_t r = 0;
  for (; r + TILE_ROWS <= rows; r += TILE_ROWS, x += TILE_ROWS * groups) {
    f32x16 sum[TILE_ROWS];
    for (int i = 0; i < TILE_ROWS; i++) sum[i] = f_zero();
    for (int64_t g = 0; g < groups; g += STAGE) {
      const int count = groups - g < STAGE ? (int)(groups - g) : STAGE;
      const uint8_t *from = w + g * bytes;
      i32x16 c[STAGE][TILE_ROWS];
      prefetch(from, 0, count * bytes, groups, 1);
      tile_dots(from, x + g, groups, count, form == FORM_Q4, c);
      for (int i = 0; i < count; i++, from += bytes)
        scale(sum, c[i], scales(from, form), offsets(from, form), x + g + i, groups, TILE_ROWS, form);
    }
    finish(y + r * ld, add ? add + r * ld : 0, sum, ld, lanes, TILE_ROWS);
  }
  return r;
}
#endif

ALWAYS void block(const uint8_t *w, const RowGroup *x, float *y, const float *add, int64_t rows, int64_t groups, int64_t ld,
                  int lanes, int B, int form) {
#if SPECDEC_TILES
  const int64_t next = groups * group_bytes(form);
  int64_t done = 0;
  for (int b = 0; b < B; b++)
    done = many(w + b * next, x, y + b * LANES, add ? add + b * LANES : 0, rows, groups, ld, lanes, form);
  all(w, x + done * groups, y + done * ld, add ? add + done * ld : 0, rows - done, groups, ld, lanes, B, form);
#else
#if SPECDEC_LEVEL > 0
  if (form == FORM_Q4 && rows >= UNPACK_ROWS && groups <= UNPACK_GROUPS) {
    _Alignas(64) uint8_t unpacked[MOST_BLOCKS * UNPACK_GROUPS][U4_BYTES];
    for (int64_t g = 0; g < B * groups; g++, w += Q4_BYTES) {
      prefetch(w, 0, Q4_BYTES, groups, 1);
      unpack_q4(w, unpacked[g]);
    }
    all(unpacked[0], x, y, add, rows, groups, ld, lanes, B, FORM_U4);
    return;
  }
#endif
  all(w, x, y, add, rows, groups, ld, lanes, B, form);
#endif
}

void block_channels(const uint8_t *w, int q4, const RowGroup *x, int64_t rows, int64_t groups, int64_t n, int64_t first,
                    int64_t last, float *y, const float *add, int64_t ld) {
  const int64_t bytes = groups * (q4 ? Q4_BYTES : Q8_BYTES);
#if SPECDEC_TILES
  if (rows >= TILE_ROWS) tiles_begin();
#endif
  for (int64_t b = first; b < last;) {
    const int lanes = n - b * LANES < LANES ? (int)(n - b * LANES) : LANES;
    const int together = b + MOST_BLOCKS <= last && n >= (b + MOST_BLOCKS) * LANES ? MOST_BLOCKS : 1;
    float *to = y + (b - first) * LANES;
    const float *from = add ? add + (b - first) * LANES : 0;
#define BLOCKS(B, lanes, form) block(w + b * bytes, x, to, from, rows, groups, ld, lanes, B, form)
    if (together > 1 && q4) BLOCKS(MOST_BLOCKS, LANES, FORM_Q4);
    else if (together > 1) BLOCKS(MOST_BLOCKS, LANES, FORM_Q8);
    else if (q4) BLOCKS(1, lanes, FORM_Q4);
    else BLOCKS(1, lanes, FORM_Q8);
#undef BLOCKS
    b += together;
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
