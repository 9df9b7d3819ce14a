// The passes of a decoder layer that treat each row, or each head of a row, by itself.
#include "kv.h"
#include "pointwise.h"
#include "threads.h"

#define GRAIN 100000  // entries worth a thread

typedef struct {
  const float *x, *weight;
  float *out;
  int64_t rows, d, chunks;
  float eps;
} Norm;

static void norm_chunk(void *context, int64_t chunk) {
  const Norm *c = context;
  for (int64_t i = part(c->rows, c->chunks, chunk); i < part(c->rows, c->chunks, chunk + 1); i++)
    norm_row(c->x + i * c->d, c->weight, c->out + i * c->d, c->d, c->eps);
}

// x / sqrt(mean(x^2) + eps) * weight, each of the rows by itself.
KERNEL(void, rms_norm)(const float *x, const float *weight, float *out, int64_t rows, int64_t d, float eps) {
  int threads = threads_for(rows * d, GRAIN);
  Norm c = {x, weight, out, rows, d, chunks_for(threads, rows), eps};
  specdec_parallel(threads, c.chunks, norm_chunk, &c);
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
  for (int64_t i = part(t->rows, t->chunks, chunk); i < part(t->rows, t->chunks, chunk + 1); i++)
    turn_row(t->x + i * t->stride, t->cosine + i * t->half, t->sine + i * t->half, t->heads, t->half);
}

// Rotate the halves of every head in place: (a, b) -> (a cos - b sin, b cos + a sin). cos, sin [rows, half].
KERNEL(void, rope)
(float *x, int64_t stride, const float *cosine, const float *sine, int64_t rows, int64_t heads, int64_t half) {
  int threads = threads_for(rows * heads * half * 2, GRAIN);
  Turn t = {x, cosine, sine, stride, rows, heads, half, chunks_for(threads, rows)};
  specdec_parallel(threads, t.chunks, turn_chunk, &t);
}

// Write the rows' keys and values to their slots, in blocks of the kind that kv.h describes.
// Returns 0, or 1 for a table or slot outside the tables, 2 for a block outside the pool; nothing is written then.
KERNEL(int, store)
(const float *k, int64_t k_stride, const float *v, int64_t v_stride, void *keys, void *values, int kind, int64_t n_blocks,
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
      int64_t at = (block * kv_heads + h) * kv_block(kind, hd);
      store_key(k + i * k_stride + h * hd, keys, at, t, kind, hd);
      store_value(v + i * v_stride + h * hd, values, at, t, kind, hd);
    }
  }
  return 0;
}
