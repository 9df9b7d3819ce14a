// The inner loops of attention: scores of some queries against blocks of keys, their softmax, and weighted sums of values.
//
// Products are added one after another, in the order of d or of the keys, in sixteen lanes at once; what is done side by side
// (lanes, columns, queries) never meets. R and C are compile-time numbers, so the sums live in registers.
#ifndef SPECDEC_ATTENTION_H
#define SPECDEC_ATTENTION_H

#include "kv.h"

#define BLOCK 16
#define MOST 6   // queries summed side by side
#define AHEAD 4  // blocks whose values are fetched ahead of their use: a few hundred cycles, what memory takes
#define MOST_COLUMNS 4
#define LINE 4  // rows of sixteen bytes that share a line of the cache

// Columns (blocks of scores, or sixteens of the head) that R queries sum at once: enough independent chains to hide the
// latency of fma, few enough to stay in registers.
#if SPECDEC_LEVEL == 2
#define COLUMNS(R) 4
#elif SPECDEC_LEVEL == 1
#define COLUMNS(R) ((R) == 1 ? 4 : (R) <= 3 ? 2 : 1)
#else
#define COLUMNS(R) 1
#endif

// Beside the kinds of storage (kv.h): a tile's own copy of some blocks as floats, which is in the first-level cache.
#define COPIED (KV_INT4 + 1)

// Sixteen floats of the pool; those of bfloat16 in mixed order, until in_order.
ALWAYS f32x16 load(const void *p, int64_t at, const int kind) {
  return kind == KV_BF16 ? f_load_bf16_mixed((const uint16_t *)p + at) : f_load((const float *)p + at);
}
ALWAYS f32x16 in_order(f32x16 x, const int kind) { return kind == KV_BF16 ? f_unmix(x) : x; }

// The first 8 entries only, for heads narrower than a vector.
ALWAYS f32x16 load_half(const void *p, int64_t at, const int kind) {
  union { float wide[LANES]; uint16_t narrow[LANES]; } t = {{0}};
  if (kind == KV_BF16) memcpy(t.narrow, (const uint16_t *)p + at, 8 * sizeof(uint16_t));
  else memcpy(t.wide, (const float *)p + at, 8 * sizeof(float));
  return kind == KV_BF16 ? f_load_bf16_mixed(t.narrow) : f_load(t.wide);
}

// The blocks of a table lie anywhere, so the processor cannot guess where the next one starts.
ALWAYS void fetch(const void *p, int64_t at, const int kind) {
  if (kind != COPIED) __builtin_prefetch((const char *)p + at * kv_element(kind));
}

// Keeps the compiler from holding the broadcasts of one column for the next: registers are for the sums. AVX-512 has enough for
// both, and processors that load hardly once a cycle then load each broadcast once.
#if SPECDEC_LEVEL == 2
#define NEXT_COLUMN()
#else
#define NEXT_COLUMN() __asm__ volatile("" ::: "memory")
#endif

// Copy blocks of bfloat16 as floats, one behind the other: keys in order, values in the order in which they are summed.
static void copy_blocks(const void *p, const int64_t *at, int64_t n_blocks, int64_t hd, const int values, float *to) {
  for (int64_t b = 0; b < n_blocks; b++)
    for (int64_t i = 0; i < BLOCK * hd; i += LANES, to += LANES) {
      const f32x16 x = load(p, at[b] + i, KV_BF16);
      f_store(to, values ? x : in_order(x, KV_BF16));
      fetch(p, at[b + AHEAD] + i, KV_BF16);
    }
}

// Scores of R queries against C blocks. q [R, hd]; at: where each block starts.
ALWAYS void score(const int R, const int C, const int kind, const float *q, int64_t hd, const void *keys, const int64_t *at,
                  float *s, int64_t width) {
  f32x16 sum[MOST * MOST_COLUMNS];
#pragma GCC unroll 24
  for (int i = 0; i < R * C; i++) sum[i] = f_zero();
  for (int64_t d = 0; d < hd; d++) {
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      f32x16 k = load(keys, at[c] + d * BLOCK, kind);
      fetch(keys, at[c + C] + d * BLOCK, kind);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) sum[r * C + c] = f_fma(f_set1(q[r * hd + d]), k, sum[r * C + c]);
      if (C > 1) NEXT_COLUMN();
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) f_store(s + r * width + c * BLOCK, in_order(sum[r * C + c], kind));
}

