// What followed the latest places where the end of a text stands, as a tree: draft/continuations.py says which.
#include "simd.h"

#include <stdlib.h>

#define GAP -1
#define STRETCH 64  // tokens that are searched at a time

typedef struct {
  const int32_t *ends;  // nothing follows these tokens
  int64_t n_ends;
  int64_t width;  // most tokens that are read behind a place
  double min_probability, prior;
} Rule;

typedef struct {
  double probability;
  int64_t parent, depth, first, count;  // the rows through it are through[first] and so on
  int32_t token;
} Branch;

typedef struct {
  const int32_t **rows;  // [most] what stands behind a place
  int64_t *through;      // [(nodes + 2) * most] rows, by the branches that they run through, all of them first
  Branch *branches;      // [(nodes + 2) * most]
  int64_t *open;         // [as many] branches that may become nodes, in the order in which they were found
  int64_t n_through, n_branches, n_open;
} Work;

typedef struct {
  int32_t *tokens, *parents;
  double *estimates, score;
  int64_t n;
} Candidate;

// Open the branches that `count` rows, listed in `through`, have at `depth`.
static void expand(Work *w, const Rule *rule, int64_t parent, double probability, int64_t depth, const int64_t *through,
                   int64_t count) {
  if (depth >= rule->width) return;
  Branch *found = w->branches + w->n_branches;
  int64_t n = 0, going = 0;
  for (int64_t i = 0; i < count; i++) {
    int32_t token = w->rows[through[i]][depth];
    if (token == GAP) continue;
    going++;
    int64_t at = 0;
    while (at < n && found[at].token != token) at++;
    if (at == n) found[n++] = (Branch){0, parent, depth, 0, 0, token};
    found[at].count++;
  }
  double total = (double)going + rule->prior;
  int64_t kept = 0;
  for (int64_t at = 0; at < n; at++) {
    Branch b = found[at];
    b.probability = probability * (double)b.count / total;
    if (b.probability < rule->min_probability) continue;
    b.first = w->n_through;
    for (int64_t i = 0; i < count; i++)
      if (w->rows[through[i]][depth] == b.token) w->through[w->n_through++] = through[i];
    w->open[w->n_open++] = w->n_branches + kept;
    found[kept++] = b;  // never ahead of what is read
  }
  w->n_branches += kept;
}

// The most probable tree of at most `limit` nodes over the first `count` rows.
static void grow(Work *w, const Rule *rule, int64_t count, int64_t limit, Candidate *tree) {
  w->n_branches = w->n_open = tree->n = 0;
  tree->score = 0;
  for (w->n_through = 0; w->n_through < count; w->n_through++) w->through[w->n_through] = w->n_through;
  expand(w, rule, -1, 1.0, 0, w->through, count);
  while (w->n_open && tree->n < limit) {
    int64_t at = 0;
    for (int64_t i = 1; i < w->n_open; i++)
      if (w->branches[w->open[i]].probability > w->branches[w->open[at]].probability) at = i;
    Branch b = w->branches[w->open[at]];
    memmove(w->open + at, w->open + at + 1, (size_t)(--w->n_open - at) * sizeof *w->open);
    int64_t node = tree->n++;
    tree->tokens[node] = b.token;
    tree->parents[node] = (int32_t)b.parent;
    tree->estimates[node] = b.probability;
    tree->score += b.probability;
    int end = 0;
    for (int64_t i = 0; i < rule->n_ends; i++) end |= rule->ends[i] == b.token;
    if (!end) expand(w, rule, node, b.probability, b.depth + 1, w->through + b.first, b.count);
  }
}

// Is one of n tokens the last of the tail, behind the one before it if two must agree? text[-1] can be read.
ALWAYS int any_agrees(const int32_t *text, int64_t n, const int32_t *last, int two) {
  int any = 0;
  if (two)
    for (int64_t i = 0; i < n; i++) any |= (text[i] == last[0]) & (text[i - 1] == last[-1]);
  else
    for (int64_t i = 0; i < n; i++) any |= text[i] == last[0];
  return any;
}

