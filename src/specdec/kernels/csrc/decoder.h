// A decoder and one pass of it, as plain structures that Python fills (kernels/fused.py has the same fields in the same order).
#ifndef SPECDEC_DECODER_H
#define SPECDEC_DECODER_H

#include <stdint.h>

enum { Q4, Q8, BF16, F32 };

// Channels [0, n) of a matrix, packed as blocks.h or dense.c say.
typedef struct {
  const void *data;
  int64_t n, kind;
} Part;

// Parts that lie one below the other; all but the last have a multiple of sixteen channels. bias [n] or null.
typedef struct {
  const Part *parts;
  int64_t n_parts, n, k;
  const float *bias;
} Matrix;

typedef struct {
  const float *attention_norm, *q_norm, *k_norm, *ffn_norm;  // q_norm and k_norm [hd] or null
  Matrix qkv, out, gate_up, down;
  int64_t window;
} Layer;

typedef struct {
  const Layer *layers;
  int64_t n_layers, d, heads, kv_heads, hd, ffn;
  float eps, scale;
  const float *norm;
  Matrix head, embedding;  // of one part each, without a bias
  // [d], or null. Where it is set, rows start from what the pass brings, and the one layer's queries, keys and values are
  // products of the normed embedding and the normed state side by side: the layer of an EAGLE-3 head.
  const float *embedding_norm;
  Matrix fuse;  // of such a head: features to the state that a row starts from, [d] from some taps of [d] each; else no parts
} Decoder;

// The rows of one pass, as kernels/base.py describes them, and where they find keys and values.
typedef struct {
  const int64_t *tokens, *wanted;  // wanted: increasing rows whose logits are wanted
  const float *cosine, *sine;      // [n_angles, hd / 2]
  const int64_t *angle;            // the row of these that turns a row
  int64_t n_angles, rows, n_wanted;
  const int32_t *tables, *sequence, *slot, *prefix, *path, *n_path;
  int64_t sequences, table_width, path_width;
  char *keys, *values;  // [layers, n_blocks, KV, block of the kind that kv.h describes]
  int64_t n_blocks, kind;
  float *logits;  // [n_wanted, vocabulary]
  float **taps;   // for each layer null, or [rows, d] for its output
  // Of a pass that does not start from embeddings: for each row the addresses of `per_row` vectors [d], the features to be
  // fused or, where `fuse` is 0, its state; and where the states that the wanted rows end with go, [n_wanted, d] or null.
  const float *const *inputs;
  int64_t per_row, fuse;
  float *ends;
  // The `best` candidates of each wanted row, as sampler.c ranks them: 0 for none; names [vocabulary] or null.
  int64_t best;
  const double *heat;
  const int64_t *seeds, *positions, *names;
  int64_t *candidates;  // [n_wanted, best]
  double *chances;      // [n_wanted, best]
} Pass;

#endif
