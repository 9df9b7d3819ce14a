// Attention and candidates for whoever runs a whole pass in this instruction set; attention.c and sampler.c say what they compute.
#ifndef SPECDEC_ROWS_H
#define SPECDEC_ROWS_H

#include "simd.h"

// What a call that was given rows returns.
enum { OK, BAD_ROW, BAD_BLOCK, NO_MEMORY, BAD_TOKEN };

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

KERNEL(int, attend)
(const float *q, int64_t q_stride, const void *keys, const void *values, int kind, int64_t n_blocks, const int32_t *tables,
 int64_t sequences, int64_t table_width, const int32_t *sequence, const int32_t *prefix, const int32_t *path,
 int64_t path_width, const int32_t *n_path, float *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t hd, float scale,
 int64_t window);

KERNEL(void, candidates)
(const float *x, int64_t rows, int64_t n, int64_t width, int64_t k, const double *heat, const int64_t *seeds,
 const int64_t *positions, const int64_t *names, int64_t *tokens, double *chances);

#endif
