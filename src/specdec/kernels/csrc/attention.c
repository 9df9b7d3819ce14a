// Order-invariant paged attention.
//
// A row's result is a function of its own ordered list of keys and of nothing else. For each (row, query head):
//   score_j = scale * (q . k_j, one fma per d, d in order, from 0);   m = exact maximum over the visible keys;
//   p_j = exp(score_j - m);   then over j in order: den += p_j, o[d] = fma(p_j, v_j[d], o[d]);   out = o * (1 / den).
// Scores are independent of each other, so sixteen slots of a block are computed side by side, for as many query heads and
// rows of one sequence as share the block; scores of slots that a row does not see are computed with the rest and dropped.
// Values are summed in order in every lane (lanes are entries of the head), and only those of visible keys are ever read into
// a sum. How rows are grouped, which blocks hold the keys and how many threads run therefore cannot reach a bit.
//
// keys [blocks, KV, hd, 16], values [blocks, KV, 16, hd]; hd is a multiple of 8.
#include <stdlib.h>

#include "attention.h"
#include "threads.h"

#define SPAN 8             // blocks that all queries of a tile pass over together, while they are in the first-level cache
#define TILE_QUERIES 24    // queries of a tile
#define TILE_SCORES 98304  // scores of a tile, so that long contexts stay within the second-level cache
#define GRAIN 500000       // multiply-adds worth a thread

typedef struct {
  const float *q;
  int64_t q_stride;
  const void *keys, *values;
  const int32_t *tables, *sequence, *prefix, *path, *n_path;
  float *out;
  int64_t table_width, path_width, heads, kv_heads, hd, window;
  float scale;
  int bf16;
} Call;

// Rows [first, last) of one sequence, with every block from lo to hi - 1 that one of them may see.
typedef struct {
  int64_t first, last, lo, hi;
} Tile;

// Some heads of one or more rows of a tile, summed side by side; their queries follow each other, row by row, from `query` on
// among the tile's. All of its rows see slots [from, to).
typedef struct {
  int64_t first, rows, head, heads, query, from, to;
} Group;

// What a thread works in. Queries are numbered within the tile.
typedef struct {
  float *q;       // [groups][hd][R]
  float *scores;  // [queries, width] by slot from lo * 16 on, then probabilities
  float *path;    // [queries, path_width padded]
  float *o;       // [queries, ld_o]: sixteens of the head; the last one ends at hd and may overlap the one before
  float *den;     // [queries]
  int64_t *row;   // element at which the value of a slot starts
  int64_t *path_row;
  int64_t width, ld_path, ld_o;
} Scratch;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t up16(int64_t n) { return (n + 15) & ~(int64_t)15; }

// First visible index of a row's list.
static int64_t start_of(const Call *c, int64_t i) {
  return c->window > 0 ? greatest(0, c->prefix[i] + c->n_path[i] - c->window) : 0;
}

static float scale_and_max(float *s, int64_t n, float scale, float m) {
  f32x16 most = f_set1(m);
  for (int64_t j = 0; j < n; j += LANES) {
    f32x16 x = f_mul(f_load(s + j), f_set1(scale));
    f_store(s + j, x);
    most = f_max(most, x);
  }
  return f_max_lanes(most);
}

// Scale one query's scores and find their maximum. Its list is slots [from, to) of s, then n of s at path, which are copied
// out to p first. Lanes that share a vector with the list but are not of it are emptied.
static float scale_list(float *s, int64_t from, int64_t to, const int32_t *path, int64_t n, int64_t base, float scale,
                        float *p) {
  for (int64_t a = 0; a < up16(n); a++) p[a] = a < n ? s[path[a] - base] : -INFINITY;
  float m = scale_and_max(p, up16(n), scale, -INFINITY);
  if (from >= to) return m;
  int64_t begin = from & ~(int64_t)15, end = up16(to);
  for (int64_t j = begin; j < from; j++) s[j] = -INFINITY;
  for (int64_t j = to; j < end; j++) s[j] = -INFINITY;
  return scale_and_max(s + begin, end - begin, scale, m);
}

// The visible part of row i's path: its first entry, and how many.
static const int32_t *path_of(const Call *c, int64_t i, int64_t *n) {
  int64_t skip = least(greatest(0, start_of(c, i) - c->prefix[i]), c->n_path[i]);
  *n = c->n_path[i] - skip;
  return c->path + i * c->path_width + skip;
}

