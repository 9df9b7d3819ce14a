// A whole pass of a decoder: from token ids to logits, with one region of threads for each product and for attention.
//
// What a row goes through is what the single kernels compute, in the same order and to the same bit: the functions for one
// row or some channels are shared with them. What is saved is everything between them: calls, allocations, and writing and
// reading back what the next step takes from the cache anyway. A head is normed, turned and stored by the thread that
// multiplied it; gate and up meet while both are at hand and become the quantised rows of the next product.
#include "decoder.h"

#include <stdlib.h>

#include "kv.h"
#include "pointwise.h"
#include "products.h"
#include "rows.h"
#include "threads.h"

#define SLAB 64           // rows that a chunk takes at once
#define MOST_HEAD 256     // entries of a head
#define CHUNK 131072      // bytes of weights that one chunk streams at most, where there are more than a few for each thread
#define GRAIN 1536        // groups of 16 channels times (2 + rows) that are worth a thread

// The rows of a product in the forms that its parts take.
typedef struct {
  float *x;     // [rows, k]
  RowGroup *q;  // [rows, k / 32]
} Input;

typedef struct Run {
  const Decoder *decoder;
  const Pass *pass;
  const Layer *layer;
  char *keys, *values;  // of this layer
  int64_t rows;         // all of the pass, or the wanted ones after the last layer's attention
  float *x;             // [rows, d] the residual stream
  float *q;             // [rows, heads * hd]
  Input normed, attended, hidden;
  float *spare;  // [rows, d], where a product with a bias meets it
  // What the current region works on: a product, or rows to prepare for one.
  const Matrix *matrix;
  Input input;
  const float *norm;
  void (*work)(const struct Run *run, int64_t unit, int64_t last, int64_t row, int64_t rows);
  int64_t units, chunks;
} Run;

static int has(const Matrix *m, int blocks) {
  for (int64_t i = 0; i < m->n_parts; i++)
    if ((m->parts[i].kind <= Q8) == blocks) return 1;
  return 0;
}

// Blocks [first, last) of sixteen channels for some rows from `row` on: y = x W^T, or add + x W^T. y and add point at the
// first row and channel; a row of theirs is ld long.
static void product(const Matrix *m, const Input *in, int64_t row, int64_t rows, int64_t first, int64_t last, float *y,
                    const float *add, int64_t ld) {
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

static void add_bias(const Matrix *m, int64_t first, float *y, int64_t rows, int64_t n, int64_t ld) {
  if (!m->bias) return;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < n; c++) y[r * ld + c] += m->bias[first + c];
}

static int64_t bytes_of(const Matrix *m) {
  static const int64_t per_group[] = {Q4_BYTES, Q8_BYTES, 2 * LANES * GROUP, 4 * LANES * GROUP};
  int64_t bytes = 0;
  for (int64_t i = 0; i < m->n_parts; i++)
    bytes += (m->parts[i].n + LANES - 1) / LANES * m->k / GROUP * per_group[m->parts[i].kind];
  return bytes;
}

static void region_chunk(void *context, int64_t i) {
  const Run *run = context;
  const int64_t c = i % run->chunks, row = i / run->chunks * SLAB;
  run->work(run, part(run->units, run->chunks, c), part(run->units, run->chunks, c + 1), row, least(SLAB, run->rows - row));
}

// While what comes before the product of a matrix of one part is being done, threads without work fetch its beginning.
// Gate and up are two ranges, for a thread takes the same channels of both.
static void announce(const Matrix *m, int halves) {
  const int64_t bytes = bytes_of(m), half = halves ? bytes / 2 : bytes;
  if (m->n_parts == 1) specdec_ahead(m->parts->data, half, (const char *)m->parts->data + half, bytes - half);
}

// Work on a product: on ranges of its `units`, which together are all of it, for slabs of rows.
static void region(Run *run, const Matrix *m, int64_t units,
                   void (*work)(const Run *run, int64_t unit, int64_t last, int64_t row, int64_t rows)) {
  const int64_t slabs = (run->rows + SLAB - 1) / SLAB, wanted = bytes_of(m) / CHUNK;
  const int threads = threads_for((m->n + LANES - 1) / LANES * (m->k / GROUP) * (2 + run->rows), GRAIN);
  run->work = work;
  run->units = units;
  run->chunks = chunks_for(threads, units);
  if (threads > 1 && wanted > run->chunks) run->chunks = least(wanted, units);
  specdec_parallel(threads, run->chunks * slabs, region_chunk, run);
}

