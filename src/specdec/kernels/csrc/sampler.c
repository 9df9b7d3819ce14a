// Choosing tokens from a row: its largest entries, the winner of the race of log-probabilities and Gumbel noise, and those
// that a drafter expects to win it.
#include "simd.h"
#include "threads.h"

#include <stdlib.h>

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

typedef uint64_t u64x4 __attribute__((vector_size(32)));

// The finaliser of splitmix64 (Steele, Lea, Flood 2014), in two steps: the second leaves the first 31 bits as they are.
ALWAYS uint64_t mix_most(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  return (x ^ (x >> 27)) * 0x94D049BB133111EBu;
}
ALWAYS uint64_t mix_rest(uint64_t x) { return x ^ (x >> 31); }
ALWAYS uint64_t mix(uint64_t x) { return mix_rest(mix_most(x)); }

ALWAYS double noise(uint64_t h) { return -log(-log(((double)(h >> 11) + 0.5) * 0x1p-53)); }

// Has one of RACE tokens, the first of which has the number `first`, a hash that begins with all ones of the mask?
ALWAYS int any_begins(uint64_t key, uint64_t first, uint64_t mask) {
  u64x4 x = {first, first + 1, first + 2, first + 3}, found = {0};
  x = key + GOLDEN * x;
#pragma GCC unroll 4
  for (int k = 0; k < RACE; k += 4) {
    u64x4 h = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    found |= (u64x4)((h & mask) == mask);
    x += 4 * GOLDEN;
  }
  return (found[0] | found[1] | found[2] | found[3]) != 0;
}

// race_f32 and race_f64: the index of the largest (z[v] - max z) / temperature + g(v), the lowest one on a tie; -1 where no
// entry is finite, or one is +inf or not a number. Below, s[v] is the first of these terms, at most 0.
//
// Most tokens need their hash h but no logarithm. Let h start with L ones, L < 53. Then u <= 1 - 2^-(L+1): the 53 bits
// h >> 11 are at most 2^53 - 2^(52-L) - 1, and adding 1/2 in double rounds to no more than the next integer. As
// -log(u) > 1 - u, g = -log(-log(u)) < -log(1 - u) <= (L + 1) log 2, and a factor of 1 + 1e-9 covers the rounding of two
// logarithms. A token therefore loses to `best` unless (L + 1) log 2 >= best - s[v], that is unless h has at least
// ceil((best - s[v]) / log 2) - 1 leading ones: one comparison with a constant, found once for the largest s of a block. No
// more than 31 are demanded: so many survive the last step of the hash, which is then left to the few that pass. The race
// starts at the most likely token, so that `best` is high from the beginning.
#define DEFINE_RACE(name, real, integer)                                                                 \
  typedef real name##_reals __attribute__((vector_size(32)));                                            \
  typedef integer name##_bits __attribute__((vector_size(32)));                                          \
  ALWAYS real name##_max(const real *z, int64_t n, int64_t *nan) {                                       \
    enum { WIDE = 32 / sizeof(real) };                                                                   \
    name##_reals most, v;                                                                                \
    name##_bits odd = {0};                                                                               \
    int64_t i = 0;                                                                                       \
    for (int l = 0; l < WIDE; l++) most[l] = -INFINITY;                                                  \
    for (; i + WIDE <= n; i += WIDE) {                                                                   \
      memcpy(&v, z + i, sizeof v);                                                                       \
      name##_bits larger = v > most;                                                                     \
      most = (name##_reals)(((name##_bits)v & larger) | ((name##_bits)most & ~larger));                  \
      odd |= v != v;                                                                                     \
    }                                                                                                    \
    real best = -INFINITY;                                                                               \
    for (; i < n; i++) {                                                                                 \
      best = z[i] > best ? z[i] : best;                                                                  \
      *nan |= z[i] != z[i];                                                                              \
    }                                                                                                    \
    for (int l = 0; l < WIDE; l++) {                                                                     \
      best = most[l] > best ? most[l] : best;                                                            \
      *nan |= odd[l];                                                                                    \
    }                                                                                                    \
    return best;                                                                                         \
  }                                                                                                      \
  KERNEL(int64_t, name)(const real *z, int64_t n, double temperature, int64_t seed, int64_t position) {  \
    const double unit = 0.6931471805599453 * (1 + 1e-9);                                                 \
    uint64_t key = mix((uint64_t)seed + GOLDEN * (uint64_t)(position + 1));                              \
    real most = -INFINITY, maxima[BLOCKS];                                                               \
    int64_t nan = 0, first = 0, size = RACE * ((n + RACE * BLOCKS - 1) / (RACE * BLOCKS));               \
    for (int64_t b = 0; b * size < n; b++) {                                                             \
      maxima[b] = name##_max(z + b * size, n - b * size < size ? n - b * size : size, &nan);             \
      if (maxima[b] > most) {                                                                            \
        most = maxima[b];                                                                                \
        first = b * size;                                                                                \
      }                                                                                                  \
    }                                                                                                    \
    if (nan || most == -INFINITY || most == INFINITY) return -1;                                         \
    int64_t winner = first;                                                                              \
    while (z[winner] != most) winner++;                                                                  \
    double best = noise(mix(key + GOLDEN * (uint64_t)(winner + 1)));                                     \
    for (int64_t b = 0; b * size < n; b++) {                                                             \
      if (maxima[b] == -INFINITY) continue;                                                              \
      /* The integer part of the demand is ceil(x) - 1 of the exact quotient, or less. */                \
      double demand = (best - ((double)maxima[b] - (double)most) / temperature) / unit - 1e-9;           \
      int ones = demand > 31 ? 31 : demand > 0 ? (int)demand : 0;                                        \
      uint64_t mask = ~(~(uint64_t)0 >> ones);                                                           \
      int64_t end = (b + 1) * size < n ? (b + 1) * size : n;                                             \
      for (int64_t v = b * size; v < end; v += RACE) {                                                   \
        if (!any_begins(key, (uint64_t)(v + 1), mask)) continue;                                         \
        for (int64_t w = v; w < end && w < v + RACE; w++) {                                              \
          uint64_t h = mix_most(key + GOLDEN * (uint64_t)(w + 1));                                       \
          if ((h & mask) != mask || z[w] == -INFINITY) continue;                                         \
          double score = ((double)z[w] - (double)most) / temperature + noise(mix_rest(h));               \
          if (score > best || (score == best && w < winner)) {                                           \
            best = score;                                                                                \
            winner = w;                                                                                  \
          }                                                                                              \
        }                                                                                                \
      }                                                                                                  \
    }                                                                                                    \
    return winner;                                                                                       \
  }
