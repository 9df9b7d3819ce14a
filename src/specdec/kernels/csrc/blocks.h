// Weights in groups of 32 with a shared scale, and rows quantised the same way.
//
// A packed weight [N, K] is [ceil(N / 16)][K / 32] groups of 16 channels x 32 weights; channels past N are zero.
//
//   q4, 320 bytes   256 bytes of codes 0..15, then 16 float16 scales d, then 16 float16 offsets m: value = d * code + m.
//                   Byte 64 p + 4 c + i (p < 4, c < 16 channels, i < 4) holds weight 4 p + i of channel c in its low half
//                   and weight 16 + 4 p + i in its high half: GGUF's own pairing of weights, so packing only moves bytes.
//   q8, 544 bytes   512 bytes of codes -128..127, then 16 float16 scales d: value = d * code.
//                   Byte 64 p + 4 c + i (p < 8) holds weight 4 p + i of channel c.
//
// A row x is quantised in groups of 32: s = max|x| / 127, q = round(x * (127 / max|x|)), ties to even, in float32. The
// product starts at y = 0 and takes the groups in order, c being the exact integer sum of code * q:
//
//   q4: y = fma(d * s, c, y), then y = fma(m, s * sum(q), y)          q8: y = fma(d * s, c, y)
//
// Integers are exact in any order and the float steps are the same for every row, so a row's result does not depend on the
// rows beside it, on the thread, or on the instruction set.
#ifndef SPECDEC_BLOCKS_H
#define SPECDEC_BLOCKS_H

#include "simd.h"

#define GROUP 32
#define Q4_BYTES 320
#define Q8_BYTES 544
#define MOST_ROWS (SPECDEC_LEVEL == 2 ? 8 : 4)    // rows that share one unpacking of the weights: as registers allow
#define MOST_BLOCKS (SPECDEC_LEVEL == 2 ? 2 : 1)  // blocks of sixteen channels that share one load of the rows

typedef struct {
  int8_t q[GROUP];
  float scale;      // s
  float offset;     // s * sum(q), what m is multiplied with
  int32_t flipped;  // -128 sum(q)
  int32_t padding;  // groups stay 16-byte aligned
} RowGroup;

ALWAYS int32_t quad(const RowGroup *x, int p) { int32_t v; memcpy(&v, x->q + 4 * p, 4); return v; }

// A group whose largest entry is below 2^-120 counts as zero (its reciprocal would overflow). One that holds an infinity or
// a NaN has scale NaN, so every output of this row, and of no other, is NaN.
ALWAYS void quantise(const float *x, RowGroup *out) {
  f32x16 a = f_load(x), b = f_load(x + 16);
  int32_t most = i_max_lanes(i_max(f_bits(f_abs(a)), f_bits(f_abs(b))));  // as bits: finite < infinite < NaN
  float amax = bits_float((uint32_t)most);
  int finite = most < 0x7f800000, usable = finite && amax >= 0x1p-120f;
  if (!usable) a = b = f_zero();
  const f32x16 magic = f_set1(12582912.0f), inverse = f_set1(usable ? 127.0f / amax : 0.0f);  // 1.5 * 2^23: rounds in its low bits
  i32x16 p = i_sub(f_bits(f_add(f_mul(a, inverse), magic)), f_bits(magic));
  i32x16 q = i_sub(f_bits(f_add(f_mul(b, inverse), magic)), f_bits(magic));
  i_store_i8(out->q, p);
  i_store_i8(out->q + 16, q);
  const int32_t sum = i_sum(i_add(p, q));
  out->flipped = -128 * sum;
  out->scale = usable ? amax / 127.0f : finite ? 0.0f : NAN;
  out->offset = out->scale * (float)sum;
}

// Integer sums of one packed group of B blocks (`next` bytes apart) with the same group of R rows (stride apart): c[b][r], one
// channel a lane.
#if SPECDEC_LEVEL == 2

// Keeps the compiler from loading ahead what does not fit the registers then.
#define IN_ORDER(x) __asm__ volatile("" : "+v"(x))

// Many processors load a register hardly once a cycle and multiply twice: what is loaded of a row meets every block.
ALWAYS void dots_part(const __m512i *codes, const RowGroup *x, int64_t stride, int p, int B, int R, i32x16 (*c)[MOST_ROWS]) {
  for (int r = 0; r < R; r++) {
    const __m512i q = _mm512_set1_epi32(quad(x + r * stride, p));
    for (int b = 0; b < B; b++) {
      c[b][r] = _mm512_dpbusd_epi32(c[b][r], codes[b], q);
      IN_ORDER(c[b][r]);
    }
  }
}