// The latest places, at most `most`, at which the last `shortest` tokens of the tail stand and something follows.
static int64_t find(const int32_t *text, int64_t n, const int32_t *tail, int64_t n_tail, int64_t shortest, int64_t start,
                    int64_t most, int64_t *places) {
  const int32_t *last = tail + n_tail - 1;
  int64_t count = 0;
  for (int64_t stop = n - 1, first; stop > 1; stop = first) {  // text[0] and text[n - 1] are gaps
    first = stop > STRETCH ? stop - STRETCH : 1;
    if (!any_agrees(text + first, stop - first, last, shortest > 1)) continue;
    for (int64_t i = stop - 1; i >= first; i--) {
      if (text[i] != last[0] || text[i + 1] == GAP || i < start - 1) continue;
      int64_t back = 1;
      while (back < shortest && text[i - back] == last[-back]) back++;
      if (back < shortest) continue;
      places[count++] = i;
      if (count == most) return count;
    }
  }
  return count;
}

// text [n], with at least n_tail gaps in front of it and `depth` behind; tail [n_tail], n_tail >= shortest; `start`: only what
// stands there or behind may follow. tokens, parents, estimates [budget]. Returns how many nodes the best tree has, -1 where
// there was no memory; its score goes to *score.
KERNEL(int64_t, follow_tail)(const int32_t *text, int64_t n, const int32_t *tail, int64_t n_tail, int64_t start,
                             int64_t shortest, int64_t depth, int64_t budget, int64_t most_places, int64_t most_rows,
                             double factor, double min_probability, double prior, double enough, const int32_t *ends,
                             int64_t n_ends, int32_t *tokens, int32_t *parents, double *estimates, double *score) {
  *score = 0;
  int64_t *places = malloc((size_t)most_places * sizeof *places);
  if (!places) return -1;
  const int64_t n_places = find(text, n, tail, n_tail, shortest, start, most_places, places);
  if (!n_places) {
    free(places);
    return 0;
  }
  const size_t branches = (size_t)((budget + 2) * most_rows);
  const size_t nodes = (size_t)budget;
  int64_t *matched = malloc((size_t)n_places * sizeof *matched);
  char *seen = calloc((size_t)n_tail + 1, 1);
  Work w = {malloc((size_t)most_rows * sizeof *w.rows), malloc(branches * sizeof *w.through),
            malloc(branches * sizeof *w.branches),      malloc(branches * sizeof *w.open), 0, 0, 0};
  Candidate tree = {malloc(nodes * sizeof *tree.tokens), malloc(nodes * sizeof *tree.parents),
                    malloc(nodes * sizeof *tree.estimates), 0, 0};
  int64_t count = -1;
  if (matched && seen && w.rows && w.through && w.branches && w.open && tree.tokens && tree.parents && tree.estimates) {
    count = 0;
    for (int64_t i = 0; i < n_places; i++) {
      int64_t back = shortest;
      while (back < n_tail && text[places[i] - back] == tail[n_tail - 1 - back]) back++;
      matched[i] = back;
      seen[back] = 1;
    }
    for (int64_t length = n_tail; length >= shortest; length--) {  // a shorter one cannot score above its own limit
      if (!seen[length]) continue;
      const double reach = factor * (double)length;
      const int64_t limit = reach < (double)budget ? (int64_t)reach : budget;
      if (*score >= enough * (double)limit) break;
      int64_t n_rows = 0;
      for (int64_t i = 0; i < n_places && n_rows < most_rows; i++)
        if (matched[i] >= length) w.rows[n_rows++] = text + places[i] + 1;
      const Rule rule = {ends, n_ends, budget < depth ? budget : depth, min_probability, prior / (double)length};
      grow(&w, &rule, n_rows, limit, &tree);
      if (tree.score > *score) {
        *score = tree.score;
        count = tree.n;
        memcpy(tokens, tree.tokens, (size_t)count * sizeof *tokens);
        memcpy(parents, tree.parents, (size_t)count * sizeof *parents);
        memcpy(estimates, tree.estimates, (size_t)count * sizeof *estimates);
      }
    }
  }
  free(places), free(matched), free(seen);
  free(w.rows), free(w.through), free(w.branches), free(w.open);
  free(tree.tokens), free(tree.parents), free(tree.estimates);
  return count;
}
