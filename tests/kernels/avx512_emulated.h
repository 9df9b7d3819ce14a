// The AVX-512 intrinsics that simd.h and blocks.h use, on a machine with AVX2: SIMDe's, and the few that it lacks.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>
#include <string.h>

static inline simde__m512i emulated_join(__m256i low, __m256i high) {
  simde__m512i r;
  memcpy(&r, &low, 32);
  memcpy((char *)&r + 32, &high, 32);
  return r;
}
static inline simde__m512i emulated_cvtepu16_epi32(__m256i a) {
  return emulated_join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
static inline simde__m512 emulated_cvtph_ps(__m256i a) {
  __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(a)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
  simde__m512 r;
  memcpy(&r, &low, 32);
  memcpy((char *)&r + 32, &high, 32);
  return r;
}
static inline simde__m512 emulated_cvtepi32_ps(simde__m512i a) {
  int32_t t[16];
  float f[16];
  memcpy(t, &a, 64);
  for (int i = 0; i < 16; i++) f[i] = (float)t[i];
  simde__m512 r;
  memcpy(&r, f, 64);
  return r;
}
static inline __m128i emulated_cvtepi32_epi8(simde__m512i a) {
  int32_t t[16];
  int8_t b[16];
  memcpy(t, &a, 64);
  for (int i = 0; i < 16; i++) b[i] = (int8_t)t[i];
  return _mm_loadu_si128((const __m128i *)b);
}
static inline simde__m512 emulated_maskz_loadu_ps(unsigned mask, const float *p) {
  float t[16];
  for (int i = 0; i < 16; i++) t[i] = mask >> i & 1 ? p[i] : 0.0f;
  simde__m512 r;
  memcpy(&r, t, 64);
  return r;
}
static inline void emulated_mask_storeu_ps(float *p, unsigned mask, simde__m512 x) {
  float t[16];
  memcpy(t, &x, 64);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) p[i] = t[i];
}
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi32_epi8
#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#define _mm512_cvtepu16_epi32(a) emulated_cvtepu16_epi32(a)
#define _mm512_cvtph_ps(a) emulated_cvtph_ps(a)
#define _mm512_cvtepi32_ps(a) emulated_cvtepi32_ps(a)
#define _mm512_cvtepi32_epi8(a) emulated_cvtepi32_epi8(a)
#define _mm512_maskz_loadu_ps(m, p) emulated_maskz_loadu_ps(m, p)
#define _mm512_mask_storeu_ps(p, m, x) emulated_mask_storeu_ps(p, m, x)
#define __m512 simde__m512
#define __m512i simde__m512i
#define __mmask16 simde__mmask16
