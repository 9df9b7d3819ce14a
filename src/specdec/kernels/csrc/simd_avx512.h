// The words of simd.h on AVX-512: one register holds sixteen lanes.

typedef __m512 f32x16;
typedef __m512i i32x16;


ALWAYS f32x16 f_set1(float x) { return _mm512_set1_ps(x); }
ALWAYS f32x16 f_load(const float *p) { return _mm512_loadu_ps(p); }
ALWAYS void f_store(float *p, f32x16 x) { _mm512_storeu_ps(p, x); }
ALWAYS f32x16 f_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
ALWAYS void f_store_n(float *p, f32x16 x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }
ALWAYS f32x16 f_load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
ALWAYS f32x16 f_load_bf16_mixed(const uint16_t *p) { return f_load_bf16(p); }
ALWAYS f32x16 f_unmix(f32x16 a) { return a; }
ALWAYS f32x16 f_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
// Sixteen bytes, or sixteen halves of eight bytes (lanes 0-7 the low ones), or of sixteen bytes the low or the high halves.
ALWAYS __m512i bytes16(__m128i p) { return _mm512_cvtepi8_epi32(p); }
ALWAYS __m512i loaded16(const int8_t *p) { return bytes16(_mm_loadu_si128((const __m128i *)p)); }
ALWAYS __m512 high_half(__m512i x) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(x, 4)); }
ALWAYS f32x16 f_load_i8(const int8_t *p) { return _mm512_cvtepi32_ps(loaded16(p)); }
ALWAYS f32x16 f_load_i4(const int8_t *p) {
  int64_t both;
  memcpy(&both, p, sizeof both);
  const __m512i left = _mm512_set_epi32(24, 24, 24, 24, 24, 24, 24, 24, 28, 28, 28, 28, 28, 28, 28, 28);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sllv_epi32(bytes16(_mm_set1_epi64x(both)), left), 28));
}
ALWAYS f32x16 f_load_i4_low(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(loaded16(p), 28), 28));
}
ALWAYS f32x16 f_load_i4_high(const int8_t *p) { return high_half(loaded16(p)); }
ALWAYS f32x16 f_add(f32x16 a, f32x16 b) { return _mm512_add_ps(a, b); }
ALWAYS f32x16 f_sub(f32x16 a, f32x16 b) { return _mm512_sub_ps(a, b); }
ALWAYS f32x16 f_mul(f32x16 a, f32x16 b) { return _mm512_mul_ps(a, b); }
ALWAYS f32x16 f_div(f32x16 a, f32x16 b) { return _mm512_div_ps(a, b); }
ALWAYS f32x16 f_fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
ALWAYS f32x16 f_fnma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
ALWAYS f32x16 f_max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
ALWAYS f32x16 f_abs(f32x16 a) { return _mm512_abs_ps(a); }
// a < b ? x : y; false where either is NaN
ALWAYS f32x16 f_select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
ALWAYS i32x16 f_bits(f32x16 a) { return _mm512_castps_si512(a); }
ALWAYS f32x16 i_float_bits(i32x16 a) { return _mm512_castsi512_ps(a); }
ALWAYS i32x16 i_set1(int32_t x) { return _mm512_set1_epi32(x); }
ALWAYS void i_store(int32_t *p, i32x16 x) { _mm512_storeu_si512(p, x); }
ALWAYS i32x16 i_add(i32x16 a, i32x16 b) { return _mm512_add_epi32(a, b); }
ALWAYS i32x16 i_sub(i32x16 a, i32x16 b) { return _mm512_sub_epi32(a, b); }
ALWAYS i32x16 i_and(i32x16 a, i32x16 b) { return _mm512_and_si512(a, b); }
ALWAYS i32x16 i_max(i32x16 a, i32x16 b) { return _mm512_max_epi32(a, b); }
#define i_shl(a, n) _mm512_slli_epi32(a, n)
#define i_shr(a, n) _mm512_srli_epi32(a, n)  // logical
ALWAYS f32x16 i_to_float(i32x16 a) { return _mm512_cvtepi32_ps(a); }
ALWAYS void i_store_i8(int8_t *p, i32x16 a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a)); }  // lanes fit int8
ALWAYS __m256i i_low(i32x16 a) { return _mm512_castsi512_si256(a); }
ALWAYS __m256i i_high(i32x16 a) { return _mm512_extracti64x4_epi64(a, 1); }
ALWAYS __m256 f_low(f32x16 a) { return _mm512_castps512_ps256(a); }
ALWAYS __m256 f_high(f32x16 a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)); }