DEFINE_RACE(race_f32, float, int32_t)
DEFINE_RACE(race_f64, double, int64_t)

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

#define UNSURE -2       // the cut lies too near to a token to be told apart here
#define NARROW 1e-5     // of the mass: more than a sum of f_exp is wrong by
#define FIRST_NATS 2.0  // below the largest: how deep survivors are looked for at first

typedef struct {
  double z;
  int64_t id;
} Survivor;

static int before(const void *a, const void *b) {
  const Survivor *x = a, *y = b;
  if (x->z != y->z) return x->z > y->z ? -1 : 1;
  return x->id < y->id ? -1 : x->id > y->id;
}

// How many of n sorted survivors top-k, top-p and min-p leave, in this order; `outside` is the mass of all that are not among
// them, e^(z - most) / temperature each. UNSURE where rounding could decide.
static int64_t cut(const Survivor *s, int64_t n, double most, double temperature, int64_t top_k, double top_p, double min_p,
                   double outside) {
  if (top_k > 0 && top_k < n) {
    n = top_k;
    outside = 0;
  }
  if (top_p < 1) {
    double total = outside, mass = 0;
    for (int64_t i = 0; i < n; i++) total += exp((s[i].z - most) / temperature);
    for (int64_t i = 0; i < n; i++) {
      mass += exp((s[i].z - most) / temperature);
      double over = mass - top_p * total;
      if (over < NARROW * total && over > -NARROW * total) return UNSURE;
      if (over > 0) n = i + 1;
    }
  }
  if (min_p > 0)
    for (int64_t i = 0; i < n; i++) {
      double p = exp((s[i].z - most) / temperature);
      if (p < min_p * (1 + 1e-9) && p > min_p * (1 - 1e-9)) return UNSURE;
      if (p < min_p) n = i;
    }
  return n;
}

