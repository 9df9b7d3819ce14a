// Sixteen float lanes that compute the same bits on every machine.
//
// Every kernel file is compiled once per instruction set with SPECDEC_ISA = c | avx2 | avx512 | amx and sees one vocabulary:
// f32x16 and i32x16. Each operation below is a single IEEE operation per lane (or a fixed sequence of them), nothing is
// contracted behind our back (-ffp-contract=off), and sums over lanes follow one fixed tree. So a kernel written in these
// words, whose scalar float code uses plain operators and fmaf, has the same result on every instruction set.
//
// NaN: f_max(a, b) is a > b ? a : b: the second operand where either is NaN.
#ifndef SPECDEC_SIMD_H
#define SPECDEC_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define JOIN3(a, b, c) a##b##c
#define NAME3(name, isa) JOIN3(name, _, isa)
#define EXPORT __attribute__((visibility("default")))
// An exported function: KERNEL(void, rms_norm)(const float *x, ...) becomes rms_norm_avx2 in the AVX2 object.
#define KERNEL(type, name) EXPORT type NAME3(name, SPECDEC_ISA)

#define SPECDEC_LEVEL_c 0
#define SPECDEC_LEVEL_avx2 1
#define SPECDEC_LEVEL_avx512 2
#define SPECDEC_LEVEL_amx 2  // AVX-512 as well; only block products have more to gain (tiles.h)
#define SPECDEC_TILES_c 0
#define SPECDEC_TILES_avx2 0
#define SPECDEC_TILES_avx512 0
#define SPECDEC_TILES_amx 1
#define SPECDEC_LEVEL NAME3(SPECDEC_LEVEL, SPECDEC_ISA)
#define SPECDEC_TILES NAME3(SPECDEC_TILES, SPECDEC_ISA)

#if SPECDEC_LEVEL > 0
#ifdef SPECDEC_INTRINSICS  // an emulation of immintrin.h, for checking one instruction set on another
#include SPECDEC_INTRINSICS
#else
#include <immintrin.h>
#endif
#endif

#define ALWAYS static inline __attribute__((always_inline))
#define LANES 16

ALWAYS uint32_t float_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
ALWAYS float bits_float(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

ALWAYS float from_bf16(uint16_t x) { return bits_float((uint32_t)x << 16); }

#if SPECDEC_LEVEL == 2
#include "simd_avx512.h"
#elif SPECDEC_LEVEL == 1
#include "simd_avx2.h"
#else
#include "simd_c.h"
#endif

ALWAYS f32x16 f_zero(void) { return f_set1(0.0f); }

// Sum and maximum over lanes: lane i with i + 8, then + 4, + 2, + 1.
#if SPECDEC_LEVEL > 0
ALWAYS float f_sum(f32x16 a) {
  __m256 e = _mm256_add_ps(f_low(a), f_high(a));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
ALWAYS float f_max_lanes(f32x16 a) {
  __m256 e = _mm256_max_ps(f_low(a), f_high(a));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
ALWAYS int32_t i_sum(i32x16 a) {
  __m256i e = _mm256_add_epi32(i_low(a), i_high(a));
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
ALWAYS int32_t i_max_lanes(i32x16 a) {
  __m256i e = _mm256_max_epi32(i_low(a), i_high(a));
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
#else
ALWAYS float f_sum(f32x16 a) {
  f32x4 q = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
ALWAYS float f_max_lanes(f32x16 a) {
  float v[16];
  f_store(v, a);
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; i++) v[i] = v[i] > v[i + step] ? v[i] : v[i + step];
  return v[0];
}
ALWAYS int32_t i_sum(i32x16 a) {
  i32x4 q = (a.q[0] + a.q[1]) + (a.q[2] + a.q[3]);
  return (q[0] + q[1]) + (q[2] + q[3]);
}
ALWAYS int32_t i_max_lanes(i32x16 a) {
  int32_t v[16], most;
  i_store(v, a);
  most = v[0];
  for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
  return most;
}
#endif

// e^x for x up to 88.3 (nobody has larger ones), relative error below 2e-7; 0 below -87.3, NaN for NaN.
// Range reduction x = n ln 2 + r with ln 2 in two parts, |r| <= ln 2 / 2, and a degree-6 polynomial (Cephes, Moshier 1992).
ALWAYS f32x16 f_exp(f32x16 x) {
  const float magic = 12582912.0f + 127.0f;  // 1.5 * 2^23: adding it rounds to an integer, n + 127 in the low bits
  f32x16 t = f_fma(x, f_set1(1.44269504088896341f), f_set1(magic));
  f32x16 n = f_sub(t, f_set1(magic));
  f32x16 r = f_fnma(n, f_set1(0.693359375f), x);
  r = f_fnma(n, f_set1(-2.12194440e-4f), r);
  f32x16 p = f_set1(1.9875691500e-4f);
  p = f_fma(p, r, f_set1(1.3981999507e-3f));
  p = f_fma(p, r, f_set1(8.3334519073e-3f));
  p = f_fma(p, r, f_set1(4.1665795894e-2f));
  p = f_fma(p, r, f_set1(1.6666665459e-1f));
  p = f_fma(p, r, f_set1(5.0000001201e-1f));
  p = f_fma(f_mul(p, r), r, f_add(r, f_set1(1.0f)));
  return f_select_lt(x, f_set1(-87.3f), f_zero(), f_mul(p, i_float_bits(i_shl(f_bits(t), 23))));
}

// Store rounded to bfloat16, ties to even; NaN stays NaN (x + x is x, made quiet).
ALWAYS void f_store_bf16(uint16_t *p, f32x16 x) {
  i32x16 u = f_bits(x);
  u = i_add(i_add(u, i_set1(0x7fff)), i_and(i_shr(u, 16), i_set1(1)));
  u = f_bits(f_select_lt(f_set1(-1.0f), f_abs(x), i_float_bits(u), f_add(x, x)));
  int32_t t[16];
  i_store(t, i_shr(u, 16));
  for (int i = 0; i < 16; i++) p[i] = (uint16_t)t[i];
}

#endif
