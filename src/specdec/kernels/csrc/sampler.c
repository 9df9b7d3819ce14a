// Choosing tokens from a row: its largest entries, the winner of the race of log-probabilities and Gumbel noise, and those
// that a drafter expects to win it.
#include "simd.h"
#include "threads.h"

#define GRAIN 150000  // logits worth a thread
#define CHUNK 128     // logits whose maximum is compared with the smallest value kept so far

// Largest entry of a chunk; *magnitude gathers the largest bits without sign, which exceed infinity's where there is a NaN.
ALWAYS f32x16 chunk_max(const float *x, i32x16 *magnitude) {
  f32x16 most = f_load(x);
  i32x16 m = *magnitude;
#pragma GCC unroll 8
  for (int k = 0; k < CHUNK; k += LANES) {
    f32x16 v = f_load(x + k);
    most = f_max(v, most);
    m = i_max(m, i_and(f_bits(v), i_set1(0x7fffffff)));
  }
  *magnitude = m;
  return most;
}

// Enter x into the descending list of k, behind its equals, which have lower ids.
static void insert(float *values, int64_t *ids, int64_t k, float x, int64_t id) {
  int64_t at = k - 1;
  for (; at > 0 && values[at - 1] < x; at--) {
    values[at] = values[at - 1];
    ids[at] = ids[at - 1];
  }
  values[at] = x;
  ids[at] = id;
}

// A list that starts as the first k entries, then takes what beats its last one. Ties stay with the lowest id because later
// entries must be strictly larger. A NaN anywhere leaves NaN in values[0].
static void top_row(const float *x, int64_t n, int64_t k, float *values, int64_t *ids) {
  int nan = 0;
  for (int64_t i = 0; i < k; i++) {
    values[i] = -INFINITY;
    ids[i] = i;
    if (x[i] != x[i]) nan = 1;
    else insert(values, ids, i + 1, x[i], i);
  }
  i32x16 magnitude = i_set1(0);
  int64_t i = k;
  for (; i + CHUNK <= n; i += CHUNK)
    if (f_max_lanes(chunk_max(x + i, &magnitude)) > values[k - 1])
      for (int64_t j = i; j < i + CHUNK; j++)
        if (x[j] > values[k - 1]) insert(values, ids, k, x[j], j);
  for (; i < n; i++) {
    nan |= x[i] != x[i];
    if (x[i] > values[k - 1]) insert(values, ids, k, x[i], i);
  }
  int32_t bits[LANES];
  i_store(bits, magnitude);
  for (int l = 0; l < LANES; l++) nan |= bits[l] > 0x7f800000;
  if (nan) values[0] = NAN;
}

typedef struct {
  const float *x;
  int64_t n, k;
  float *values;
  int64_t *ids;
} Top;

static void top_chunk(void *context, int64_t i) {
  const Top *c = context;
  top_row(c->x + i * c->n, c->n, c->k, c->values + i * c->k, c->ids + i * c->k);
}

// x [rows, n] -> values, ids [rows, k], 1 <= k <= n.
KERNEL(void, top)(const float *x, int64_t rows, int64_t n, int64_t k, float *values, int64_t *ids) {
  Top c = {x, n, k, values, ids};
  specdec_parallel(threads_for(rows * n, GRAIN), rows, top_chunk, &c);
}

#define GOLDEN 0x9E3779B97F4A7C15u
#define RACE 64      // tokens that share one bound, or a multiple of that many where the vocabulary has more than
#define BLOCKS 4096  // such blocks

// The finaliser of splitmix64 (Steele, Lea, Flood 2014), in two steps: the second leaves the first 31 bits as they are.
ALWAYS uint64_t mix_most(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  return (x ^ (x >> 27)) * 0x94D049BB133111EBu;
}
ALWAYS uint64_t mix_rest(uint64_t x) { return x ^ (x >> 31); }
ALWAYS uint64_t mix(uint64_t x) { return mix_rest(mix_most(x)); }

ALWAYS double noise(uint64_t h) { return -log(-log(((double)(h >> 11) + 0.5) * 0x1p-53)); }

// Largest of n log-probabilities; *nan is set where one is not a number.
ALWAYS double block_max(const double *x, int64_t n, int64_t *nan) {
  double most[8];
  int64_t odd[8] = {0}, i = 0;
  for (int l = 0; l < 8; l++) most[l] = -INFINITY;
  for (; i + 8 <= n; i += 8)
    for (int l = 0; l < 8; l++) {
      most[l] = x[i + l] > most[l] ? x[i + l] : most[l];
      odd[l] |= x[i + l] != x[i + l];
    }
  for (; i < n; i++) {
    most[0] = x[i] > most[0] ? x[i] : most[0];
    odd[0] |= x[i] != x[i];
  }
  for (int l = 1; l < 8; l++) {
    most[0] = most[l] > most[0] ? most[l] : most[0];
    odd[0] |= odd[l];
  }
  *nan |= odd[0];
  return most[0];
}