// Row `id` of a matrix of one part, as quant/blocks.py reads it.
static void embed(const Matrix *m, int64_t id, float *x) {
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

// Rows become the input of a product: normed if a norm is given, quantised if the product takes that.
static void prepare_rows(const Run *run, int64_t first, int64_t last) {
  const Decoder *d = run->decoder;
  const int64_t k = run->matrix->k, groups = k / GROUP;
  const int quantised = has(run->matrix, 1);
  for (int64_t r = first; r < last; r++) {
    float *x = run->input.x + r * k, *to = x;
    if (run->norm && k != d->d) {  // an embedding lies before the state
      embed(&d->embedding, run->pass->tokens[r], x);
      norm_row(x, d->embedding_norm, x, d->d, d->eps);
      to += d->d;
    }
    if (run->norm) norm_row(run->x + r * d->d, run->norm, to, d->d, d->eps);
    for (int64_t g = 0; quantised && g < groups; g++) quantise(x + g * GROUP, run->input.q + r * groups + g);
  }
}

static void prepare_chunk(void *context, int64_t i) {
  const Run *run = context;
  prepare_rows(run, part(run->rows, run->chunks, i), part(run->rows, run->chunks, i + 1));
}

static void prepare(Run *run, const Matrix *m, Input in, const float *norm) {
  run->matrix = m;
  run->input = in;
  run->norm = norm;
  const int threads = threads_for(run->rows * m->k, 4096);
  run->chunks = chunks_for(threads, run->rows);
  specdec_parallel(threads, run->chunks, prepare_chunk, run);
}

// Query, key or value heads from `h` on: a unit is a head.
static void heads(const Run *run, int64_t h, int64_t last, int64_t first, int64_t rows) {
  const Decoder *d = run->decoder;
  const Pass *p = run->pass;
  const int64_t hd = d->hd, half = hd / 2;
  float scratch[SLAB * MOST_HEAD];
  for (; h < last; h++) {
    const int64_t kv = h - d->heads, ld = kv < 0 ? d->heads * hd : hd;
    const int is_value = kv >= d->kv_heads;
    const float *norm = kv < 0 ? run->layer->q_norm : is_value ? 0 : run->layer->k_norm;
    float *y = kv < 0 ? run->q + first * ld + h * hd : scratch;
    product(&run->layer->qkv, &run->normed, first, rows, h * hd / LANES, (h + 1) * hd / LANES, y, 0, ld);
    add_bias(&run->layer->qkv, h * hd, y, rows, hd, ld);
    for (int64_t r = 0; r < rows; r++) {
      float *x = y + r * ld;
      const int64_t row = first + r;
      if (norm) norm_row(x, norm, x, hd, d->eps);
      if (!is_value) turn_row(x, p->cosine + p->angle[row] * half, p->sine + p->angle[row] * half, 1, half);
      if (kv < 0) continue;
      const int64_t block = p->tables[p->sequence[row] * p->table_width + p->slot[row] / LANES], t = p->slot[row] % LANES;
      const int64_t at = (block * d->kv_heads + kv % d->kv_heads) * kv_block((int)p->kind, hd);
      if (is_value) store_value(x, run->values, at, t, (int)p->kind, hd);
      else store_key(x, run->keys, at, t, (int)p->kind, hd);
    }
  }
}

// Channels of gate and of up become as many of silu(gate) * up: a unit is 32 of them.
static void gates(const Run *run, int64_t u, int64_t last, int64_t first, int64_t rows) {
  const Matrix *m = &run->layer->gate_up;
  const int64_t f = run->decoder->ffn;
  const int quantised = has(&run->layer->down, 1), floats = has(&run->layer->down, 0);
  float gate[SLAB * GROUP], up[SLAB * GROUP];
  for (; u < last; u++) {
    product(m, &run->normed, first, rows, 2 * u, 2 * u + 2, gate, 0, GROUP);
    product(m, &run->normed, first, rows, f / LANES + 2 * u, f / LANES + 2 * u + 2, up, 0, GROUP);
    add_bias(m, u * GROUP, gate, rows, GROUP, GROUP);
    add_bias(m, f + u * GROUP, up, rows, GROUP, GROUP);
    for (int64_t r = 0; r < rows; r++) {
      float *g = gate + r * GROUP;
      for (int64_t k = 0; k < GROUP; k += LANES) f_store(g + k, f_mul(silu(f_load(g + k)), f_load(up + r * GROUP + k)));
      if (quantised) quantise(g, run->hidden.q + (first + r) * (f / GROUP) + u);
      if (floats) memcpy(run->hidden.x + (first + r) * f + u * GROUP, g, GROUP * sizeof(float));
    }
  }
}

// x += product, and its bias: a unit is a block of sixteen channels.
static void residual(const Run *run, int64_t b, int64_t last, int64_t first, int64_t rows) {
  const Matrix *m = run->matrix;
  const int64_t d = m->n, c = b * LANES, n = least(last * LANES, d) - c;
  float *x = run->x + first * d + c;
  if (!m->bias) {
    product(m, &run->input, first, rows, b, last, x, x, d);
    return;
  }
  float *y = run->spare + first * d + c;
  product(m, &run->input, first, rows, b, last, y, 0, d);
  add_bias(m, c, y, rows, n, d);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < n; k++) x[r * d + k] += y[r * d + k];
}

