// The words of simd.h on AVX2 with FMA and F16C: two registers hold sixteen lanes.

typedef struct { __m256 lo, hi; } f32x16;
typedef struct { __m256i lo, hi; } i32x16;

#define F2(a, b) ((f32x16){(a), (b)})
#define I2(a, b) ((i32x16){(a), (b)})

ALWAYS f32x16 f_set1(float x) { __m256 v = _mm256_set1_ps(x); return F2(v, v); }
ALWAYS f32x16 f_load(const float *p) { return F2(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
ALWAYS void f_store(float *p, f32x16 x) { _mm256_storeu_ps(p, x.lo); _mm256_storeu_ps(p + 8, x.hi); }
ALWAYS f32x16 f_load_n(const float *p, int n) {
  float t[16] = {0};
  for (int i = 0; i < n; i++) t[i] = p[i];
  return f_load(t);
}
ALWAYS void f_store_n(float *p, f32x16 x, int n) {
  float t[16];
  f_store(t, x);
  for (int i = 0; i < n; i++) p[i] = t[i];
}
ALWAYS __m256 half_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
ALWAYS f32x16 f_load_bf16(const uint16_t *p) { return F2(half_bf16(p), half_bf16(p + 8)); }
// The lanes in an order of the machine's choosing, which f_unmix undoes: here even ones, then odd ones, in half the work.
ALWAYS f32x16 f_load_bf16_mixed(const uint16_t *p) {
  __m256i x = _mm256_loadu_si256((const __m256i *)p);
  return F2(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000))));
}
ALWAYS f32x16 f_unmix(f32x16 a) {
  __m256 x = _mm256_unpacklo_ps(a.lo, a.hi), y = _mm256_unpackhi_ps(a.lo, a.hi);
  return F2(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}
ALWAYS f32x16 f_load_f16(const uint16_t *p) {
  return F2(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
// Sixteen bytes, or sixteen halves of eight bytes (lanes 0-7 the low ones), or of sixteen bytes the low or the high halves.
ALWAYS __m256i bytes8(const int8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
ALWAYS __m256 low_half(__m256i x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 28), 28)); }
ALWAYS __m256 high_half(__m256i x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(x, 4)); }
ALWAYS f32x16 f_load_i8(const int8_t *p) { return F2(_mm256_cvtepi32_ps(bytes8(p)), _mm256_cvtepi32_ps(bytes8(p + 8))); }
ALWAYS f32x16 f_load_i4(const int8_t *p) { return F2(low_half(bytes8(p)), high_half(bytes8(p))); }
ALWAYS f32x16 f_load_i4_low(const int8_t *p) { return F2(low_half(bytes8(p)), low_half(bytes8(p + 8))); }
ALWAYS f32x16 f_load_i4_high(const int8_t *p) { return F2(high_half(bytes8(p)), high_half(bytes8(p + 8))); }
ALWAYS f32x16 f_add(f32x16 a, f32x16 b) { return F2(_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)); }
ALWAYS f32x16 f_sub(f32x16 a, f32x16 b) { return F2(_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)); }
ALWAYS f32x16 f_mul(f32x16 a, f32x16 b) { return F2(_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)); }
ALWAYS f32x16 f_div(f32x16 a, f32x16 b) { return F2(_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)); }
ALWAYS f32x16 f_fma(f32x16 a, f32x16 b, f32x16 c) {  // a b + c
  return F2(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
ALWAYS f32x16 f_fnma(f32x16 a, f32x16 b, f32x16 c) {  // c - a b
  return F2(_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi));
}
ALWAYS f32x16 f_max(f32x16 a, f32x16 b) { return F2(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)); }
ALWAYS f32x16 f_abs(f32x16 a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return F2(_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi));
}
// a < b ? x : y; false where either is NaN
ALWAYS f32x16 f_select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return F2(_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)));
}
ALWAYS i32x16 f_bits(f32x16 a) { return I2(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)); }
ALWAYS f32x16 i_float_bits(i32x16 a) { return F2(_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)); }
ALWAYS i32x16 i_set1(int32_t x) { __m256i v = _mm256_set1_epi32(x); return I2(v, v); }
ALWAYS void i_store(int32_t *p, i32x16 x) {
  _mm256_storeu_si256((__m256i *)p, x.lo);
  _mm256_storeu_si256((__m256i *)(p + 8), x.hi);
}
ALWAYS i32x16 i_add(i32x16 a, i32x16 b) { return I2(_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)); }
ALWAYS i32x16 i_sub(i32x16 a, i32x16 b) { return I2(_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)); }
ALWAYS i32x16 i_and(i32x16 a, i32x16 b) { return I2(_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)); }
ALWAYS i32x16 i_max(i32x16 a, i32x16 b) { return I2(_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)); }
#define i_shl(a, n) I2(_mm256_slli_epi32((a).lo, n), _mm256_slli_epi32((a).hi, n))
#define i_shr(a, n) I2(_mm256_srli_epi32((a).lo, n), _mm256_srli_epi32((a).hi, n))  // logical
ALWAYS f32x16 i_to_float(i32x16 a) { return F2(_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)); }
ALWAYS void i_store_i8(int8_t *p, i32x16 a) {  // lanes fit int8
  __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storeu_si128((__m128i *)p, bytes);
}
ALWAYS __m256i i_low(i32x16 a) { return a.lo; }
ALWAYS __m256i i_high(i32x16 a) { return a.hi; }
ALWAYS __m256 f_low(f32x16 a) { return a.lo; }
ALWAYS __m256 f_high(f32x16 a) { return a.hi; }