ALWAYS void dots_q4(const uint8_t *w, int64_t next, const RowGroup *x, int64_t stride, int B, int R, i32x16 (*c)[MOST_ROWS]) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) c[b][r] = _mm512_setzero_si512();
  for (int p = 0; p < 4; p++) {
    __m512i both[MOST_BLOCKS], codes[MOST_BLOCKS];
    for (int b = 0; b < B; b++) both[b] = _mm512_loadu_si512(w + b * next + 64 * p);
    for (int b = 0; b < B; b++) codes[b] = _mm512_and_si512(both[b], low);
    dots_part(codes, x, stride, p, B, R, c);
    for (int b = 0; b < B; b++) codes[b] = _mm512_and_si512(_mm512_srli_epi16(both[b], 4), low);
    dots_part(codes, x, stride, p + 4, B, R, c);
  }
}

ALWAYS void dots_u4(const uint8_t *u, int64_t next, const RowGroup *x, int64_t stride, int B, int R, i32x16 (*c)[MOST_ROWS]) {
  for (int b = 0; b < B; b++)
    for (int r = 0; r < R; r++) c[b][r] = _mm512_setzero_si512();
  for (int p = 0; p < 8; p++) {
    __m512i codes[MOST_BLOCKS];
    for (int b = 0; b < B; b++) codes[b] = _mm512_load_si512(u + b * next + 64 * p);
    dots_part(codes, x, stride, p, B, R, c);
  }
}

ALWAYS void unpack_codes(const uint8_t *w, uint8_t *u) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int p = 0; p < 4; p++) {
    __m512i both = _mm512_loadu_si512(w + 64 * p);
    _mm512_store_si512(u + 64 * p, _mm512_and_si512(both, low));
    _mm512_store_si512(u + 64 * (p + 4), _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
  }
}

// dpbusd wants one unsigned operand: codes + 128, and 128 * sum(q) is taken off again.
ALWAYS void dots_q8(const uint8_t *w, int64_t next, const RowGroup *x, int64_t stride, int B, int R, i32x16 (*c)[MOST_ROWS]) {
  const __m512i flip = _mm512_set1_epi8(-128);
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) c[b][r] = _mm512_set1_epi32(x[r * stride].flipped);
  for (int p = 0; p < 8; p++) {
    __m512i codes[MOST_BLOCKS];
    for (int b = 0; b < B; b++) codes[b] = _mm512_xor_si512(_mm512_loadu_si512(w + b * next + 64 * p), flip);
    dots_part(codes, x, stride, p, B, R, c);
  }
}

#elif SPECDEC_LEVEL == 1

// Keeps the compiler from gathering the loads of all rows first, which overflows the sixteen registers.
#define IN_ORDER(x) __asm__ volatile("" : "+x"(x))
ALWAYS __m256i load32(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }

// Eight products of pairs, each at most 2 * 15 * 127, add up to 30,480: they fit 16 bits, so widening comes once, at the end.
ALWAYS void dots_codes(const uint8_t *w, const RowGroup *x, int64_t stride, int R, int unpacked, i32x16 *c) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i lo[MOST_ROWS], hi[MOST_ROWS];  // channels 0-7 and 8-15
  for (int r = 0; r < R; r++) lo[r] = hi[r] = _mm256_setzero_si256();
  for (int p = 0; p < 4; p++) {
    for (int upper = 0; upper < 2; upper++) {
      const uint8_t *from = w + 64 * (unpacked ? p + 4 * upper : p);
      __m256i code_lo = load32(from), code_hi = load32(from + 32);
      if (!unpacked) {
        code_lo = _mm256_and_si256(upper ? _mm256_srli_epi16(code_lo, 4) : code_lo, low);
        code_hi = _mm256_and_si256(upper ? _mm256_srli_epi16(code_hi, 4) : code_hi, low);
      }
      for (int r = 0; r < R; r++) {
        __m256i q = _mm256_set1_epi32(quad(x + r * stride, p + 4 * upper));
        lo[r] = _mm256_add_epi16(lo[r], _mm256_maddubs_epi16(code_lo, q));
        hi[r] = _mm256_add_epi16(hi[r], _mm256_maddubs_epi16(code_hi, q));
        IN_ORDER(lo[r]);
        IN_ORDER(hi[r]);
      }
    }
  }
  for (int r = 0; r < R; r++) c[r] = I2(_mm256_madd_epi16(lo[r], ones), _mm256_madd_epi16(hi[r], ones));
}

