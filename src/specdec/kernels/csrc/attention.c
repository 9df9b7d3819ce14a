// Order-invariant paged attention.
//
// A row's result is a function of its own ordered list of keys and of nothing else. Position j of the list is slot j while
// j < prefix, and an entry of the row's path from there on. For each (row, query head), over the positions that the window
// leaves:
//   score_j = (scale * q) . k_j, one fma per d, d in order, from 0;   m = their exact maximum;   p_j = exp(score_j - m);
//   den: sixteen sums in order, each of the p_j whose j is the same modulo 16, then added by f_sum;
//   o[d] = fma(p_j, v_j[d], o[d]) over j in order, from 0;   out = o * (1 / den).
// Scores are independent of each other, so sixteen slots of a block are computed side by side, for as many query heads and
// rows of one sequence as share the block; scores of slots that a row does not see are computed with the rest and dropped.
// Values are summed in order in every lane (lanes are entries of the head), and only those of visible keys are ever read into
// a sum. How rows are grouped, which blocks hold the keys and how many threads run therefore cannot reach a bit.
//
// What is quantised (kv.h) is read as it lies: score_j adds up sums over groups of d, each times its scale, and p_j is
// multiplied by the scale of a value's group before it weighs its codes. The same holds of it.
//
// keys [blocks, KV, block], values [blocks, KV, block], as kv.h has blocks; hd is a multiple of 8, and of 16 for codes.
#include <stdlib.h>

#include "attention_tiles.h"
#include "threads.h"

#define TILE_QUERIES 96    // queries of a tile
#define COPY_GROUPS 3      // groups of queries that gain by a copy of bfloat16 blocks as floats
#define COPY_HEAD 256      // entries of the longest head whose blocks are copied
#define TILE_SCORES (SPECDEC_LEVEL == 2 ? 196608 : 98304)  // of a tile: those of long contexts fit the second-level cache
#define GRAIN 70000        // multiply-adds worth a thread: at one row they wait for memory
#define SPLIT_BLOCKS 8     // the fewest blocks worth a chunk where the heads of one tile are too few for the threads
#define SPLIT_ENTRIES 32   // and how many entries of the head: a cache line of bfloat16

// Some blocks of keys or values: where the pool holds them, or a copy.
typedef struct {
  const void *p;
  const int64_t *at;
  int kind;
} Blocks;

// What a tile and one of its key heads are worked on in.
typedef struct {
  float *q;       // [queries, hd], scaled
  float *scores;  // [queries, width]: by slot, then by position, and then probabilities
  float *o;       // [queries, ld_o]: sixteens of the head; the last one ends at hd and may overlap the one before
  float *den;     // [queries]
  Group *groups;  // [n_groups]
  int64_t *at;    // [blocks + AHEAD] element at which a block starts
  int64_t *path;  // [rows, path_width] element at which the value of an entry starts; of codes, as a Span has it
  int64_t n_groups, width, ld_o;
} Work;

// Where query k lies in q or out.
static int64_t place(const Call *c, const Tile *t, int64_t kv, int64_t k, int64_t stride) {
  return (t->first + k / c->per_kv) * stride + (kv * c->per_kv + k % c->per_kv) * c->hd;
}

static void prepare(const Call *c, const Tile *t, int64_t kv, Work *w) {
  const int32_t *table = c->tables + (int64_t)c->sequence[t->first] * c->table_width;
  int64_t hd = c->hd, n_blocks = t->hi - t->lo, block = kv_block(c->kind, hd), row = kv_quantised(c->kind) ? 1 : hd;
  for (int64_t b = 0; b < n_blocks + AHEAD; b++)
    w->at[b] = (table[t->lo + least(b, n_blocks - 1)] * c->kv_heads + kv) * block;
  for (int64_t i = t->first; i < t->last; i++)
    for (int64_t a = path_start(c, i); a < c->n_path[i]; a++) {
      int64_t slot = c->path[i * c->path_width + a];
      w->path[(i - t->first) * c->path_width + a] = w->at[slot / BLOCK - t->lo] + slot % BLOCK * row;
    }
  w->n_groups = 0;
  for (int64_t k = 0; k < t->queries; k += MOST) w->groups[w->n_groups++] = group_of(c, t, k);
  for (int64_t k = 0; k < t->queries; k++) {
    const float *q = c->q + place(c, t, kv, k, c->q_stride);
    for (int64_t d = 0; d < hd; d++) w->q[k * hd + d] = c->scale * q[d];
  }
  memset(w->o, 0, (size_t)(t->queries * w->ld_o) * sizeof(float));
}

