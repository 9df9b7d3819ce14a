// How the rows of an attention call are cut: into tiles, whose scores are held at once, and groups of queries, which are summed
// side by side.
#ifndef SPECDEC_ATTENTION_TILES_H
#define SPECDEC_ATTENTION_TILES_H

#include "attention.h"
#include "rows.h"

#define SPAN 4         // blocks that all queries of a tile pass over together, while they are in the first-level cache
#define TILE_COST 4    // what a tile costs beside its queries, in queries: it copies or converts what they see
#define MANY_CHUNKS 8  // for a thread: as good as equal shares

typedef struct {
  const float *q;
  int64_t q_stride;
  const void *keys, *values;
  const int32_t *tables, *sequence, *prefix, *path, *n_path;
  float *out;
  int64_t table_width, path_width, per_kv, kv_heads, hd, window;
  float scale;
  int kind;
  int64_t copied[SPAN + MOST_COLUMNS];  // element at which a block of a copy starts
} Call;

// Rows [first, last) of one sequence, with every block from lo to hi - 1 that one of them may see. Query k of a tile and a key
// head is the row first + k / per_kv with its query head k % per_kv. Places in a list count from base = 16 lo.
typedef struct {
  int64_t first, last, lo, hi, base, queries;
} Tile;

// Queries [k, last) of a tile, which are summed side by side; the slots [from, to) that all their rows see; and the block of
// the table before which all that they see ends.
typedef struct {
  int64_t k, last, from, to, end;
} Group;

static inline int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t up16(int64_t n) { return (n + 15) & ~(int64_t)15; }

// First visible position of a row's list, and the first visible entry of its path.
static inline int64_t start_of(const Call *c, int64_t i) {
  return c->window > 0 ? greatest(0, c->prefix[i] + c->n_path[i] - c->window) : 0;
}
static inline int64_t path_start(const Call *c, int64_t i) { return greatest(0, start_of(c, i) - c->prefix[i]); }

// The blocks that rows [first, last) may see.
static inline Tile tile_of(const Call *c, int64_t first, int64_t last) {
  Tile t = {first, last, INT64_MAX, 0, 0, (last - first) * c->per_kv};
  for (int64_t i = first; i < last; i++) {
    t.lo = least(t.lo, start_of(c, i) / BLOCK);
    if (start_of(c, i) < c->prefix[i]) t.hi = greatest(t.hi, (c->prefix[i] + BLOCK - 1) / BLOCK);
    for (int64_t a = path_start(c, i); a < c->n_path[i]; a++) {
      int64_t block = c->path[i * c->path_width + a] / BLOCK;
      t.lo = least(t.lo, block);
      t.hi = greatest(t.hi, block + 1);
    }
  }
  t.base = t.lo * BLOCK;
  return t;
}

// Queries from k on that are summed side by side.
static inline Group group_of(const Call *c, const Tile *t, int64_t k) {
  const int64_t last = least(k + MOST, t->queries), first_row = t->first + k / c->per_kv;
  const int64_t last_row = t->first + (last - 1) / c->per_kv;
  Group g = {k, last, 0, INT64_MAX, tile_of(c, first_row, last_row + 1).hi};
  for (int64_t i = first_row; i <= last_row; i++) {
    g.from = greatest(g.from, start_of(c, i));
    g.to = least(g.to, c->prefix[i]);
  }
  if (g.to < g.from) g.from = g.to = INT64_MAX;  // nothing in common: every row by itself
  return g;
}

// Rows of a tile: from few to most, so that threads which share equal tiles are soonest done.
static inline int64_t rows_of_tile(const Call *c, int64_t rows, int64_t few, int64_t most, int threads) {
  int64_t best = most, soonest = INT64_MAX, n = greatest(1, (rows + most - 1) / most), size, chunks;
  do {
    size = (rows + n - 1) / n;
    chunks = c->kv_heads * n++;
    const int64_t time = (chunks + threads - 1) / threads * (size * c->per_kv + TILE_COST);
    if (time < soonest) best = size, soonest = time;
  } while (size > few && chunks < MANY_CHUNKS * threads);
  return best;
}

#endif