// race_among_f32 and _f64: race_f32 and race_f64 among the tokens that top-k (0 for all), top-p and min-p leave. -1 as there;
// UNSURE where rounding could decide who is left, or too many are to be sorted here.
#define DEFINE_RACE_AMONG(name, real, race)                                                                              \
  KERNEL(int64_t, name)(const real *z, int64_t n, double temperature, int64_t seed, int64_t position, int64_t top_k,     \
                        double top_p, double min_p) {                                                                    \
    enum { MOST = 4096 };                                                                                                \
    int64_t nan = 0, count = 0;                                                                                          \
    real most = -INFINITY, maxima[BLOCKS];                                                                               \
    const int64_t size = RACE * ((n + RACE * BLOCKS - 1) / (RACE * BLOCKS));                                             \
    for (int64_t b = 0; b * size < n; b++) {                                                                             \
      maxima[b] = race##_max(z + b * size, n - b * size < size ? n - b * size : size, &nan);                             \
      most = maxima[b] > most ? maxima[b] : most;                                                                        \
    }                                                                                                                    \
    if (nan || most == -INFINITY || most == INFINITY) return -1;                                                         \
    Survivor found[MOST];                                                                                                \
    double whole = -1, inside = 0, nats = FIRST_NATS;                                                                    \
    for (;; nats *= 2) {                                                                                                 \
      real least = (real)((double)most - nats * temperature);                                                            \
      count = 0;                                                                                                         \
      for (int64_t b = 0; b * size < n; b++) {                                                                           \
        int64_t end = (b + 1) * size < n ? (b + 1) * size : n;                                                           \
        if (maxima[b] < least || maxima[b] == -INFINITY) continue;                                                       \
        for (int64_t i = b * size; i < end; i++)                                                                         \
          if (z[i] >= least && z[i] > -INFINITY) {                                                                       \
            if (count == MOST) return UNSURE;                                                                            \
            found[count++] = (Survivor){z[i], i};                                                                        \
          }                                                                                                              \
      }                                                                                                                  \
      if (nats > 1e4) break; /* all that have any mass are there */                                                      \
      if (top_k > 0) {                                                                                                   \
        if (count >= top_k) break;                                                                                       \
        continue;                                                                                                        \
      }                                                                                                                  \
      if (top_p < 1) {                                                                                                   \
        if (whole < 0) whole = race##_mass(z, n, most, temperature);                                                     \
        inside = 0;                                                                                                      \
        for (int64_t i = 0; i < count; i++) inside += exp((found[i].z - (double)most) / temperature);                    \
        if (inside > (top_p + NARROW) * whole) break;                                                                    \
        if (whole - inside < NARROW * whole) return UNSURE; /* the cut lies among tokens of hardly any mass */           \
        continue;                                                                                                        \
      }                                                                                                                  \
      if (exp(-nats) < min_p * 0.5) break;                                                                               \
    }                                                                                                                    \
    qsort(found, (size_t)count, sizeof(Survivor), before);                                                               \
    count = cut(found, count, (double)most, temperature, top_k, top_p, min_p, whole > inside ? whole - inside : 0);      \
    if (count < 0) return UNSURE;                                                                                        \
    uint64_t key = mix((uint64_t)seed + GOLDEN * (uint64_t)(position + 1));                                              \
    int64_t winner = -1;                                                                                                 \
    double best = -INFINITY;                                                                                             \
    for (int64_t i = 0; i < count; i++) {                                                                                \
      double score = (found[i].z - (double)most) / temperature + noise(mix(key + GOLDEN * (uint64_t)(found[i].id + 1))); \
      if (score > best || (score == best && found[i].id < winner)) {                                                     \
        best = score;                                                                                                    \
        winner = found[i].id;                                                                                            \
      }                                                                                                                  \
    }                                                                                                                    \
    return winner;                                                                                                       \
  }

// The sum of e^((z - most) / temperature), to about a millionth.
static double race_f32_mass(const float *z, int64_t n, float most, double temperature) {
  f32x16 m = f_set1(most), scale = f_set1((float)(1 / temperature));
  double total = 0;
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES) {
    f32x16 sum = f_zero();
    for (int k = 0; k < 4; k++) sum = f_add(sum, f_exp(f_mul(f_sub(f_load(z + i + k * LANES), m), scale)));
    total += f_sum(sum);
  }
  for (; i < n; i++) total += exp(((double)z[i] - most) / temperature);
  return total;
}
static double race_f64_mass(const double *z, int64_t n, double most, double temperature) {
  double total = 0;
  float x[LANES];
  for (int64_t i = 0; i < n; i += LANES) {
    for (int64_t l = 0; l < LANES; l++) x[l] = i + l < n ? (float)((z[i + l] - most) / temperature) : -INFINITY;
    total += f_sum(f_exp(f_load(x)));
  }
  return total;
}
DEFINE_RACE_AMONG(race_among_f32, float, race_f32)
DEFINE_RACE_AMONG(race_among_f64, double, race_f64)

typedef struct {
  const float *x;
  int64_t n;
  const int64_t *integers;  // row, seed, position, top_k of each draw
  const double *reals;      // temperature, top_p, min_p
  int64_t *tokens;
} Draws;

static void draw_one(void *context, int64_t i) {
  const Draws *c = context;
  const int64_t *m = c->integers + 4 * i;
  const double *r = c->reals + 3 * i;
  const float *z = c->x + m[0] * c->n;
  int64_t token;
  if (r[0] == 0) {
    float most;
    top_row(z, c->n, 1, &most, &token);
    if (!(most > -INFINITY && most < INFINITY)) token = -1;
  } else if (m[3] > 0 || r[1] < 1 || r[2] > 0)
    token = NAME3(race_among_f32, SPECDEC_ISA)(z, c->n, r[0], m[1], m[2], m[3], r[1], r[2]);
  else
    token = NAME3(race_f32, SPECDEC_ISA)(z, c->n, r[0], m[1], m[2]);
  c->tokens[i] = token < 0 ? -1 : token;
}

// The tokens of some of the rows of x [.., n]: the lowest id of the largest entry at temperature 0, else the winner of
// race_among_f32, or of race_f32 where nothing is filtered; -1 where these give none.
KERNEL(void, draw_rows)(const float *x, int64_t n, int64_t draws, const int64_t *integers, const double *reals,
                        int64_t *tokens) {
  Draws c = {x, n, integers, reals, tokens};
  specdec_parallel(threads_for(draws * n, GRAIN), draws, draw_one, &c);
}