// n blocks of a tile from its b-th on, for all its groups. Each group would convert the same bfloat16 numbers, so many share
// a copy.
static Blocks blocks_of(const Call *c, const Work *w, const void *pool, int64_t b, int64_t n, int values, float *copy) {
  if (c->kind != KV_BF16 || w->n_groups < COPY_GROUPS || c->hd % LANES || c->hd > COPY_HEAD)
    return (Blocks){pool, w->at + b, c->kind};
  copy_blocks(pool, w->at + b, n, c->hd, values, copy);
  return (Blocks){copy, c->copied, COPIED};
}

// Scores of all queries against blocks [from, to) of the tile's.
static void score_blocks_of(const Call *c, const Tile *t, const Work *w, int64_t from, int64_t to) {
  _Alignas(64) float copy[SPAN * BLOCK * COPY_HEAD];
  for (int64_t b = from; b < to; b += SPAN) {
    const int64_t n = least(SPAN, to - b);
    const Blocks keys = blocks_of(c, w, c->keys, b, n, 0, copy);
    for (const Group *g = w->groups; g < w->groups + w->n_groups; g++)
      if (t->lo + b < g->end)
        score_any(g->last - g->k, keys.kind, w->q + g->k * c->hd, c->hd, keys.p, keys.at, least(n, g->end - t->lo - b),
                  w->scores + g->k * w->width + b * BLOCK, w->width);
  }
}

// Scores of queries [k, end) become probabilities, those of a path behind those of the prefix. All maxima come first: the
// exponentials of one query then need not wait for the latency of its own.
static void soften_queries(const Call *c, const Tile *t, const Work *w, int64_t k, int64_t end) {
  float most[MOST];
  for (int64_t last; k < end; k = last) {
    last = least(k + MOST, end);
    for (int64_t r = k; r < last; r++) {
      int64_t i = t->first + r / c->per_kv, skip = path_start(c, i), n = c->n_path[i], behind = c->prefix[i] - t->base;
      const int32_t *path = c->path + i * c->path_width;
      float *s = w->scores + r * w->width, *taken = s + w->width - c->path_width;
      for (int64_t a = skip; a < n; a++) taken[a] = s[path[a] - t->base];
      for (int64_t a = skip; a < n; a++) s[behind + a] = taken[a];
      most[r - k] = maximum(s, start_of(c, i) - t->base, behind + n);
    }
    for (int64_t r = k; r < last; r++) {
      int64_t i = t->first + r / c->per_kv;
      w->den[r] = soften(w->scores + r * w->width, start_of(c, i) - t->base, c->prefix[i] - t->base + c->n_path[i], most[r - k]);
    }
  }
}

// Add the values of slots [from, to) to n queries, entries [d, end) of the head; `values` begin with the tile's b-th block.
static void weigh_slots(const Call *c, const Tile *t, const Work *w, const Blocks *values, int64_t b, int64_t k, int64_t n,
                        int64_t from, int64_t to, int64_t d, int64_t end) {
  from -= t->base;
  to -= t->base;
  if (from >= to) return;
  Span keys = {values->at + from / BLOCK - b, BLOCK, from % BLOCK, to - from, AHEAD};
  if (values->kind == COPIED) keys = (Span){values->at, SPAN * BLOCK, from - b * BLOCK, to - from, 0};
  weigh_any(n, values->kind, c->hd, d, end, w->scores + k * w->width + from, w->width, values->p, &keys, w->o + k * w->ld_o,
            w->ld_o);
}

