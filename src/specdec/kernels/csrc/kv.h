// How the pool holds keys and values, in blocks of sixteen slots of one head each.
//
// Floats: a block of keys is [hd, 16] and one of values [16, hd], in float32 or bfloat16.
//
// int8 and int4: each row of a head is quantised by itself, in groups of 32 entries (16 where hd is no multiple of 32) that
// share a scale, so what is held depends on nothing but that row. With M = 127 or 7, in float32:
//
//   s = max|x| / M, rounded up to bfloat16; code = round(x * (1 / s)), ties to even; an entry is then s * code, off by at
//   most s / 2.
//
// A group whose largest entry is below 2^-120 counts as zero; one that holds an infinity or a NaN has scale NaN. A block is
// its codes and, behind them, its scales [hd / group, 16] in bfloat16. Codes of int8 are laid out as floats are. int4 keeps two
// in a byte: byte 8 i + j of a row (j < 8) has entry 16 i + j in its low half and entry 16 i + 8 + j in its high half, so a
// block of keys is [hd / 2, 16] and one of values [16, hd / 2]. No two slots share a byte. hd is a multiple of 16.
#ifndef SPECDEC_KV_H
#define SPECDEC_KV_H

#include "pointwise.h"

// As kv/codec.py numbers them.
enum { KV_F32, KV_BF16, KV_INT8, KV_INT4 };

ALWAYS int kv_quantised(const int kind) { return kind == KV_INT8 || kind == KV_INT4; }
ALWAYS int64_t kv_group(int64_t hd) { return hd % 32 ? 16 : 32; }

// Bytes of an element, which is what places in the pool count: of a float, or one.
ALWAYS int64_t kv_element(const int kind) { return kind == KV_F32 ? 4 : kind == KV_BF16 ? 2 : 1; }

// Elements of a row, and of a block's rows, without scales.
ALWAYS int64_t kv_row(const int kind, int64_t hd) { return kind == KV_INT4 ? hd / 2 : hd; }
ALWAYS int64_t kv_codes(const int kind, int64_t hd) { return LANES * kv_row(kind, hd); }

// Elements of a block of one head; a multiple of sixteen.
ALWAYS int64_t kv_block(const int kind, int64_t hd) {
  return kv_codes(kind, hd) + (kv_quantised(kind) ? hd / kv_group(hd) * LANES * (int64_t)sizeof(uint16_t) : 0);
}

// Codes [n] of the n = 16 or 32 entries of a group; returns the scale's bits.
ALWAYS uint16_t kv_quantise(const int kind, const float *x, int64_t n, int8_t *codes) {
  f32x16 a = f_load(x), b = n > LANES ? f_load(x + LANES) : f_zero();
  const int32_t most = i_max_lanes(i_max(f_bits(f_abs(a)), f_bits(f_abs(b))));  // as bits: finite < infinite < NaN
  const float amax = bits_float((uint32_t)most);
  const int finite = most < 0x7f800000, usable = finite && amax >= 0x1p-120f;
  const uint32_t scale = usable ? (float_bits(amax / (kind == KV_INT8 ? 127.0f : 7.0f)) + 0xffff) & 0xffff0000 : 0;
  if (!usable) a = b = f_zero();
  const f32x16 magic = f_set1(12582912.0f), inverse = f_set1(usable ? 1.0f / bits_float(scale) : 0.0f);  // 1.5 * 2^23
  i_store_i8(codes, i_sub(f_bits(f_add(f_mul(a, inverse), magic)), f_bits(magic)));
  if (n > LANES) i_store_i8(codes + LANES, i_sub(f_bits(f_add(f_mul(b, inverse), magic)), f_bits(magic)));
  return finite ? (uint16_t)(scale >> 16) : 0x7fc0;
}

// Put one head's row x [hd] into slot t of a block: code e of it goes to first + e step.
ALWAYS void kv_store_codes(const int kind, const float *x, int8_t *block, int64_t first, int64_t step, int64_t t, int64_t hd) {
  const int64_t group = kv_group(hd), bytes = kv_row(kind, group);
  for (int64_t g = 0; g < hd / group; g++) {
    int8_t codes[2 * LANES];
    const uint16_t scale = kv_quantise(kind, x + g * group, group, codes);
    memcpy(block + kv_codes(kind, hd) + (g * LANES + t) * (int64_t)sizeof scale, &scale, sizeof scale);
    if (kind == KV_INT4)
      for (int64_t e = 0; e < bytes; e++) {
        const int64_t low = e / 8 * LANES + e % 8;
        codes[e] = (int8_t)((codes[low] & 15) | codes[low + 8] * 16);
      }
    for (int64_t e = 0; e < bytes; e++) block[first + (g * bytes + e) * step] = codes[e];
  }
}

// Put one head's key x [hd] into slot t of its block, which begins at element `at`.
ALWAYS void store_key(const float *x, void *keys, int64_t at, int64_t t, const int kind, int64_t hd) {
  if (kv_quantised(kind)) {
    kv_store_codes(kind, x, (int8_t *)keys + at, t, LANES, t, hd);
    return;
  }
  if (kind == KV_F32) {
    for (int64_t d = 0; d < hd; d++) ((float *)keys)[at + d * LANES + t] = x[d];
    return;
  }
  for (int64_t d = 0; d < hd; d += LANES) {
    uint16_t rounded[LANES];
    f_store_bf16(rounded, load_up_to(x + d, hd - d));
    int n = hd - d < LANES ? (int)(hd - d) : LANES;
    for (int e = 0; e < n; e++) ((uint16_t *)keys)[at + (d + e) * LANES + t] = rounded[e];
  }
}

// Put one head's value x [hd] into slot t of its block, which begins at element `at`.
ALWAYS void store_value(const float *x, void *values, int64_t at, int64_t t, const int kind, int64_t hd) {
  if (kv_quantised(kind)) {
    kv_store_codes(kind, x, (int8_t *)values + at, t * kv_row(kind, hd), 1, t, hd);
    return;
  }
  if (kind == KV_F32) {
    memcpy((float *)values + at + t * hd, x, (size_t)hd * sizeof(float));
    return;
  }
  for (int64_t d = 0; d < hd; d += LANES) {
    uint16_t rounded[LANES];
    f_store_bf16(rounded, load_up_to(x + d, hd - d));
    memcpy((uint16_t *)values + at + t * hd + d, rounded, (size_t)(hd - d < LANES ? hd - d : LANES) * sizeof(uint16_t));
  }
}

#endif