// From scores to probabilities and denominators, for the queries of a group.
static void soften(const Call *c, const Tile *t, const Group *g, const Scratch *w) {
  int64_t base = t->lo * BLOCK, R = g->rows * g->heads, from[MOST] = {0}, to[MOST] = {0}, begin = INT64_MAX, end = 0, n;
  float m[MOST] = {0}, *s = w->scores + g->query * w->width, *den = w->den + g->query;
  for (int64_t k = 0; k < R; k++) {
    int64_t i = g->first + k / g->heads;
    const int32_t *path = path_of(c, i, &n);
    from[k] = greatest(0, start_of(c, i) - base);
    to[k] = c->prefix[i] - base;
    m[k] = scale_list(s + k * w->width, from[k], to[k], path, n, base, c->scale, w->path + (g->query + k) * w->ld_path);
    if (from[k] >= to[k]) continue;
    begin = least(begin, from[k]);
    end = greatest(end, to[k]);
  }
  soften_any((int)R, s, w->width, m, from, to, begin, end, den);
  for (int64_t k = 0; k < R; k++) {
    float *p = w->path + (g->query + k) * w->ld_path;
    path_of(c, g->first + k / g->heads, &n);
    for (int64_t a = 0; a < n; a += LANES) f_store(p + a, f_exp(f_sub(f_load(p + a), f_set1(m[k]))));
    for (int64_t a = 0; a < n; a++) den[k] += p[a];
  }
}

// Add the values of slots [from, to) to a group, or to one row of it.
static void weigh_slots(const Call *c, const Tile *t, const Group *g, int64_t row, int64_t rows, int64_t from, int64_t to,
                        const Scratch *w) {
  int64_t query = g->query + row * g->heads, at = from - t->lo * BLOCK;
  if (from < to)
    weigh_any((int)(rows * g->heads), c->bf16, c->hd, w->scores + query * w->width + at, w->width, c->values, w->row + at,
              AHEAD, to - from, w->o + query * w->ld_o, w->ld_o);
}

// Add the values of a row's path.
static void weigh_path(const Call *c, const Tile *t, const Group *g, int64_t row, const Scratch *w) {
  int64_t query = g->query + row * g->heads, n;
  const int32_t *path = path_of(c, g->first + row, &n);
  for (int64_t a = 0; a < n; a++) w->path_row[a] = w->row[path[a] - t->lo * BLOCK];
  if (n)
    weigh_any((int)g->heads, c->bf16, c->hd, w->path + query * w->ld_path, w->ld_path, c->values, w->path_row, 0, n,
              w->o + query * w->ld_o, w->ld_o);
}

// Cut the heads of the tile's rows into groups of at most MOST queries: whole rows, or a share of one row's heads.
static int cut(const Call *c, const Tile *t, Group *groups) {
  int64_t per_kv = c->heads / c->kv_heads, pieces = (per_kv + MOST - 1) / MOST, rows = pieces > 1 ? 1 : MOST / per_kv;
  int64_t query = 0, n = 0;
  for (int64_t i = t->first; i < t->last; i += rows)
    for (int64_t piece = 0; piece < pieces; piece++) {
      int64_t head = per_kv * piece / pieces, heads = per_kv * (piece + 1) / pieces - head;
      Group g = {i, least(rows, t->last - i), head, heads, query, 0, INT64_MAX};
      for (int64_t k = i; k < i + g.rows; k++) {
        g.from = greatest(g.from, start_of(c, k));
        g.to = least(g.to, c->prefix[k]);
      }
      if (g.to < g.from) g.from = g.to = INT64_MAX;  // nothing in common: every row by itself
      query += g.rows * heads;
      groups[n++] = g;
    }
  return (int)n;
}

// Where query k of a group lies in q or out.
static int64_t place(const Call *c, const Group *g, int64_t kv, int64_t k, int64_t stride) {
  return (g->first + k / g->heads) * stride + (kv * (c->heads / c->kv_heads) + g->head + k % g->heads) * c->hd;
}