// Add the values of a row's path to n of its queries.
static void weigh_path(const Call *c, const Tile *t, const Work *w, int64_t k, int64_t n, int64_t d, int64_t end) {
  int64_t i = t->first + k / c->per_kv, skip = path_start(c, i);
  if (skip >= c->n_path[i]) return;
  Span keys = {w->path + (i - t->first) * c->path_width + skip, 1, 0, c->n_path[i] - skip, 0};
  weigh_any(n, c->kind, c->hd, d, end, w->scores + k * w->width + c->prefix[i] - t->base + skip, w->width, c->values, &keys,
            w->o + k * w->ld_o, w->ld_o);
}

// A group row by row: what a row's list holds before the slots that all of them see, or what comes after.
static void weigh_alone(const Call *c, const Tile *t, const Work *w, const Group *g, int after, int64_t d, int64_t end) {
  const Blocks values = {c->values, w->at, c->kind};
  for (int64_t k = g->k, n; k < g->last; k += n) {
    const int64_t i = t->first + k / c->per_kv, start = start_of(c, i), prefix = c->prefix[i];
    n = least(g->last, (k / c->per_kv + 1) * c->per_kv) - k;
    if (!after) {
      weigh_slots(c, t, w, &values, 0, k, n, start, least(g->from, prefix), d, end);
      continue;
    }
    weigh_slots(c, t, w, &values, 0, k, n, greatest(g->to, start), prefix, d, end);
    weigh_path(c, t, w, k, n, d, end);
  }
}

// Entries [d, end) of the head of all results: what all rows of a group see in common they pass over together, what comes
// before and after in the list of one row that row passes over alone.
static void weigh_entries_of(const Call *c, const Tile *t, int64_t kv, const Work *w, int64_t d, int64_t end) {
  _Alignas(64) float copy[SPAN * BLOCK * COPY_HEAD];
  const Group *groups = w->groups, *stop = groups + w->n_groups;
  for (const Group *g = groups; g < stop; g++) weigh_alone(c, t, w, g, 0, d, end);
  for (int64_t b = 0; b < t->hi - t->lo; b += SPAN) {
    const int64_t first = t->base + b * BLOCK, n = least(SPAN, t->hi - t->lo - b);
    const Blocks values = blocks_of(c, w, c->values, b, n, 1, copy);
    for (const Group *g = groups; g < stop; g++)
      weigh_slots(c, t, w, &values, b, g->k, g->last - g->k, greatest(g->from, first), least(g->to, first + n * BLOCK), d, end);
  }
  for (const Group *g = groups; g < stop; g++) weigh_alone(c, t, w, g, 1, d, end);
  for (int64_t k = 0; k < t->queries; k++) {
    const float *o = w->o + k * w->ld_o;
    f32x16 inverse = f_set1(1.0f / w->den[k]);
    float *out = c->out + place(c, t, kv, k, c->kv_heads * c->per_kv * c->hd);
    for (int64_t e = d; e < end; e += LANES) {
      f32x16 x = f_mul(in_order(f_load(o + e), c->kind), inverse);
      if (c->hd < LANES) f_store_n(out, x, (int)c->hd);
      else f_store(out + least(e, c->hd - LANES), x);
    }
  }
}

// Pieces of a grow-only buffer per thread: `works` times the room that the tiles of a call need.
typedef struct {
  int64_t rows, queries, places;  // the most of any tile
} Room;

