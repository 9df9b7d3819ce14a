// The passes of a decoder layer that treat each row, or each head of a row, by itself.
//
// Where a width is no multiple of sixteen its tail is padded into a vector, so every entry sees the same operations.
#include "rows.h"
#include "threads.h"

#define GRAIN 100000  // entries worth a thread

static int least(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

ALWAYS f32x16 load_up_to(const float *p, int64_t n) { return n >= LANES ? f_load(p) : f_load_n(p, (int)n); }

ALWAYS void store_up_to(float *p, f32x16 x, int64_t n) {
  if (n >= LANES) f_store(p, x);
  else f_store_n(p, x, (int)n);
}

typedef struct {
  const float *x, *weight;
  float *out;
  int64_t rows, d, chunks;
  float eps;
} Norm;

static void norm_chunk(void *context, int64_t chunk) {
  const Norm *c = context;
  const int64_t d = c->d;
  for (int64_t i = part(c->rows, c->chunks, chunk); i < part(c->rows, c->chunks, chunk + 1); i++) {
    const float *xi = c->x + i * d;
    float *oi = c->out + i * d;
    f32x16 squares = f_zero();
    for (int64_t k = 0; k < d; k += LANES) {
      f32x16 v = load_up_to(xi + k, d - k);
      squares = f_fma(v, v, squares);
    }
    f32x16 inverse = f_set1(1.0f / sqrtf(f_sum(squares) / (float)d + c->eps));
    for (int64_t k = 0; k < d; k += LANES)
      store_up_to(oi + k, f_mul(f_mul(load_up_to(xi + k, d - k), inverse), load_up_to(c->weight + k, d - k)), d - k);
  }
}

// out = x / sqrt(mean(x^2) + eps) * weight, each of the rows by itself. Squares are summed by entry modulo 16.
KERNEL(void, rms_norm)(const float *x, const float *weight, float *out, int64_t rows, int64_t d, float eps) {
  int threads = threads_for(rows * d, GRAIN);
  Norm c = {x, weight, out, rows, d, chunks_for(threads, rows), eps};
  specdec_parallel(threads, c.chunks, norm_chunk, &c);
}

// g / (1 + e^-g), written with e^-|g| so that nothing overflows.
ALWAYS f32x16 silu(f32x16 g) {
  f32x16 e = f_exp(f_sub(f_zero(), f_abs(g)));
  f32x16 top = f_select_lt(g, f_zero(), e, f_set1(1.0f));
  return f_mul(g, f_div(top, f_add(f_set1(1.0f), e)));
}

typedef struct {
  const float *gate_up;
  float *out;
  int64_t rows, f, chunks;
} Gate;

static void gate_chunk(void *context, int64_t chunk) {
  const Gate *c = context;
  const int64_t f = c->f;
  for (int64_t i = part(c->rows, c->chunks, chunk); i < part(c->rows, c->chunks, chunk + 1); i++) {
    const float *gate = c->gate_up + 2 * i * f, *up = gate + f;
    for (int64_t k = 0; k < f; k += LANES)
      store_up_to(c->out + i * f + k, f_mul(silu(load_up_to(gate + k, f - k)), load_up_to(up + k, f - k)), f - k);
  }
}

// gate_up [rows, 2 f], gate then up -> out [rows, f].
KERNEL(void, silu_mul)(const float *gate_up, float *out, int64_t rows, int64_t f) {
  int threads = threads_for(rows * f * 4, GRAIN);
  Gate c = {gate_up, out, rows, f, chunks_for(threads, rows)};
  specdec_parallel(threads, c.chunks, gate_chunk, &c);
}

typedef struct {
  float *x;
  const float *cosine, *sine;
  int64_t stride, rows, heads, half, chunks;
} Turn;

static void turn_chunk(void *context, int64_t chunk) {
  const Turn *t = context;
  const int64_t half = t->half;
  for (int64_t i = part(t->rows, t->chunks, chunk); i < part(t->rows, t->chunks, chunk + 1); i++)
    for (int64_t k = 0; k < half; k += LANES) {
      int64_t n = half - k;
      f32x16 c = load_up_to(t->cosine + i * half + k, n), s = load_up_to(t->sine + i * half + k, n);
      for (int64_t h = 0; h < t->heads; h++) {
        float *p = t->x + i * t->stride + h * 2 * half + k;
        f32x16 a = load_up_to(p, n), b = load_up_to(p + half, n);
        store_up_to(p, f_fnma(b, s, f_mul(a, c)), n);
        store_up_to(p + half, f_fma(a, s, f_mul(b, c)), n);
      }
    }
}

// Rotate the halves of every head in place: (a, b) -> (a cos - b sin, b cos + a sin). cos, sin [rows, half].
KERNEL(void, rope)
(float *x, int64_t stride, const float *cosine, const float *sine, int64_t rows, int64_t heads, int64_t half) {
  int threads = threads_for(rows * heads * half * 2, GRAIN);
  Turn t = {x, cosine, sine, stride, rows, heads, half, chunks_for(threads, rows)};
  specdec_parallel(threads, t.chunks, turn_chunk, &t);
}

// Write the rows' keys and values to their slots: keys [blocks, KV, hd, 16], values [blocks, KV, 16, hd], bfloat16 or float32.
// Returns 0, or 1 for a table or slot outside the tables, 2 for a block outside the pool; nothing is written then.
KERNEL(int, store)
(const float *k, int64_t k_stride, const float *v, int64_t v_stride, void *keys, void *values, int bf16, int64_t n_blocks,
 const int32_t *tables, int64_t sequences, int64_t table_width, const int32_t *sequence, const int32_t *slot, int64_t rows,
 int64_t kv_heads, int64_t hd) {
  for (int64_t i = 0; i < rows; i++) {
    if (sequence[i] < 0 || sequence[i] >= sequences || slot[i] < 0 || slot[i] >= table_width * LANES) return 1;
    int32_t block = tables[sequence[i] * table_width + slot[i] / LANES];
    if (block < 0 || block >= n_blocks) return 2;
  }
  for (int64_t i = 0; i < rows; i++) {
    int64_t block = tables[sequence[i] * table_width + slot[i] / LANES], t = slot[i] % LANES;
    for (int64_t h = 0; h < kv_heads; h++) {
      int64_t at = (block * kv_heads + h) * LANES * hd;
      const float *kh = k + i * k_stride + h * hd, *vh = v + i * v_stride + h * hd;
      if (bf16) {
        uint16_t *key = (uint16_t *)keys + at + t, *value = (uint16_t *)values + at + t * hd;
        for (int64_t d = 0; d < hd; d += LANES) {
          uint16_t rounded[2 * LANES];
          f_store_bf16(rounded, load_up_to(kh + d, hd - d));
          f_store_bf16(rounded + LANES, load_up_to(vh + d, hd - d));
          int n = least(LANES, hd - d);
          for (int e = 0; e < n; e++) key[(d + e) * LANES] = rounded[e];
          memcpy(value + d, rounded + LANES, (size_t)n * sizeof(uint16_t));
        }
      } else {
        float *key = (float *)keys + at + t;
        for (int64_t d = 0; d < hd; d++) key[d * LANES] = kh[d];
        memcpy((float *)values + at + t * hd, vh, (size_t)hd * sizeof(float));
      }
    }
  }
  return 0;
}
