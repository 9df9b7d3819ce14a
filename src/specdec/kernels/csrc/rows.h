// What treats each row by itself, for other files of the same instruction set: see attention.c and pointwise.c.
#ifndef SPECDEC_ROWS_H
#define SPECDEC_ROWS_H

#include "simd.h"

KERNEL(void, rms_norm)(const float *x, const float *weight, float *out, int64_t rows, int64_t d, float eps);
KERNEL(void, silu_mul)(const float *gate_up, float *out, int64_t rows, int64_t f);
KERNEL(void, rope)
(float *x, int64_t stride, const float *cosine, const float *sine, int64_t rows, int64_t heads, int64_t half);
KERNEL(int, store)
(const float *k, int64_t k_stride, const float *v, int64_t v_stride, void *keys, void *values, int bf16, int64_t n_blocks,
 const int32_t *tables, int64_t sequences, int64_t table_width, const int32_t *sequence, const int32_t *slot, int64_t rows,
 int64_t kv_heads, int64_t hd);
KERNEL(int, attend)
(const float *q, int64_t q_stride, const void *keys, const void *values, int bf16, int64_t n_blocks, const int32_t *tables,
 int64_t sequences, int64_t table_width, const int32_t *sequence, const int32_t *prefix, const int32_t *path,
 int64_t path_width, const int32_t *n_path, float *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t hd, float scale,
 int64_t window);

#endif