static int take(const Call *c, const Room *r, int64_t works, Work *w) {
  static _Thread_local char *buffer;
  static _Thread_local size_t size;
  // An odd number of sixteens, or the queries' scores would fight over the same sets of the cache.
  int64_t width = (r->places + up16(c->path_width)) | BLOCK, ld_o = up16(c->hd), at = r->places / BLOCK + AHEAD;
  size_t floats = (size_t)up16(r->queries * (c->hd + width + ld_o + 1));
  size_t groups = (size_t)(r->queries + MOST - 1) / MOST;
  size_t bytes = floats * sizeof(float) + groups * sizeof(Group) + (size_t)(at + r->rows * c->path_width) * sizeof(int64_t);
  bytes = (bytes + 63) & ~(size_t)63;
  if ((size_t)works * bytes + 64 > size) {
    free(buffer);
    size = (size_t)works * bytes * 5 / 4 + 64;
    buffer = malloc(size);
    if (!buffer) return (int)(size = 0);
  }
  char *p = (char *)(((uintptr_t)buffer + 63) & ~(uintptr_t)63);
  for (int64_t i = 0; i < works; i++, w++, p += bytes) {
    w->width = width;
    w->ld_o = ld_o;
    w->scores = (float *)p;
    w->o = w->scores + r->queries * width;
    w->q = w->o + r->queries * ld_o;
    w->den = w->q + r->queries * c->hd;
    w->groups = (Group *)(w->scores + floats);
    w->at = (int64_t *)(w->groups + groups);
    w->path = w->at + at;
  }
  return 1;
}


// Does every row name a table, slots inside it, and blocks that exist?
static int check(const Call *c, int64_t rows, int64_t sequences, int64_t n_blocks) {
  int64_t slots = c->table_width * BLOCK;
  for (int64_t i = 0; i < rows; i++) {
    if (c->sequence[i] < 0 || c->sequence[i] >= sequences || c->prefix[i] < 0 || c->prefix[i] > slots) return BAD_ROW;
    if (c->n_path[i] < 0 || c->n_path[i] > c->path_width || c->prefix[i] + c->n_path[i] < 1) return BAD_ROW;
    for (int64_t a = 0; a < c->n_path[i]; a++)
      if (c->path[i * c->path_width + a] < 0 || c->path[i * c->path_width + a] >= slots) return BAD_ROW;
  }
  int bad = 0;  // without a branch: tables may be wide, and this is done for every layer
  uint32_t end = (uint32_t)least(n_blocks, INT32_MAX);
  for (int64_t b = 0; b < sequences * c->table_width; b++) bad |= (uint32_t)c->tables[b] >= end;
  return bad ? BAD_BLOCK : OK;
}

typedef struct {
  const Call *call;
  const Tile *tiles;
  Work *works;  // one per key head, where the heads of a single tile are split
  Room room;
  int64_t n_tiles, parts;
  _Atomic int wrong;
} Job;

// One tile of rows for one key head.
static void tile_chunk(void *context, int64_t i) {
  Job *job = context;
  const Call *c = job->call;
  const Tile *t = job->tiles + i % job->n_tiles;
  int64_t kv = i / job->n_tiles;
  Work w;
  if (!take(c, &job->room, 1, &w)) {
    job->wrong = NO_MEMORY;
    return;
  }
  prepare(c, t, kv, &w);
  score_blocks_of(c, t, &w, 0, t->hi - t->lo);
  soften_queries(c, t, &w, 0, t->queries);
  weigh_entries_of(c, t, kv, &w, 0, c->hd);
}

// The same in three steps, each cut another way: by blocks, by queries, by entries of the head. A fifth more work than by
// whole heads, whose scores and values stay in one thread's cache: worth it where half of the threads had no head.
static void score_chunk(void *context, int64_t i) {
  Job *job = context;
  int64_t kv = i / job->parts, n = i % job->parts, n_blocks = job->tiles->hi - job->tiles->lo;
  score_blocks_of(job->call, job->tiles, job->works + kv, part(n_blocks, job->parts, n), part(n_blocks, job->parts, n + 1));
}
static void soften_chunk(void *context, int64_t i) {
  Job *job = context;
  int64_t k = i % job->tiles->queries;
  soften_queries(job->call, job->tiles, job->works + i / job->tiles->queries, k, k + 1);
}
static void weigh_chunk(void *context, int64_t i) {
  Job *job = context;
  int64_t kv = i / job->parts, d = job->call->hd / job->parts;
  weigh_entries_of(job->call, job->tiles, kv, job->works + kv, i % job->parts * d, (i % job->parts + 1) * d);
}

