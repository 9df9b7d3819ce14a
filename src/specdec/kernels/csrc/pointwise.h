// What treats each row, or each head of a row, by itself: one row at a time, for pointwise.c and for the whole pass.
//
// Where a width is no multiple of sixteen its tail is padded into a vector, so every entry sees the same operations.
#ifndef SPECDEC_POINTWISE_H
#define SPECDEC_POINTWISE_H

#include "simd.h"

ALWAYS f32x16 load_up_to(const float *p, int64_t n) { return n >= LANES ? f_load(p) : f_load_n(p, (int)n); }

ALWAYS void store_up_to(float *p, f32x16 x, int64_t n) {
  if (n >= LANES) f_store(p, x);
  else f_store_n(p, x, (int)n);
}

// out = x / sqrt(mean(x^2) + eps) * weight. Squares are summed by entry modulo 16. out may be x.
ALWAYS void norm_row(const float *x, const float *weight, float *out, int64_t d, float eps) {
  f32x16 squares = f_zero();
  for (int64_t k = 0; k < d; k += LANES) {
    f32x16 v = load_up_to(x + k, d - k);
    squares = f_fma(v, v, squares);
  }
  f32x16 inverse = f_set1(1.0f / sqrtf(f_sum(squares) / (float)d + eps));
  for (int64_t k = 0; k < d; k += LANES)
    store_up_to(out + k, f_mul(f_mul(load_up_to(x + k, d - k), inverse), load_up_to(weight + k, d - k)), d - k);
}

// g / (1 + e^-g), written with e^-|g| so that nothing overflows.
ALWAYS f32x16 silu(f32x16 g) {
  f32x16 e = f_exp(f_sub(f_zero(), f_abs(g)));
  f32x16 top = f_select_lt(g, f_zero(), e, f_set1(1.0f));
  return f_mul(g, f_div(top, f_add(f_set1(1.0f), e)));
}

// Rotate the halves of some heads of one row in place: (a, b) -> (a cos - b sin, b cos + a sin). cos, sin [half].
ALWAYS void turn_row(float *x, const float *cosine, const float *sine, int64_t heads, int64_t half) {
  for (int64_t k = 0; k < half; k += LANES) {
    int64_t n = half - k;
    f32x16 c = load_up_to(cosine + k, n), s = load_up_to(sine + k, n);
    for (int64_t h = 0; h < heads; h++) {
      float *p = x + h * 2 * half + k;
      f32x16 a = load_up_to(p, n), b = load_up_to(p + half, n);
      store_up_to(p, f_fnma(b, s, f_mul(a, c)), n);
      store_up_to(p + half, f_fma(a, s, f_mul(b, c)), n);
    }
  }
}

#endif
