// The inner loops of attention: scores of some queries against blocks of keys, their softmax, and weighted sums of values.
//
// Products are added one after another, in the order of d or of the keys, in sixteen lanes at once; what is done side by side
// (lanes, columns, queries) never meets. R and C are compile-time numbers, so the sums live in registers.
#ifndef SPECDEC_ATTENTION_H
#define SPECDEC_ATTENTION_H

#include "simd.h"

#define BLOCK 16
#define MOST 6   // queries summed side by side
#define AHEAD 4  // blocks whose values are fetched ahead of their use: a few hundred cycles, what memory takes
#define MOST_COLUMNS 4

// Columns (blocks of scores, or sixteens of the head) that R queries sum at once: enough independent chains to hide the
// latency of fma, few enough to stay in registers.
#if SPECDEC_LEVEL == 2
#define COLUMNS(R) ((R) <= 3 ? 4 : 2)
#elif SPECDEC_LEVEL == 1
#define COLUMNS(R) ((R) == 1 ? 4 : (R) <= 3 ? 2 : 1)
#else
#define COLUMNS(R) 1
#endif

// Sixteen entries of the pool; those of bfloat16 in mixed order, until in_order.
ALWAYS f32x16 load(const void *p, int64_t at, const int bf16) {
  return bf16 ? f_load_bf16_mixed((const uint16_t *)p + at) : f_load((const float *)p + at);
}
ALWAYS f32x16 in_order(f32x16 x, const int bf16) { return bf16 ? f_unmix(x) : x; }

// The first 8 entries only, for heads narrower than a vector.
ALWAYS f32x16 load_half(const void *p, int64_t at, const int bf16) {
  union { float wide[LANES]; uint16_t narrow[LANES]; } t = {{0}};
  if (bf16) memcpy(t.narrow, (const uint16_t *)p + at, 8 * sizeof(uint16_t));
  else memcpy(t.wide, (const float *)p + at, 8 * sizeof(float));
  return bf16 ? f_load_bf16_mixed(t.narrow) : f_load(t.wide);
}

// The blocks of a table lie anywhere, so the processor cannot guess where the next one starts.
ALWAYS void fetch(const void *p, int64_t at, const int bf16) {
  __builtin_prefetch((const char *)p + (size_t)at * (bf16 ? sizeof(uint16_t) : sizeof(float)));
}

// Keeps the compiler from holding the broadcasts of one column for the next: registers are for the sums.
#define NEXT_COLUMN() __asm__ volatile("" ::: "memory")

// Scores of R queries against C blocks. q [R, hd]; at: where each block starts.
ALWAYS void score(const int R, const int C, const int bf16, const float *q, int64_t hd, const void *keys, const int64_t *at,
                  float *s, int64_t width) {
  f32x16 sum[MOST * MOST_COLUMNS];
#pragma GCC unroll 24
  for (int i = 0; i < R * C; i++) sum[i] = f_zero();
  for (int64_t d = 0; d < hd; d++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      f32x16 k = load(keys, at[c] + d * BLOCK, bf16);
      fetch(keys, at[c + C] + d * BLOCK, bf16);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) sum[r * C + c] = f_fma(f_set1(q[r * hd + d]), k, sum[r * C + c]);
      if (C > 1) NEXT_COLUMN();
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) f_store(s + r * width + c * BLOCK, in_order(sum[r * C + c], bf16));
}

ALWAYS void score_blocks(const int R, const int bf16, const float *q, int64_t hd, const void *keys, const int64_t *at,
                         int64_t n_blocks, float *s, int64_t width) {
  const int C = COLUMNS(R);
  int64_t b = 0;
  for (; b + C <= n_blocks; b += C) score(R, C, bf16, q, hd, keys, at + b, s + b * BLOCK, width);
  for (; b < n_blocks; b++) score(R, 1, bf16, q, hd, keys, at + b, s + b * BLOCK, width);
}

// Maximum of scores [from, to) of s, which count from a position that is a multiple of 16. Lanes that share a vector with them
// are emptied.
static float maximum(float *s, int64_t from, int64_t to) {
  int64_t begin = from & ~(int64_t)15, end = (to + 15) & ~(int64_t)15;
  for (int64_t j = begin; j < from; j++) s[j] = -INFINITY;
  for (int64_t j = to; j < end; j++) s[j] = -INFINITY;
  f32x16 most = f_set1(-INFINITY);
  for (int64_t j = begin; j < end; j += LANES) most = f_max(f_load(s + j), most);
  return f_max_lanes(most);
}

