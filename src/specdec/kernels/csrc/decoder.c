// A whole pass of a decoder: from token ids to logits, with one region of threads for each product and for attention.
//
// What a row goes through is what the single kernels compute, in the same order and to the same bit: the functions for one
// row or some channels are shared with them. What is saved is everything between them: calls, allocations, and writing and
// reading back what the next step takes from the cache anyway. A head is normed, turned and stored by the thread that
// multiplied it; gate and up meet while both are at hand and become the quantised rows of the next product.
#include <stdlib.h>

#include "kv.h"
#include "pass.h"
#include "pointwise.h"
#include "rows.h"
#include "threads.h"

#define SLAB 64           // rows that a chunk takes at once
#define MOST_HEAD 256     // entries of a head
#define CHUNK 131072      // bytes of weights that one chunk streams at most, where there are more than a few for each thread
#define WIDTH 32          // most likely tokens of a row among which its candidates are (kernels/base.py)
#define GRAIN 1536        // groups of 16 channels times (2 + rows) that are worth a thread

typedef struct Run {
  const Decoder *decoder;
  const Pass *pass;
  const Layer *layer;
  char *keys, *values;  // of this layer
  int64_t rows;         // all of the pass, or the wanted ones from the last layer's queries on
  float *x;             // [rows, d] the residual stream
  float *q;             // [rows, heads * hd]
  Input fused, normed, attended, hidden;
  float *spare;  // [rows, d], where a product with a bias meets it
  // What the current region works on: a product, or rows to prepare for one.
  const Matrix *matrix;
  Input input;
  const float *norm;
  void (*work)(const struct Run *run, int64_t unit, int64_t last, int64_t row, int64_t rows);
  int64_t first, units, chunks;  // `first` is the first unit
} Run;

static void region_chunk(void *context, int64_t i) {
  const Run *run = context;
  const int64_t c = i % run->chunks, row = i / run->chunks * SLAB;
  run->work(run, run->first + part(run->units, run->chunks, c), run->first + part(run->units, run->chunks, c + 1), row,
            least(SLAB, run->rows - row));
}

// Work on a product, or on part of it: on ranges of `units` from `first` on, of `all` that it has, for slabs of rows.
static void region(Run *run, const Matrix *m, int64_t first, int64_t units, int64_t all,
                   void (*work)(const Run *run, int64_t unit, int64_t last, int64_t row, int64_t rows)) {
  const int64_t slabs = (run->rows + SLAB - 1) / SLAB, wanted = bytes_of(m) * units / all / CHUNK;
  const int threads = threads_for((m->n + LANES - 1) / LANES * (m->k / GROUP) * (2 + run->rows) * units / all, GRAIN);
  run->work = work;
  run->first = first;
  run->units = units;
  run->chunks = chunks_for(threads, units);
  if (threads > 1 && wanted > run->chunks) run->chunks = least(wanted, units);
  specdec_parallel(threads, run->chunks * slabs, region_chunk, run);
}

// The vectors that a row of the pass starts from, side by side.
static void gather(const Run *run, int64_t r, float *to) {
  const int64_t d = run->decoder->d, n = run->pass->per_row;
  for (int64_t i = 0; i < n; i++) memcpy(to + i * d, run->pass->inputs[r * n + i], (size_t)d * sizeof(float));
}

// Rows become the input of a product: normed if a norm is given, quantised if the product takes that.
static void prepare_rows(const Run *run, int64_t first, int64_t last) {
  const Decoder *d = run->decoder;
  const int64_t k = run->matrix->k, groups = k / GROUP;
  const int quantised = has(run->matrix, 1), floats = has(run->matrix, 0);
  for (int64_t r = first; r < last; r++) {
    // Normed rows that nobody reads as floats lie one upon the other, where they stay in the cache.
    float *x = run->input.x + (run->norm && !floats ? first : r) * k, *to = x;
    if (run->matrix == &d->fuse) gather(run, r, x);
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
    // One loop after the other: in each, the steps of several rows overlap.
    for (int64_t k = 0; k < rows * GROUP; k += LANES) f_store(gate + k, f_mul(silu(f_load(gate + k)), f_load(up + k)));
    for (int64_t r = 0; quantised && r < rows; r++)
      quantise(gate + r * GROUP, run->hidden.q + (first + r) * (f / GROUP) + u);
    for (int64_t r = 0; floats && r < rows; r++)
      memcpy(run->hidden.x + (first + r) * f + u * GROUP, gate + r * GROUP, GROUP * sizeof(float));
  }
}