static int split(Job *job, int threads) {
  const Call *c = job->call;
  const Tile *t = job->tiles;
  job->works = malloc((size_t)c->kv_heads * sizeof(Work));
  if (!job->works || !take(c, &job->room, c->kv_heads, job->works)) {
    free(job->works);
    return NO_MEMORY;
  }
  for (int64_t kv = 0; kv < c->kv_heads; kv++) prepare(c, t, kv, job->works + kv);
  job->parts = greatest(1, least(2 * threads, (t->hi - t->lo) / SPLIT_BLOCKS));
  specdec_parallel(threads, c->kv_heads * job->parts, score_chunk, job);
  specdec_parallel(threads, c->kv_heads * t->queries, soften_chunk, job);
  job->parts = c->hd % SPLIT_ENTRIES ? 1 : c->hd / SPLIT_ENTRIES;
  specdec_parallel(threads, c->kv_heads * job->parts, weigh_chunk, job);
  free(job->works);
  return OK;
}

// Returns 0, or what is wrong: 1 a row (its table, prefix or path), 2 a block id, 3 no memory.
KERNEL(int, attend)
(const float *q, int64_t q_stride, const void *keys, const void *values, int kind, int64_t n_blocks, const int32_t *tables,
 int64_t sequences, int64_t table_width, const int32_t *sequence, const int32_t *prefix, const int32_t *path,
 int64_t path_width, const int32_t *n_path, float *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t hd, float scale,
 int64_t window) {
  const int64_t per_kv = heads / kv_heads;
  int64_t seen = 0, longest = 0;
  Call c = {q, q_stride, keys, values, tables, sequence, prefix, path, n_path, out, table_width, path_width, per_kv, kv_heads,
            hd, window, scale, kind, {0}};
  for (int64_t b = 0; b < SPAN; b++) c.copied[b] = b * BLOCK * hd;
  int wrong = check(&c, rows, sequences, n_blocks);
  if (wrong) return wrong;
  for (int64_t i = 0; i < rows; i++) {
    int64_t n = prefix[i] + n_path[i] - start_of(&c, i);
    seen += n;
    longest = greatest(longest, n);
  }
  int threads = threads_for(seen * heads * hd * 2, GRAIN);
  const int64_t few = greatest(1, MOST / per_kv), fit = least(TILE_QUERIES, TILE_SCORES / greatest(1, longest)) / per_kv;
  const int64_t most = rows_of_tile(&c, rows, few, greatest(few, fit), threads);

  Tile *tiles = malloc((size_t)(rows + 1) * sizeof(Tile));
  if (!tiles) return NO_MEMORY;
  Job job = {.call = &c, .tiles = tiles};
  for (int64_t i = 0, next; i < rows; i = next) {
    for (next = i + 1; next < rows && next - i < most && sequence[next] == sequence[i];) next++;
    Tile t = tiles[job.n_tiles++] = tile_of(&c, i, next);
    job.room.rows = greatest(job.room.rows, next - i);
    job.room.queries = greatest(job.room.queries, t.queries);
    for (int64_t k = i; k < next; k++)
      job.room.places = greatest(job.room.places, up16(greatest(t.hi * BLOCK, prefix[k] + n_path[k]) - t.base));
  }
  if (job.n_tiles == 1 && 2 * kv_heads <= threads) job.wrong = split(&job, threads);
  else specdec_parallel(threads, kv_heads * job.n_tiles, tile_chunk, &job);
  free(tiles);
  return job.wrong;
}