// The same scores become probabilities before division, p = exp(s - m), and empty lanes 0; returns their sum.
static float soften(float *s, int64_t from, int64_t to, float m) {
  f32x16 sum = f_zero();
  for (int64_t j = from & ~(int64_t)15; j < to; j += LANES) {
    f32x16 p = f_exp(f_sub(f_load(s + j), f_set1(m)));
    f_store(s + j, p);
    sum = f_add(sum, p);
  }
  return f_sum(sum);
}

// n keys in order: `run` of them lie together from each place in `at` on, and the first `skip` of those are passed over.
// Those of `ahead` places later are fetched.
typedef struct {
  const int64_t *at;
  int64_t run, skip, n, ahead;
} Span;

// o += p . v over the keys of a span, for C sixteens of the head from d on. p [R, ld_p].
ALWAYS void weigh(const int R, const int C, const int bf16, const int narrow, const float *p, int64_t ld_p, const void *values,
                  const Span *keys, int64_t hd, int64_t d, float *o, int64_t ld_o) {
  f32x16 sum[MOST * MOST_COLUMNS];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r * C + c] = f_load(o + r * ld_o + c * LANES);
  const int64_t *at = keys->at, n = keys->n, run = keys->run, ahead = keys->ahead;
  int64_t skip = keys->skip;
  for (int64_t j = 0, stop; j < n; j = stop, at++, skip = 0) {
    stop = j + run - skip < n ? j + run - skip : n;
    int64_t v_at = at[0] + skip * hd + d, next = at[ahead] + skip * hd + d;
    for (int64_t i = j; i < stop; i++, v_at += hd, next += hd) {
      fetch(values, next, bf16);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        f32x16 v = narrow ? load_half(values, v_at + c * LANES, bf16) : load(values, v_at + c * LANES, bf16);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) sum[r * C + c] = f_fma(f_set1(p[r * ld_p + i]), v, sum[r * C + c]);
        if (C > 1) NEXT_COLUMN();
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) f_store(o + r * ld_o + c * LANES, sum[r * C + c]);
}

// Entries [d, end) of the head; the last sixteen ends where the head ends and may overlap the one before.
ALWAYS void weigh_entries(const int R, const int bf16, int64_t hd, int64_t d, int64_t end, const float *p, int64_t ld_p,
                          const void *values, const Span *keys, float *o, int64_t ld_o) {
  const int C = COLUMNS(R);
  if (hd < LANES) {
    weigh(R, 1, bf16, 1, p, ld_p, values, keys, hd, 0, o, ld_o);
    return;
  }
  for (; d + C * LANES <= end; d += C * LANES) weigh(R, C, bf16, 0, p, ld_p, values, keys, hd, d, o + d, ld_o);
  for (; d + LANES <= end; d += LANES) weigh(R, 1, bf16, 0, p, ld_p, values, keys, hd, d, o + d, ld_o);
  if (d < end) weigh(R, 1, bf16, 0, p, ld_p, values, keys, hd, hd - LANES, o + d, ld_o);
}

// Each number of queries, with each type of storage, as a function of its own.
#define EACH_R(CASE) switch (R) { case 1: CASE(1); break; case 2: CASE(2); break; case 3: CASE(3); break; \
                                  case 4: CASE(4); break; case 5: CASE(5); break; default: CASE(6); }
#define SCORE_BF16(R) score_blocks(R, 1, q, hd, keys, at, n_blocks, s, width)
#define SCORE_F32(R) score_blocks(R, 0, q, hd, keys, at, n_blocks, s, width)
#define WEIGH_BF16(R) weigh_entries(R, 1, hd, d, end, p, ld_p, values, keys, o, ld_o)
#define WEIGH_F32(R) weigh_entries(R, 0, hd, d, end, p, ld_p, values, keys, o, ld_o)

static void score_any(int64_t R, int bf16, const float *q, int64_t hd, const void *keys, const int64_t *at, int64_t n_blocks,
                      float *s, int64_t width) {
  if (bf16) EACH_R(SCORE_BF16) else EACH_R(SCORE_F32)
}

static void weigh_any(int64_t R, int bf16, int64_t hd, int64_t d, int64_t end, const float *p, int64_t ld_p,
                      const void *values, const Span *keys, float *o, int64_t ld_o) {
  if (bf16) EACH_R(WEIGH_BF16) else EACH_R(WEIGH_F32)
}

#endif