ALWAYS void dots_one_q4(const uint8_t *w, const RowGroup *x, int64_t stride, int R, i32x16 *c) {
  dots_codes(w, x, stride, R, 0, c);
}

ALWAYS void dots_one_u4(const uint8_t *u, const RowGroup *x, int64_t stride, int R, i32x16 *c) {
  dots_codes(u, x, stride, R, 1, c);
}

ALWAYS void unpack_codes(const uint8_t *w, uint8_t *u) {
  for (int half = 0; half < 256; half += 32) {
    __m256i both = load32(w + half), low = _mm256_set1_epi8(15);
    _mm256_storeu_si256((__m256i *)(u + half), _mm256_and_si256(both, low));
    _mm256_storeu_si256((__m256i *)(u + 256 + half), _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
  }
}

// |code| is the unsigned operand and q takes the code's sign; a pair is at most 2 * 128 * 127 = 32,512, so each is widened.
ALWAYS void half_q8(const uint8_t *w, const RowGroup *x, int64_t stride, int R, __m256i *sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
  for (int p = 0; p < 8; p++) {
    __m256i code = load32(w + 64 * p), size = _mm256_abs_epi8(code);
    for (int r = 0; r < R; r++) {
      __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(_mm256_set1_epi32(quad(x + r * stride, p)), code));
      sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs, ones));
      IN_ORDER(sum[r]);
    }
  }
}

// Eight channels at a time: more would not fit the registers.
ALWAYS void dots_one_q8(const uint8_t *w, const RowGroup *x, int64_t stride, int R, i32x16 *c) {
  __m256i lo[MOST_ROWS], hi[MOST_ROWS];
  half_q8(w, x, stride, R, lo);
  half_q8(w + 32, x, stride, R, hi);
  for (int r = 0; r < R; r++) c[r] = I2(lo[r], hi[r]);
}

#else

ALWAYS void dots_one_q4(const uint8_t *w, const RowGroup *x, int64_t stride, int R, i32x16 *c) {
  for (int r = 0; r < R; r++) {
    const int8_t *q = x[r * stride].q;
    int32_t sum[LANES] = {0};
    for (int p = 0; p < 4; p++)
      for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) {
          int both = w[64 * p + 4 * lane + i];
          sum[lane] += (both & 15) * q[4 * p + i] + (both >> 4) * q[16 + 4 * p + i];
        }
    memcpy(&c[r], sum, sizeof sum);
  }
}

ALWAYS void dots_one_q8(const uint8_t *w, const RowGroup *x, int64_t stride, int R, i32x16 *c) {
  for (int r = 0; r < R; r++) {
    const int8_t *q = x[r * stride].q;
    int32_t sum[LANES] = {0};
    for (int p = 0; p < 8; p++)
      for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) sum[lane] += (int8_t)w[64 * p + 4 * lane + i] * q[4 * p + i];
    memcpy(&c[r], sum, sizeof sum);
  }
}

#define dots_one_u4 dots_one_q8

#endif

#if SPECDEC_LEVEL != 2
#define EACH_BLOCK(one) \
  for (int b = 0; b < B; b++) one(w + b * next, x, stride, R, c[b])
ALWAYS void dots_q4(const uint8_t *w, int64_t next, const RowGroup *x, int64_t stride, int B, int R, i32x16 (*c)[MOST_ROWS]) {
  EACH_BLOCK(dots_one_q4);
}
ALWAYS void dots_q8(const uint8_t *w, int64_t next, const RowGroup *x, int64_t stride, int B, int R, i32x16 (*c)[MOST_ROWS]) {
  EACH_BLOCK(dots_one_q8);
}
ALWAYS void dots_u4(const uint8_t *w, int64_t next, const RowGroup *x, int64_t stride, int B, int R, i32x16 (*c)[MOST_ROWS]) {
  EACH_BLOCK(dots_one_u4);
}
#endif

// A group of q4 taken apart, for many rows: 512 bytes of codes, one a byte as in q8, then d and m in float32.
#define U4_BYTES 640
#if SPECDEC_LEVEL > 0
ALWAYS void unpack_q4(const uint8_t *w, uint8_t *u) {
  unpack_codes(w, u);
  f_store((float *)(u + 512), f_load_f16((const uint16_t *)(w + 256)));
  f_store((float *)(u + 576), f_load_f16((const uint16_t *)(w + 288)));
}
#endif
#endif