// The index of the largest logp[v] + g(v), the lowest one on a tie; -1 where every entry is -inf or one is not a number.
//
// Most tokens need their hash h but no logarithm. Let h start with L ones, L < 53. Then u <= 1 - 2^-(L+1): the 53 bits
// h >> 11 are at most 2^53 - 2^(52-L) - 1, and adding 1/2 in double rounds to no more than the next integer. As
// -log(u) > 1 - u, g = -log(-log(u)) < -log(1 - u) <= (L + 1) log 2, and a factor of 1 + 1e-9 covers the rounding of two
// logarithms. A token therefore loses to `best` unless (L + 1) log 2 >= best - logp[v], that is unless h has at least
// ceil((best - logp[v]) / log 2) - 1 leading ones: one comparison with a constant, found once for the largest logp of a
// block. No more than 31 are demanded: so many survive the last step of the hash, which is then left to the few that pass.
// The race starts at the most likely token, so that `best` is high from the beginning.
KERNEL(int64_t, race)(const double *logp, int64_t n, int64_t seed, int64_t position) {
  const double unit = 0.6931471805599453 * (1 + 1e-9);
  uint64_t key = mix((uint64_t)seed + GOLDEN * (uint64_t)(position + 1));
  double most = -INFINITY, maxima[BLOCKS];
  int64_t nan = 0, first = 0, size = RACE * ((n + RACE * BLOCKS - 1) / (RACE * BLOCKS));
  for (int64_t b = 0; b * size < n; b++) {
    maxima[b] = block_max(logp + b * size, n - b * size < size ? n - b * size : size, &nan);
    if (maxima[b] > most) {
      most = maxima[b];
      first = b * size;
    }
  }
  if (nan || most == -INFINITY) return -1;
  int64_t winner = first;
  while (logp[winner] != most) winner++;
  double best = most + noise(mix(key + GOLDEN * (uint64_t)(winner + 1)));
  for (int64_t b = 0; b * size < n; b++) {
    if (maxima[b] == -INFINITY) continue;
    double demand = (best - maxima[b]) / unit - 1e-9;  // its integer part is ceil(x) - 1 of the exact quotient, or less
    int ones = demand > 31 ? 31 : demand > 0 ? (int)demand : 0;
    uint64_t least = ~(~(uint64_t)0 >> ones);
    int64_t end = (b + 1) * size < n ? (b + 1) * size : n;
#pragma GCC unroll 4
    for (int64_t v = b * size; v < end; v++) {
      uint64_t h = mix_most(key + GOLDEN * (uint64_t)(v + 1));
      if (h < least || logp[v] == -INFINITY) continue;
      double score = logp[v] + noise(mix_rest(h));
      if (score > best || (score == best && v < winner)) {
        best = score;
        winner = v;
      }
    }
  }
  return winner;
}

#define WIDEST 32  // entries of a row that are given noise

// The sum of e^(x - most), in lanes.
static double exp_sum(const float *x, int64_t n, float most) {
  f32x16 sum = f_zero(), m = f_set1(most);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sum = f_add(sum, f_exp(f_sub(f_load(x + i), m)));
  float rest[LANES];
  for (int l = 0; l < LANES; l++) rest[l] = i + l < n ? x[i + l] : -INFINITY;
  return f_sum(f_add(sum, f_exp(f_sub(f_load(rest), m))));
}

typedef struct {
  const float *x;
  int64_t n, width, k;
  const double *heat;
  const int64_t *seeds, *positions, *names;
  int64_t *tokens;
  double *chances;
} Candidates;

// One row; kernels/base.py says what is computed.
static void candidates_row(void *context, int64_t row) {
  const Candidates *c = context;
  const float *x = c->x + row * c->n;
  double heat = c->heat[row], scores[WIDEST], inside = 0;
  int64_t ids[WIDEST], width = heat > 0 ? c->width : c->k;
  float values[WIDEST];
  top_row(x, c->n, width, values, ids);
  double whole = values[0] + log(exp_sum(x, c->n, values[0]));
  uint64_t key = mix((uint64_t)c->seeds[row] + GOLDEN * (uint64_t)(c->positions[row] + 1));
  for (int64_t i = 0; i < width; i++) {
    int64_t token = c->names ? c->names[ids[i]] : ids[i], at = i;
    double score = values[i] - whole;
    inside += exp(score);
    if (heat > 0) score += heat * noise(mix(key + GOLDEN * (uint64_t)(token + 1)));
    for (; at > 0 && scores[at - 1] < score; at--) {
      scores[at] = scores[at - 1];
      ids[at] = ids[at - 1];
    }
    scores[at] = score;
    ids[at] = token;
  }
  double outside = 1 - inside > 1e-9 ? 1 - inside : 1e-9;
  double rest = log(outside) + log1p(4 * heat * heat) + (heat > 1 ? (heat - 1) * log(1000.0) : 0);
  double most = scores[0] > rest ? scores[0] : rest, total = exp(rest - most);
  for (int64_t i = 0; i < width; i++) total += exp(scores[i] - most);
  for (int64_t i = 0; i < c->k; i++) {
    c->tokens[row * c->k + i] = ids[i];
    c->chances[row * c->k + i] = exp(scores[i] - most) / total;
  }
}

// x [rows, n] -> tokens, chances [rows, k]; 1 <= k <= width <= 32 and n; names [n] or NULL.
KERNEL(void, candidates)(const float *x, int64_t rows, int64_t n, int64_t width, int64_t k, const double *heat,
                         const int64_t *seeds, const int64_t *positions, const int64_t *names, int64_t *tokens,
                         double *chances) {
  Candidates c = {x, n, width, k, heat, seeds, positions, names, tokens, chances};
  specdec_parallel(threads_for(rows * n, GRAIN / 8), rows, candidates_row, &c);
}