static void attend_tile(const Call *c, const Tile *t, int64_t kv, const Scratch *w, Group *groups) {
  int64_t hd = c->hd, base = t->lo * BLOCK, n_blocks = t->hi - t->lo;
  const int32_t *table = c->tables + (int64_t)c->sequence[t->first] * c->table_width;
  const Group *end = groups + cut(c, t, groups);
  for (int64_t b = 0; b < n_blocks + AHEAD / BLOCK; b++) {
    int64_t block = table[t->lo + least(b, n_blocks - 1)];
    for (int64_t s = 0; s < BLOCK; s++) w->row[b * BLOCK + s] = ((block * c->kv_heads + kv) * BLOCK + s) * hd;
  }
  for (const Group *g = groups; g < end; g++)
    for (int64_t R = g->rows * g->heads, k = 0; k < R; k++) {
      const float *q = c->q + place(c, g, kv, k, c->q_stride);
      for (int64_t d = 0; d < hd; d++) w->q[g->query * hd + d * R + k] = q[d];
    }

  for (int64_t b = 0; b < n_blocks; b += SPAN)
    for (const Group *g = groups; g < end; g++)
      score_any((int)(g->rows * g->heads), c->bf16, w->q + g->query * hd, hd, c->keys, w->row + b * BLOCK,
                least(SPAN, n_blocks - b), w->scores + g->query * w->width + b * BLOCK, w->width);

  for (const Group *g = groups; g < end; g++) soften(c, t, g, w);

  memset(w->o, 0, (size_t)((t->last - t->first) * (c->heads / c->kv_heads) * w->ld_o) * sizeof(float));
  for (const Group *g = groups; g < end; g++)
    for (int64_t r = 0; r < g->rows; r++)
      weigh_slots(c, t, g, r, 1, start_of(c, g->first + r), least(g->from, c->prefix[g->first + r]), w);
  for (int64_t slot = base; slot < t->hi * BLOCK; slot += SPAN * BLOCK)
    for (const Group *g = groups; g < end; g++)
      weigh_slots(c, t, g, 0, g->rows, greatest(g->from, slot), least(g->to, slot + SPAN * BLOCK), w);
  for (const Group *g = groups; g < end; g++) {
    for (int64_t r = 0; r < g->rows; r++) {
      weigh_slots(c, t, g, r, 1, greatest(g->to, start_of(c, g->first + r)), c->prefix[g->first + r], w);
      weigh_path(c, t, g, r, w);
    }
    for (int64_t k = 0; k < g->rows * g->heads; k++) {
      const float *o = w->o + (g->query + k) * w->ld_o;
      f32x16 inverse = f_set1(1.0f / w->den[g->query + k]);
      float *out = c->out + place(c, g, kv, k, c->heads * hd);
      for (int64_t d = 0; d < hd; d += LANES) {
        f32x16 x = f_mul(in_order(f_load(o + d), c->bf16), inverse);
        if (hd < LANES) f_store_n(out, x, (int)hd);
        else f_store(out + least(d, hd - LANES), x);
      }
    }
  }
}

// The blocks that rows [first, last) may see.
static Tile tile_of(const Call *c, int64_t first, int64_t last) {
  Tile t = {first, last, INT64_MAX, 0};
  for (int64_t i = first; i < last; i++) {
    int64_t start = start_of(c, i);
    if (start < c->prefix[i]) {
      t.lo = least(t.lo, start / BLOCK);
      t.hi = greatest(t.hi, (c->prefix[i] + BLOCK - 1) / BLOCK);
    }
    for (int64_t a = greatest(0, start - c->prefix[i]); a < c->n_path[i]; a++) {
      int64_t block = c->path[i * c->path_width + a] / BLOCK;
      t.lo = least(t.lo, block);
      t.hi = greatest(t.hi, block + 1);
    }
  }
  if (t.lo > t.hi) t.lo = t.hi;
  return t;
}

// One grow-only buffer per thread, carved into the pieces of a Scratch.
static int scratch_for(const Call *c, int64_t queries, int64_t slots, Scratch *w, Group **groups) {
  static _Thread_local char *buffer;
  static _Thread_local size_t size;
  w->width = slots + BLOCK;  // never a multiple of a page for the usual contexts: rows would fight over cache sets
  w->ld_path = up16(c->path_width);
  w->ld_o = up16(c->hd);
  int64_t places = slots + AHEAD;
  size_t floats = (size_t)(queries * (c->hd + w->width + w->ld_path + w->ld_o) + up16(queries));
  size_t bytes = floats * sizeof(float) + (size_t)(places + w->ld_path) * sizeof(int64_t) + (size_t)queries * sizeof(Group);
  if (bytes + 64 > size) {
    free(buffer);
    size = bytes + bytes / 4 + 64;
    buffer = malloc(size);
    if (!buffer) return (int)(size = 0);
  }
  char *p = (char *)(((uintptr_t)buffer + 63) & ~(uintptr_t)63);
  w->row = (int64_t *)p;
  w->path_row = w->row + places;
  *groups = (Group *)(w->path_row + w->ld_path);
  w->scores = (float *)(*groups + queries);
  w->path = w->scores + queries * w->width;
  w->o = w->path + queries * w->ld_path;
  w->q = w->o + queries * w->ld_o;
  w->den = w->q + queries * c->hd;
  return 1;
}