// Two blocks of sixteen channels, which are faster together (blocks.h).
#define PAIR (2 * LANES)

// x += product, and its bias: a unit is a pair of blocks.
static void residual(const Run *run, int64_t u, int64_t end, int64_t first, int64_t rows) {
  const Matrix *m = run->matrix;
  const int64_t d = m->n, c = u * PAIR, n = least(end * PAIR, d) - c, b = c / LANES, last = b + (n + LANES - 1) / LANES;
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
  const int64_t units = (m->n + PAIR - 1) / PAIR;
  run->matrix = m;
  run->input = in;
  region(run, m, 0, units, units, residual);
}

// A unit is a pair of blocks.
static void logits(const Run *run, int64_t u, int64_t end, int64_t first, int64_t rows) {
  const Matrix *m = run->matrix;
  const int64_t last = least(2 * end, (m->n + LANES - 1) / LANES);
  product(m, &run->input, first, rows, 2 * u, last, run->pass->logits + first * m->n + u * PAIR, 0, m->n);
}

static int attention(Run *run) {
  const Decoder *d = run->decoder;
  const Pass *p = run->pass;
  return NAME3(attend, SPECDEC_ISA)(run->q, d->heads * d->hd, run->keys, run->values, (int)p->kind, p->n_blocks, p->tables,
                                    p->sequences, p->table_width, p->sequence, p->prefix, p->path, p->path_width, p->n_path,
                                    run->attended.x, run->rows, d->heads, d->kv_heads, d->hd, d->scale, run->layer->window);
}

// Queries, keys and values of all rows, and attention. In the last layer, where only the wanted rows matter any further, the
// others get keys and values and no queries.
static int attend_layer(Run *run, int last) {
  const Decoder *d = run->decoder;
  const Pass *p = run->pass;
  const Matrix *m = &run->layer->qkv;
  const int64_t stored = 2 * d->kv_heads, all = d->heads + stored;
  prepare(run, m, run->normed, run->layer->attention_norm);
  announce(&run->layer->out, 0);
  if (!last || p->n_wanted == run->rows) {
    region(run, m, 0, all, all, heads);
    return attention(run);
  }
  region(run, m, d->heads, stored, all, heads);
  run->rows = p->n_wanted;
  if (!run->rows) return OK;
  keep(p, run->x, (size_t)d->d * sizeof(float));
  keep(p, run->normed.x, (size_t)m->k * sizeof(float));
  keep(p, run->normed.q, (size_t)(m->k / GROUP) * sizeof(RowGroup));
  Pass few;
  void *memory = pass_of_wanted(p, &few);
  if (!memory) return NO_MEMORY;
  run->pass = &few;
  region(run, m, 0, d->heads, all, heads);
  const int wrong = attention(run);
  run->pass = p;
  free(memory);
  return wrong;
}

static int run_layer(Run *run, int64_t i) {
  const Decoder *d = run->decoder;
  const Pass *p = run->pass;
  const Layer *layer = run->layer = d->layers + i;
  const int64_t step = p->n_blocks * d->kv_heads * kv_block((int)p->kind, d->hd) * kv_element((int)p->kind);
  const int last = i == d->n_layers - 1;
  float *tap = p->taps ? p->taps[i] : 0;
  run->keys = p->keys + i * step;
  run->values = p->values + i * step;
  const int wrong = attend_layer(run, last && !tap);
  if (wrong || !run->rows) return wrong;
  prepare(run, &layer->out, run->attended, 0);
  announce(&layer->gate_up, 1);
  add_product(run, &layer->out, run->attended);
  prepare(run, &layer->gate_up, run->normed, layer->ffn_norm);
  announce(&layer->down, 0);
  region(run, &layer->gate_up, 0, d->ffn / GROUP, d->ffn / GROUP, gates);
  announce(last ? &d->head : &layer[1].qkv, 0);
  add_product(run, &layer->down, run->hidden);
  if (tap) {
    memcpy(tap, run->x, (size_t)(run->rows * d->d) * sizeof(float));
    if (last) {
      keep(p, run->x, (size_t)d->d * sizeof(float));
      run->rows = p->n_wanted;
    }
  }
  return OK;
}

