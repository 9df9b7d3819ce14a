// What decoder.c asks of matrices and of passes that holds whatever is computed.
#ifndef SPECDEC_PASS_H
#define SPECDEC_PASS_H

#include <stdlib.h>

#include "blocks.h"
#include "decoder.h"
#include "products.h"
#include "rows.h"
#include "threads.h"

static inline int has(const Matrix *m, int blocks) {
  for (int64_t i = 0; i < m->n_parts; i++)
    if ((m->parts[i].kind <= Q8) == blocks) return 1;
  return 0;
}

static inline int64_t bytes_of(const Matrix *m) {
  static const int64_t per_group[] = {Q4_BYTES, Q8_BYTES, 2 * LANES * GROUP, 4 * LANES * GROUP};
  int64_t bytes = 0;
  for (int64_t i = 0; i < m->n_parts; i++)
    bytes += (m->parts[i].n + LANES - 1) / LANES * m->k / GROUP * per_group[m->parts[i].kind];
  return bytes;
}

// The rows of a product in the forms that its parts take.
typedef struct {
  float *x;     // [rows, k]
  RowGroup *q;  // [rows, k / 32]
} Input;

// Blocks [first, last) of sixteen channels for some rows from `row` on: y = x W^T, or add + x W^T. y and add point at the
// first row and channel; a row of theirs is ld long.
static inline void product(const Matrix *m, const Input *in, int64_t row, int64_t rows, int64_t first, int64_t last,
                           float *y, const float *add, int64_t ld) {
  const int64_t groups = m->k / GROUP;
  int64_t at = 0;
  for (const Part *p = m->parts; p < m->parts + m->n_parts; p++) {
    const int64_t blocks = (p->n + LANES - 1) / LANES, lo = first > at ? first : at, hi = least(last, at + blocks);
    if (lo < hi) {
      float *to = y + (lo - first) * LANES;
      const float *from = add ? add + (lo - first) * LANES : 0;
      if (p->kind <= Q8)
        block_channels(p->data, p->kind == Q4, in->q + row * groups, rows, groups, p->n, lo - at, hi - at, to, from, ld);
      else dense_channels(p->data, p->kind == BF16, in->x + row * m->k, rows, m->k, p->n, lo - at, hi - at, to, from, ld);
    }
    at += blocks;
  }
}

static inline void add_bias(const Matrix *m, int64_t first, float *y, int64_t rows, int64_t n, int64_t ld) {
  if (!m->bias) return;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < n; c++) y[r * ld + c] += m->bias[first + c];
}

// While what comes before the product of a matrix of one part is being done, threads without work fetch its beginning.
// Gate and up are two ranges, for a thread takes the same channels of both.
static inline void announce(const Matrix *m, int halves) {
  const int64_t bytes = bytes_of(m), half = halves ? bytes / 2 : bytes;
  if (m->n_parts == 1) specdec_ahead(m->parts->data, half, (const char *)m->parts->data + half, bytes - half);
}

// Row `id` of a matrix of one part, as quant/blocks.py reads it.
static inline void embed(const Matrix *m, int64_t id, float *x) {
  const int64_t block = id / LANES, lane = id % LANES, kind = m->parts->kind;
  for (int64_t k = 0; kind > Q8 && k < m->k; k++) {
    const int64_t at = (block * m->k + k) * LANES + lane;
    x[k] = kind == BF16 ? from_bf16(((const uint16_t *)m->parts->data)[at]) : ((const float *)m->parts->data)[at];
  }
  if (kind > Q8) return;
  const int64_t bytes = kind == Q4 ? Q4_BYTES : Q8_BYTES, width = kind == Q4 ? 256 : 512;
  for (int64_t g = 0; g < m->k / GROUP; g++, x += GROUP) {
    const uint8_t *w = (const uint8_t *)m->parts->data + (block * (m->k / GROUP) + g) * bytes, *codes = w + 4 * lane;
    float scale[LANES], offset[LANES] = {0};
    f_store(scale, f_load_f16((const uint16_t *)(w + width)));
    if (kind == Q4) f_store(offset, f_load_f16((const uint16_t *)(w + width) + LANES));
    for (int p = 0; p < width / 64; p++)
      for (int e = 0; e < 4; e++) {
        const uint8_t code = codes[64 * p + e];
        if (kind == Q8) {
          x[4 * p + e] = (float)(int8_t)code * scale[lane];
        } else {
          x[4 * p + e] = (float)(code & 15) * scale[lane] + offset[lane];
          x[16 + 4 * p + e] = (float)(code >> 4) * scale[lane] + offset[lane];
        }
      }
  }
}

static inline int check(const Decoder *d, const Pass *p) {
  for (int64_t i = 0; i < p->rows; i++) {
    if (p->tokens[i] < 0 || p->tokens[i] >= d->embedding.n) return BAD_TOKEN;
    if (p->angle[i] < 0 || p->angle[i] >= p->n_angles) return BAD_ROW;
    if (p->sequence[i] < 0 || p->sequence[i] >= p->sequences) return BAD_ROW;
    if (p->slot[i] < 0 || p->slot[i] >= p->table_width * LANES) return BAD_ROW;
  }
  for (int64_t i = 0; i < p->n_wanted; i++)
    if (p->wanted[i] < 0 || p->wanted[i] >= p->rows || (i && p->wanted[i] <= p->wanted[i - 1])) return BAD_ROW;
  for (int64_t b = 0; b < p->sequences * p->table_width; b++)
    if (p->tables[b] < 0 || p->tables[b] >= p->n_blocks) return BAD_BLOCK;
  return OK;
}

// Keep the wanted ones of some rows of `bytes` each, in place.
static inline void keep(const Pass *p, void *rows, size_t bytes) {
  char *x = rows;
  for (int64_t i = 0; i < p->n_wanted; i++)
    if (p->wanted[i] != i) memcpy(x + (size_t)i * bytes, x + (size_t)p->wanted[i] * bytes, bytes);
}

// `rows` rows of a pass from `first` on, as a pass without wanted rows.
static inline Pass rows_of_pass(const Pass *p, int64_t first, int64_t rows) {
  Pass part = *p;
  part.rows = rows;
  part.n_wanted = 0;
  part.tokens += first;
  part.angle += first;
  part.sequence += first;
  part.slot += first;
  part.prefix += first;
  part.path += first * p->path_width;
  part.n_path += first;
  if (p->inputs) part.inputs += first * p->per_row;
  return part;
}

// The wanted rows of a pass as a pass of their own, which looks for everything else where the other does; null without memory.
// One call of free() frees what it holds.
static inline int32_t *pass_of_wanted(const Pass *p, Pass *few) {
  const int64_t n = p->n_wanted;
  int64_t *angle = malloc((size_t)n * (sizeof(int64_t) + (size_t)(3 + p->path_width) * sizeof(int32_t)));
  if (!angle) return 0;
  int32_t *ints = (int32_t *)(angle + n), *path = ints + 3 * n;
  for (int64_t i = 0; i < n; i++) {
    const int64_t row = p->wanted[i];
    angle[i] = p->angle[row];
    ints[i] = p->sequence[row];
    ints[n + i] = p->prefix[row];
    ints[2 * n + i] = p->n_path[row];
    memcpy(path + i * p->path_width, p->path + row * p->path_width, (size_t)p->path_width * sizeof(int32_t));
  }
  *few = *p;
  few->angle = angle;
  few->sequence = ints;
  few->prefix = ints + n;
  few->n_path = ints + 2 * n;
  few->path = path;
  return (int32_t *)angle;
}

#endif