enum { OK, BAD_ROW, BAD_BLOCK, NO_MEMORY };

// Does every row name a table, slots inside it, and blocks that exist?
static int check(const Call *c, int64_t rows, int64_t sequences, int64_t n_blocks) {
  int64_t slots = c->table_width * BLOCK;
  for (int64_t i = 0; i < rows; i++) {
    if (c->sequence[i] < 0 || c->sequence[i] >= sequences || c->prefix[i] < 0 || c->prefix[i] > slots) return BAD_ROW;
    if (c->n_path[i] < 0 || c->n_path[i] > c->path_width || c->prefix[i] + c->n_path[i] < 1) return BAD_ROW;
    for (int64_t a = 0; a < c->n_path[i]; a++)
      if (c->path[i * c->path_width + a] < 0 || c->path[i * c->path_width + a] >= slots) return BAD_ROW;
  }
  for (int64_t b = 0; b < sequences * c->table_width; b++)
    if (c->tables[b] < 0 || c->tables[b] >= n_blocks) return BAD_BLOCK;
  return OK;
}

typedef struct {
  const Call *call;
  const Tile *tiles;
  int64_t n_tiles, queries, slots;
  _Atomic int wrong;
} Tiles;

// One tile of rows for one key head.
static void tile_chunk(void *context, int64_t i) {
  Tiles *all = context;
  Group *groups;
  Scratch w;
  if (scratch_for(all->call, all->queries, all->slots, &w, &groups))
    attend_tile(all->call, all->tiles + i % all->n_tiles, i / all->n_tiles, &w, groups);
  else all->wrong = NO_MEMORY;
}

// Returns 0, or what is wrong: 1 a row (its table, prefix or path), 2 a block id, 3 no memory.
KERNEL(int, attend)
(const float *q, int64_t q_stride, const void *keys, const void *values, int bf16, int64_t n_blocks, const int32_t *tables,
 int64_t sequences, int64_t table_width, const int32_t *sequence, const int32_t *prefix, const int32_t *path,
 int64_t path_width, const int32_t *n_path, float *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t hd, float scale,
 int64_t window) {
  Call c = {q, q_stride, keys, values, tables, sequence, prefix, path, n_path, out, table_width, path_width, heads, kv_heads,
            hd, window, scale, bf16};
  int wrong = check(&c, rows, sequences, n_blocks);
  if (wrong) return wrong;
  int64_t per_kv = heads / kv_heads, seen = 0, longest = 0;
  for (int64_t i = 0; i < rows; i++) {
    int64_t n = c.prefix[i] + c.n_path[i] - start_of(&c, i);
    seen += n;
    longest = greatest(longest, n);
  }
  int threads = threads_for(seen * heads * hd * 2, GRAIN);
  int64_t most = least(TILE_QUERIES, TILE_SCORES / greatest(1, longest)) / per_kv, few = greatest(1, MOST / per_kv);
  most = greatest(most, few);
  while (most > few && threads > 1 && kv_heads * ((rows + most - 1) / most) < 4 * threads) most = greatest(few, most / 2);

  Tile *tiles = malloc((size_t)(rows + 1) * sizeof(Tile));
  if (!tiles) return NO_MEMORY;
  int64_t n_tiles = 0, slots = 0;
  for (int64_t i = 0, next; i < rows; i = next) {
    for (next = i + 1; next < rows && next - i < most && sequence[next] == sequence[i];) next++;
    tiles[n_tiles] = tile_of(&c, i, next);
    slots = greatest(slots, (tiles[n_tiles].hi - tiles[n_tiles].lo) * BLOCK);
    n_tiles++;
  }
  Tiles all = {&c, tiles, n_tiles, most * per_kv, slots, OK};
  specdec_parallel(threads, kv_heads * n_tiles, tile_chunk, &all);
  free(tiles);
  return all.wrong;
}