// The same against codes. Of each group of d the products with its codes are added, as above (of int4 in the order in which
// its bytes hold them), and the groups in order: score = fma(scale, sum, score) from 0.
ALWAYS void score_codes(const int R, const int C, const int kind, const float *q, int64_t hd, const int8_t *keys,
                        const int64_t *at, float *s, int64_t width) {
  const int64_t bytes = kv_row(kind, kv_group(hd)), n_bytes = kv_row(kind, hd);
  for (int64_t first = 0; first < n_bytes; first += bytes) {
    f32x16 sum[MOST * MOST_COLUMNS];
#pragma GCC unroll 24
    for (int i = 0; i < R * C; i++) sum[i] = f_zero();
    for (int64_t b = first; b < first + bytes; b += LINE) {
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) fetch(keys, at[c + C] + b * BLOCK, kind);
      const float *from = q + (kind == KV_INT4 ? b / 8 * 16 + b % 8 : b);
#pragma GCC unroll 4
      for (int i = 0; i < LINE; i++) {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          const int8_t *p = keys + at[c] + (b + i) * BLOCK;
          f32x16 k = kind == KV_INT4 ? f_load_i4_low(p) : f_load_i8(p);
#pragma GCC unroll 6
          for (int r = 0; r < R; r++) sum[r * C + c] = f_fma(f_set1(from[r * hd + i]), k, sum[r * C + c]);
          if (kind == KV_INT4) {
            k = f_load_i4_high(p);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) sum[r * C + c] = f_fma(f_set1(from[r * hd + i + 8]), k, sum[r * C + c]);
          }
          if (C > 1) NEXT_COLUMN();
        }
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      const f32x16 scale = f_load_bf16((const uint16_t *)(keys + at[c] + kv_codes(kind, hd)) + first / bytes * BLOCK);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        float *to = s + r * width + c * BLOCK;
        f_store(to, f_fma(scale, sum[r * C + c], first ? f_load(to) : f_zero()));
      }
    }
  }
}

ALWAYS void score_blocks(const int R, const int kind, const float *q, int64_t hd, const void *keys, const int64_t *at,
                         int64_t n_blocks, float *s, int64_t width) {
  const int C = COLUMNS(R);
  int64_t b = 0;
  if (kv_quantised(kind)) {
    for (; b + C <= n_blocks; b += C) score_codes(R, C, kind, q, hd, keys, at + b, s + b * BLOCK, width);
    for (; b < n_blocks; b++) score_codes(R, 1, kind, q, hd, keys, at + b, s + b * BLOCK, width);
    return;
  }
  for (; b + C <= n_blocks; b += C) score(R, C, kind, q, hd, keys, at + b, s + b * BLOCK, width);
  if (C > 2 && b + 2 <= n_blocks) {
    score(R, 2, kind, q, hd, keys, at + b, s + b * BLOCK, width);
    b += 2;
  }
  for (; b < n_blocks; b++) score(R, 1, kind, q, hd, keys, at + b, s + b * BLOCK, width);
}