// What rows start from: their embeddings, or what the pass brings, fused if it is features.
static void begin(Run *run) {
  const Decoder *d = run->decoder;
  const Pass *p = run->pass;
  if (p->fuse) {
    prepare(run, &d->fuse, run->fused, 0);
    announce(&d->layers->qkv, 0);
    memset(run->x, 0, (size_t)(run->rows * d->d) * sizeof(float));
    add_product(run, &d->fuse, run->fused);
    return;
  }
  for (int64_t r = 0; r < run->rows; r++) {
    if (p->inputs) gather(run, r, run->x + r * d->d);
    else embed(&d->embedding, p->tokens[r], run->x + r * d->d);
  }
}

static void finish(Run *run) {
  const Decoder *d = run->decoder;
  const Pass *p = run->pass;
  const int64_t n = p->n_wanted, vocabulary = d->head.n, units = (vocabulary + PAIR - 1) / PAIR;
  if (p->ends) memcpy(p->ends, run->x, (size_t)(n * d->d) * sizeof(float));
  prepare(run, &d->head, run->normed, d->norm);
  region(run, &d->head, 0, units, units, logits);
  if (p->best)
    NAME3(candidates, SPECDEC_ISA)(p->logits, n, vocabulary, least(vocabulary, WIDTH), p->best, p->heat, p->seeds, p->positions,
                                   p->names, p->candidates, p->chances);
}

static int run_pass(const Decoder *d, const Pass *p) {
  const int64_t rows = p->rows, width = d->heads * d->hd, taken = d->layers->qkv.k, fused = d->fuse.n_parts ? d->fuse.k : 0;
  const int64_t widest = width > taken ? width : taken;
  const size_t floats = (size_t)(rows * (4 * widest + width + d->ffn + fused));
  const size_t groups = (size_t)(rows * (taken + width + d->ffn + fused) / GROUP);
  RowGroup *memory = malloc(groups * sizeof(RowGroup) + floats * sizeof(float));
  if (!memory) return NO_MEMORY;
  float *f = (float *)(memory + groups);
  Run run = {.decoder = d, .pass = p, .rows = rows, .x = f, .q = f + rows * widest, .spare = f + 2 * rows * widest,
             .normed = {f + 3 * rows * widest, memory},
             .attended = {f + 4 * rows * widest, memory + rows * taken / GROUP},
             .hidden = {f + 4 * rows * widest + rows * width, memory + rows * (taken + width) / GROUP},
             .fused = {f + 4 * rows * widest + rows * (width + d->ffn), memory + rows * (taken + width + d->ffn) / GROUP}};
  begin(&run);
  int wrong = OK;
  for (int64_t i = 0; i < d->n_layers && !wrong; i++) wrong = run_layer(&run, i);
  if (!wrong && p->n_wanted) finish(&run);
  free(memory);
  return wrong;
}

// Returns 0, or what is wrong: 1 a row, 2 a block id, 3 no memory, 4 a token outside the vocabulary. Where it is not 0 the
// logits mean nothing.
KERNEL(int, decode)(const Decoder *d, const Pass *p) {
  int wrong = check(d, p);
  if (wrong || !p->rows) return wrong;
  if (p->n_wanted || d->n_layers > 1 || (p->taps && p->taps[0])) return run_pass(d, p);
  // A single layer only stores what rows leave in it, each for itself: a few at a time, whose activations stay in the cache.
  for (int64_t row = 0; row < p->rows && !wrong; row += 2 * SLAB) {
    const Pass part = rows_of_pass(p, row, least(2 * SLAB, p->rows - row));
    wrong = run_pass(d, &part);
  }
  return wrong;
}
