// The words of simd.h in plain C, for any machine: four of the compiler's vectors of four lanes (NEON registers on Arm).
// Only the fused multiply-add has no spelling in plain C that every compiler keeps in a register.
#ifdef __aarch64__
#include <arm_neon.h>
#endif

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef struct { f32x4 q[4]; } f32x16;
typedef struct { i32x4 q[4]; } i32x16;

#define QUARTERS_F(expression) f32x16 r; for (int i = 0; i < 4; i++) r.q[i] = (expression); return r
#define QUARTERS_I(expression) i32x16 r; for (int i = 0; i < 4; i++) r.q[i] = (i32x4)(expression); return r

#ifdef __aarch64__
ALWAYS f32x4 fma4(f32x4 a, f32x4 b, f32x4 c) { return (f32x4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
__attribute__((noinline, unused)) static f32x4 fma4(f32x4 a, f32x4 b, f32x4 c) {
  return (f32x4){fmaf(a[0], b[0], c[0]), fmaf(a[1], b[1], c[1]), fmaf(a[2], b[2], c[2]), fmaf(a[3], b[3], c[3])};
}
#endif
ALWAYS f32x4 choose4(i32x4 mask, f32x4 x, f32x4 y) { return (f32x4)((mask & (i32x4)x) | (~mask & (i32x4)y)); }

// Exact, subnormals included.
ALWAYS float from_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return bits_float(sign | 0x7f800000 | (rest & 0x3ff ? 0x400000 : 0) | (rest & 0x3ff) << 13);
  if (rest < 0x400) return bits_float(sign | float_bits((float)rest * 0x1p-24f));
  return bits_float(sign | ((rest << 13) + 0x38000000));
}

ALWAYS f32x16 f_set1(float x) { QUARTERS_F(((f32x4){x, x, x, x})); }
ALWAYS f32x16 f_load(const float *p) { f32x16 r; memcpy(&r, p, sizeof r); return r; }
ALWAYS void f_store(float *p, f32x16 x) { memcpy(p, &x, sizeof x); }
ALWAYS f32x16 f_load_n(const float *p, int n) {
  f32x16 r = f_set1(0.0f);
  memcpy(&r, p, sizeof(float) * (size_t)n);
  return r;
}
ALWAYS void f_store_n(float *p, f32x16 x, int n) { memcpy(p, &x, sizeof(float) * (size_t)n); }
ALWAYS f32x16 f_load_bf16(const uint16_t *p) {
  QUARTERS_F((f32x4)((u32x4){p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]} << 16));
}
ALWAYS f32x16 f_load_bf16_mixed(const uint16_t *p) { return f_load_bf16(p); }
ALWAYS f32x16 f_unmix(f32x16 a) { return a; }
ALWAYS f32x16 f_load_f16(const uint16_t *p) {
  QUARTERS_F(((f32x4){from_f16(p[4 * i]), from_f16(p[4 * i + 1]), from_f16(p[4 * i + 2]), from_f16(p[4 * i + 3])}));
}
// Sixteen bytes, or sixteen halves of eight bytes (lanes 0-7 the low ones), or of sixteen bytes the low or the high halves.
ALWAYS float low_half(int8_t x) { return (float)((x & 7) - (x & 8)); }
ALWAYS float high_half(int8_t x) { return (float)(x >> 4); }
#define QUARTERS_OF(one) QUARTERS_F(((f32x4){one(4 * i), one(4 * i + 1), one(4 * i + 2), one(4 * i + 3)}))
#define BYTE(e) (float)p[e]
#define HALF(e) ((e) < 8 ? low_half(p[(e) % 8]) : high_half(p[(e) % 8]))
#define LOW(e) low_half(p[e])
#define HIGH(e) high_half(p[e])
ALWAYS f32x16 f_load_i8(const int8_t *p) { QUARTERS_OF(BYTE); }
ALWAYS f32x16 f_load_i4(const int8_t *p) { QUARTERS_OF(HALF); }
ALWAYS f32x16 f_load_i4_low(const int8_t *p) { QUARTERS_OF(LOW); }
ALWAYS f32x16 f_load_i4_high(const int8_t *p) { QUARTERS_OF(HIGH); }
ALWAYS f32x16 f_add(f32x16 a, f32x16 b) { QUARTERS_F(a.q[i] + b.q[i]); }
ALWAYS f32x16 f_sub(f32x16 a, f32x16 b) { QUARTERS_F(a.q[i] - b.q[i]); }
ALWAYS f32x16 f_mul(f32x16 a, f32x16 b) { QUARTERS_F(a.q[i] * b.q[i]); }
ALWAYS f32x16 f_div(f32x16 a, f32x16 b) { QUARTERS_F(a.q[i] / b.q[i]); }
ALWAYS f32x16 f_fma(f32x16 a, f32x16 b, f32x16 c) { QUARTERS_F(fma4(a.q[i], b.q[i], c.q[i])); }    // a b + c
ALWAYS f32x16 f_fnma(f32x16 a, f32x16 b, f32x16 c) { QUARTERS_F(fma4(-a.q[i], b.q[i], c.q[i])); }  // c - a b
ALWAYS f32x16 f_max(f32x16 a, f32x16 b) { QUARTERS_F(choose4(a.q[i] > b.q[i], a.q[i], b.q[i])); }
ALWAYS f32x16 f_abs(f32x16 a) { QUARTERS_F((f32x4)((i32x4)a.q[i] & 0x7fffffff)); }
// a < b ? x : y; false where either is NaN
ALWAYS f32x16 f_select_lt(f32x16 a, f32x16 b, f32x16 x, f32x16 y) { QUARTERS_F(choose4(a.q[i] < b.q[i], x.q[i], y.q[i])); }
ALWAYS i32x16 f_bits(f32x16 a) { QUARTERS_I(a.q[i]); }
ALWAYS f32x16 i_float_bits(i32x16 a) { QUARTERS_F((f32x4)a.q[i]); }
ALWAYS i32x16 i_set1(int32_t x) { QUARTERS_I(((i32x4){x, x, x, x})); }
ALWAYS void i_store(int32_t *p, i32x16 x) { memcpy(p, &x, sizeof x); }
ALWAYS i32x16 i_add(i32x16 a, i32x16 b) { QUARTERS_I((u32x4)a.q[i] + (u32x4)b.q[i]); }
ALWAYS i32x16 i_sub(i32x16 a, i32x16 b) { QUARTERS_I((u32x4)a.q[i] - (u32x4)b.q[i]); }
ALWAYS i32x16 i_and(i32x16 a, i32x16 b) { QUARTERS_I(a.q[i] & b.q[i]); }
ALWAYS i32x16 i_max(i32x16 a, i32x16 b) { QUARTERS_I(choose4(a.q[i] > b.q[i], (f32x4)a.q[i], (f32x4)b.q[i])); }
ALWAYS i32x16 i_shl(i32x16 a, int n) { QUARTERS_I((u32x4)a.q[i] << n); }
ALWAYS i32x16 i_shr(i32x16 a, int n) { QUARTERS_I((u32x4)a.q[i] >> n); }  // logical
ALWAYS f32x16 i_to_float(i32x16 a) { QUARTERS_F(__builtin_convertvector(a.q[i], f32x4)); }
ALWAYS void i_store_i8(int8_t *p, i32x16 a) {  // lanes fit int8
  for (int i = 0; i < 16; i++) p[i] = (int8_t)a.q[i / 4][i % 4];
}