static void add_product(Run *run, const Matrix *m, Input in) {
  run->matrix = m;
  run->input = in;
  region(run, m, (m->n + LANES - 1) / LANES, residual);
}

static void logits(const Run *run, int64_t b, int64_t last, int64_t first, int64_t rows) {
  const Matrix *m = run->matrix;
  product(m, &run->input, first, rows, b, last, run->pass->logits + first * m->n + b * LANES, 0, m->n);
}

static int check(const Decoder *d, const Pass *p) {
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

// Keep the wanted ones of some rows of width d, in place.
static void keep(const Pass *p, float *x, int64_t d) {
  for (int64_t i = 0; i < p->n_wanted; i++)
    if (p->wanted[i] != i) memcpy(x + i * d, x + p->wanted[i] * d, (size_t)d * sizeof(float));
}

static int run_layer(Run *run, int64_t i) {
  const Decoder *d = run->decoder;
  const Pass *p = run->pass;
  const Layer *layer = run->layer = d->layers + i;
  const int64_t width = d->heads * d->hd;
  const int64_t step = p->n_blocks * d->kv_heads * kv_block((int)p->kind, d->hd) * kv_element((int)p->kind);
  const int last = i == d->n_layers - 1;
  float *tap = p->taps ? p->taps[i] : 0;
  run->keys = p->keys + i * step;
  run->values = p->values + i * step;
  prepare(run, &layer->qkv, run->normed, layer->attention_norm);
  announce(&layer->out, 0);
  region(run, &layer->qkv, d->heads + 2 * d->kv_heads, heads);
  if (last && !p->n_wanted && !tap) return OK;
  int wrong = NAME3(attend, SPECDEC_ISA)(run->q, width, run->keys, run->values, (int)p->kind, p->n_blocks, p->tables,
                                         p->sequences, p->table_width, p->sequence, p->prefix, p->path, p->path_width,
                                         p->n_path, run->attended.x, run->rows, d->heads, d->kv_heads, d->hd, d->scale,
                                         layer->window);
  if (wrong) return wrong;
  if (last && !tap) {  // every key and value is stored by now: from here on only the wanted rows matter
    keep(p, run->x, d->d);
    keep(p, run->attended.x, width);
    run->rows = p->n_wanted;
  }
  prepare(run, &layer->out, run->attended, 0);
  announce(&layer->gate_up, 1);
  add_product(run, &layer->out, run->attended);
  prepare(run, &layer->gate_up, run->normed, layer->ffn_norm);
  announce(&layer->down, 0);
  region(run, &layer->gate_up, d->ffn / GROUP, gates);
  announce(last ? &d->head : &layer[1].qkv, 0);
  add_product(run, &layer->down, run->hidden);
  if (tap) {
    memcpy(tap, run->x, (size_t)(run->rows * d->d) * sizeof(float));
    if (last) {
      keep(p, run->x, d->d);
      run->rows = p->n_wanted;
    }
  }
  return OK;
}

// Returns 0, or what is wrong: 1 a row, 2 a block id, 3 no memory, 4 a token outside the vocabulary. Where it is not 0 the
// logits mean nothing.
KERNEL(int, decode)(const Decoder *d, const Pass *p) {
  int wrong = check(d, p);
  if (wrong || !p->rows) return wrong;
  const int64_t rows = p->rows, width = d->heads * d->hd, taken = d->layers->qkv.k, widest = width > taken ? width : taken;
  const size_t floats = (size_t)(rows * (4 * widest + width + d->ffn));
  const size_t groups = (size_t)(rows * (taken + width + d->ffn) / GROUP);
  RowGroup *memory = malloc(groups * sizeof(RowGroup) + floats * sizeof(float));
  if (!memory) return NO_MEMORY;
  float *f = (float *)(memory + groups);
  Run run = {.decoder = d, .pass = p, .rows = rows, .x = f, .q = f + rows * widest, .spare = f + 2 * rows * widest,
             .normed = {f + 3 * rows * widest, memory},
             .attended = {f + 4 * rows * widest, memory + rows * taken / GROUP},
             .hidden = {f + 4 * rows * widest + rows * width, memory + rows * (taken + width) / GROUP}};
  if (p->states) memcpy(run.x, p->states, (size_t)(rows * d->d) * sizeof(float));
  for (int64_t i = 0; !p->states && i < rows; i++) embed(&d->embedding, p->tokens[i], run.x + i * d->d);
  for (int64_t i = 0; i < d->n_layers && !wrong; i++) wrong = run_layer(&run, i);
  if (!wrong && p->n_wanted) {
    prepare(&run, &d->head, run.normed, d->norm);
    region(&run, &d->head, (d->head.n + LANES - 1) / LANES, logits);
  }
  free(memory);
  return wrong;
}