// Maximum of scores [from, to) of s, which count from a position that is a multiple of 16. Lanes that share a vector with them
// are emptied.
static float maximum(float *s, int64_t from, int64_t to) {
  int64_t begin = from & ~(int64_t)15, end = (to + 15) & ~(int64_t)15;
  for (int64_t j = begin; j < from; j++) s[j] = -INFINITY;
  for (int64_t j = to; j < end; j++) s[j] = -INFINITY;
  f32x16 most[4];  // four at once: the next maximum need not wait for the last one's latency
  for (int k = 0; k < 4; k++) most[k] = f_set1(-INFINITY);
  int64_t j = begin;
  for (; j + 4 * LANES <= end; j += 4 * LANES)
    for (int k = 0; k < 4; k++) most[k] = f_max(f_load(s + j + k * LANES), most[k]);
  for (; j < end; j += LANES) most[0] = f_max(f_load(s + j), most[0]);
  return f_max_lanes(f_max(f_max(most[0], most[1]), f_max(most[2], most[3])));
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
// Those of `ahead` places later are fetched. A place of codes is where their block starts, plus the slot in it.
typedef struct {
  const int64_t *at;
  int64_t run, skip, n, ahead;
} Span;

// o += p . v over the keys of a span, for C sixteens of the head from d on. p [R, ld_p].
ALWAYS void weigh(const int R, const int C, const int kind, const int narrow, const float *p, int64_t ld_p, const void *values,
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
      fetch(values, next, kind);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        f32x16 v = narrow ? load_half(values, v_at + c * LANES, kind) : load(values, v_at + c * LANES, kind);
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

// The same with codes: a key's weight for a group is fl(p * scale). Whole blocks have theirs computed side by side, keys of a
// path one by one: one rounding either way.
ALWAYS void weigh_codes(const int R, const int C, const int kind, const float *p, int64_t ld_p, const int8_t *values,
                        const Span *keys, int64_t hd, int64_t d, float *o, int64_t ld_o) {
  const int64_t group = kv_group(hd), row = kv_row(kind, hd), first = kv_row(kind, d), n = keys->n, run = keys->run;
  const int64_t n_groups = C * LANES > group ? C * LANES / group : 1, *at = keys->at, ahead = keys->ahead;
  const int64_t per_column = group == LANES ? R * BLOCK : 0, per_pair = group == LANES ? 2 * R * BLOCK : R * BLOCK;
  int64_t skip = keys->skip;
  f32x16 sum[MOST * MOST_COLUMNS];
  float weights[MOST_COLUMNS * MOST * BLOCK];  // [group, R, slot]
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r * C + c] = f_load(o + r * ld_o + c * LANES);
  for (int64_t j = 0, stop; j < n; j = stop, at++, skip = 0) {
    stop = j + run - skip < n ? j + run - skip : n;
    const int64_t place = at[0] % BLOCK + skip, next = at[ahead] - at[ahead] % BLOCK - (at[0] - at[0] % BLOCK);
    const int8_t *block = values + at[0] - at[0] % BLOCK;
    const uint16_t *scales = (const uint16_t *)(block + kv_codes(kind, hd)) + d / group * BLOCK;
    for (int64_t g = 0; g < n_groups; g++)
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        float *to = weights + (g * R + r) * BLOCK;
        const float *from = p + r * ld_p + j - place;
        if (run > 1) f_store(to, f_mul(f_load(from), f_load_bf16(scales + g * BLOCK)));
        else to[place] = from[place] * from_bf16(scales[g * BLOCK + place]);
      }
    const int8_t *v_at = block + place * row + first;
    for (int64_t t = place; t < place + stop - j; t++, v_at += row) {
      __builtin_prefetch(v_at + next);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const float *w = weights + c / 2 * per_pair + c % 2 * per_column + t;
        f32x16 v = kind == KV_INT4 ? f_load_i4(v_at + c * 8) : f_load_i8(v_at + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) sum[r * C + c] = f_fma(f_set1(w[r * BLOCK]), v, sum[r * C + c]);
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
ALWAYS void weigh_entries(const int R, const int kind, int64_t hd, int64_t d, int64_t end, const float *p, int64_t ld_p,
                          const void *values, const Span *keys, float *o, int64_t ld_o) {
  const int C = COLUMNS(R);
  if (kv_quantised(kind)) {
    for (; d + C * LANES <= end; d += C * LANES) weigh_codes(R, C, kind, p, ld_p, values, keys, hd, d, o + d, ld_o);
    for (; d < end; d += LANES) weigh_codes(R, 1, kind, p, ld_p, values, keys, hd, d, o + d, ld_o);
    return;
  }
  if (hd < LANES) {
    weigh(R, 1, kind, 1, p, ld_p, values, keys, hd, 0, o, ld_o);
    return;
  }
  for (; d + C * LANES <= end; d += C * LANES) weigh(R, C, kind, 0, p, ld_p, values, keys, hd, d, o + d, ld_o);
  for (; d + LANES <= end; d += LANES) weigh(R, 1, kind, 0, p, ld_p, values, keys, hd, d, o + d, ld_o);
  if (d < end) weigh(R, 1, kind, 0, p, ld_p, values, keys, hd, hd - LANES, o + d, ld_o);
}

// Each number of queries, with each type of storage, as a function of its own.
#define EACH_R(CASE) switch (R) { case 1: CASE(1); break; case 2: CASE(2); break; case 3: CASE(3); break; \
                                  case 4: CASE(4); break; case 5: CASE(5); break; default: CASE(6); }
#define EACH_KIND(CASE) switch (kind) { case KV_F32: EACH_R(CASE##_F32) break; case KV_BF16: EACH_R(CASE##_BF16) break; \
                                        case KV_INT8: EACH_R(CASE##_INT8) break; case KV_INT4: EACH_R(CASE##_INT4) break; \
                                        default: EACH_R(CASE##_COPIED) }
#define SCORE(R, KIND) score_blocks(R, KIND, q, hd, keys, at, n_blocks, s, width)
#define SCORE_F32(R) SCORE(R, KV_F32)
#define SCORE_BF16(R) SCORE(R, KV_BF16)
#define SCORE_INT8(R) SCORE(R, KV_INT8)
#define SCORE_INT4(R) SCORE(R, KV_INT4)
#define SCORE_COPIED(R) SCORE(R, COPIED)
#define WEIGH(R, KIND) weigh_entries(R, KIND, hd, d, end, p, ld_p, values, keys, o, ld_o)
#define WEIGH_F32(R) WEIGH(R, KV_F32)
#define WEIGH_BF16(R) WEIGH(R, KV_BF16)
#define WEIGH_INT8(R) WEIGH(R, KV_INT8)
#define WEIGH_INT4(R) WEIGH(R, KV_INT4)
#define WEIGH_COPIED(R) WEIGH(R, COPIED)

static void score_any(int64_t R, int kind, const float *q, int64_t hd, const void *keys, const int64_t *at, int64_t n_blocks,
                      float *s, int64_t width) {
  EACH_KIND(SCORE)
}

static void weigh_any(int64_t R, int kind, int64_t hd, int64_t d, int64_t end, const float *p, int64_t ld_p,
                      const void *values, const Span *keys, float *o, int64_t ld_o) {
  EACH_KIND(WEIGH)
}

#endif
