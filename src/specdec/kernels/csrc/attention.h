// The two inner loops of attention: scores of some queries against blocks of keys, and their weighted sums of values.
//
// Both add one product after another, in the order of d or of the keys, in sixteen lanes at once; what is done side by side
// (lanes, columns, queries) never meets. R and C are compile-time numbers, so the sums live in registers.
#ifndef SPECDEC_ATTENTION_H
#define SPECDEC_ATTENTION_H

#include "simd.h"

#define BLOCK 16
#define MOST 6    // queries summed side by side
#define AHEAD 64  // keys whose values are fetched ahead of their use: a few hundred cycles, what memory takes
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

// Scores of R queries against C blocks. q [hd][R]; at: where each block's keys start.
ALWAYS void score(const int R, const int C, const int bf16, const float *q, int64_t hd, const void *keys, const int64_t *at,
                  float *s, int64_t width) {
  f32x16 sum[MOST * MOST_COLUMNS];
#pragma GCC unroll 24
  for (int i = 0; i < R * C; i++) sum[i] = f_zero();
  for (int64_t d = 0; d < hd; d++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      f32x16 k = load(keys, at[c * BLOCK] + d * BLOCK, bf16);
      fetch(keys, at[(c + C) * BLOCK] + d * BLOCK, bf16);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) sum[r * C + c] = f_fma(f_set1(q[d * R + r]), k, sum[r * C + c]);
      if (C > 1) NEXT_COLUMN();
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) f_store(s + r * width + c * BLOCK, in_order(sum[r * C + c], bf16));
}

ALWAYS void score_blocks(const int R, const int bf16, const float *q, int64_t hd, const void *keys, const int64_t *row,
                         int64_t n_blocks, float *s, int64_t width) {
  const int C = COLUMNS(R);
  int64_t b = 0;
  for (; b + C <= n_blocks; b += C) score(R, C, bf16, q, hd, keys, row + b * BLOCK, s + b * BLOCK, width);
  for (; b < n_blocks; b++) score(R, 1, bf16, q, hd, keys, row + b * BLOCK, s + b * BLOCK, width);
}

// o += p . v over n keys in order, for C sixteens of the head from d on. p [R, ld_p]; row: where each key's value starts.
ALWAYS void weigh(const int R, const int C, const int bf16, const int narrow, const float *p, int64_t ld_p, const void *values,
                  const int64_t *row, int64_t ahead, int64_t n, int64_t d, float *o, int64_t ld_o) {
  f32x16 sum[MOST * MOST_COLUMNS];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r * C + c] = f_load(o + r * ld_o + c * LANES);
  for (int64_t j = 0; j < n; j++) {
    fetch(values, row[j + ahead] + d, bf16);
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      int64_t at = row[j] + d + c * LANES;
      f32x16 v = narrow ? load_half(values, at, bf16) : load(values, at, bf16);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) sum[r * C + c] = f_fma(f_set1(p[r * ld_p + j]), v, sum[r * C + c]);
      if (C > 1) NEXT_COLUMN();
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) f_store(o + r * ld_o + c * LANES, sum[r * C + c]);
}

ALWAYS void weigh_keys(const int R, const int bf16, int64_t hd, const float *p, int64_t ld_p, const void *values,
                       const int64_t *row, int64_t ahead, int64_t n, float *o, int64_t ld_o) {
  const int C = COLUMNS(R);
  if (hd < LANES) {
    weigh(R, 1, bf16, 1, p, ld_p, values, row, ahead, n, 0, o, ld_o);
    return;
  }
  int64_t d = 0;
  for (; d + C * LANES <= hd; d += C * LANES) weigh(R, C, bf16, 0, p, ld_p, values, row, ahead, n, d, o + d, ld_o);
  for (; d + LANES <= hd; d += LANES) weigh(R, 1, bf16, 0, p, ld_p, values, row, ahead, n, d, o + d, ld_o);
  if (d < hd) weigh(R, 1, bf16, 0, p, ld_p, values, row, ahead, n, hd - LANES, o + d, ld_o);
}

// Scores become probabilities before division, p = exp(s - m), and den their sum in order over each query's slots [from, to),
// for R queries over the sixteens that hold slots [begin, end). Sums of R queries run side by side, beside the exponentials.
ALWAYS void soften_slots(const int R, float *s, int64_t width, const float *m, const int64_t *from, const int64_t *to,
                         int64_t begin, int64_t end, float *den) {
  float total[MOST];
  int64_t last_from = from[0], first_to = to[0];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    total[r] = 0;
    last_from = from[r] > last_from ? from[r] : last_from;
    first_to = to[r] < first_to ? to[r] : first_to;
  }
  for (int64_t j = begin & ~(int64_t)15; j < end; j += LANES) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      float *sr = s + r * width + j;
      f_store(sr, f_exp(f_sub(f_load(sr), f_set1(m[r]))));
    }
    if (last_from <= j && j + LANES <= first_to) {
      for (int64_t t = j; t < j + LANES; t++)
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) total[r] += s[r * width + t];
    } else {
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
        for (int64_t t = from[r] > j ? from[r] : j; t < to[r] && t < j + LANES; t++) total[r] += s[r * width + t];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) den[r] = total[r];
}

// Each number of queries, with each type of storage, as a function of its own.
#define EACH_R(CASE) switch (R) { case 1: CASE(1); break; case 2: CASE(2); break; case 3: CASE(3); break; \
                                  case 4: CASE(4); break; case 5: CASE(5); break; default: CASE(6); }
#define SCORE_BF16(R) score_blocks(R, 1, q, hd, keys, row, n_blocks, s, width)
#define SCORE_F32(R) score_blocks(R, 0, q, hd, keys, row, n_blocks, s, width)
#define WEIGH_BF16(R) weigh_keys(R, 1, hd, p, ld_p, values, row, ahead, n, o, ld_o)
#define WEIGH_F32(R) weigh_keys(R, 0, hd, p, ld_p, values, row, ahead, n, o, ld_o)
#define SOFTEN(R) soften_slots(R, s, width, m, from, to, begin, end, den)

static void score_any(int R, int bf16, const float *q, int64_t hd, const void *keys, const int64_t *row, int64_t n_blocks,
                      float *s, int64_t width) {
  if (bf16) EACH_R(SCORE_BF16) else EACH_R(SCORE_F32)
}

static void weigh_any(int R, int bf16, int64_t hd, const float *p, int64_t ld_p, const void *values, const int64_t *row,
                      int64_t ahead, int64_t n, float *o, int64_t ld_o) {
  if (bf16) EACH_R(WEIGH_BF16) else EACH_R(WEIGH_F32)
}

static void soften_any(int R, float *s, int64_t width, const float *m, const int64_t *from, const int64_t *to, int64_t begin,
                       int64_t end, float *den) {
  EACH_R(SOFTEN)
}

#endif
