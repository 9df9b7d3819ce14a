// Products of a range of channels, for whoever splits a weight's channels over threads: blocks.c and dense.c compute them.
#ifndef SPECDEC_PRODUCTS_H
#define SPECDEC_PRODUCTS_H

#include "blocks.h"

#define block_channels NAME3(block_channels, SPECDEC_ISA)
#define dense_channels NAME3(dense_channels, SPECDEC_ISA)

// Channels 16 first .. min(16 last, n) - 1 of y = x W^T, or of y = add + x W^T where `add` is given (the product is summed
// first, then added). x [rows, groups] quantised; y and add point at
// channel 16 first of the first row and have rows ld apart; add may be y.
void block_channels(const uint8_t *w, int q4, const RowGroup *x, int64_t rows, int64_t groups, int64_t n, int64_t first,
                    int64_t last, float *y, const float *add, int64_t ld);

// The same for float weights and rows: x [rows, k] float32.
void dense_channels(const void *w, int bf16, const float *x, int64_t rows, int64_t k, int64_t n, int64_t first, int64_t last,
                    float *y, const float *add, int64_t ld);

#endif
