// The AVX-512 intrinsics that simd.h and blocks.h use, on a machine with AVX2: SIMDe's, and the few that it lacks. Then the
// AMX ones of tiles.h, which stop the program where a processor would fault.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>
#include <stdio.h>
#include <stdlib.h>
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
static inline simde__m512i emulated_cvtepi8_epi32(__m128i a) {
  return emulated_join(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
static inline simde__m512i emulated_srai_epi32(simde__m512i a, int n) {
  __m256i half[2];
  memcpy(half, &a, 64);
  return emulated_join(_mm256_srai_epi32(half[0], n), _mm256_srai_epi32(half[1], n));
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
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_srai_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepi32_epi8
#undef _mm512_maskz_loadu_ps
#undef _mm512_mask_storeu_ps
#define _mm512_cvtepi8_epi32(a) emulated_cvtepi8_epi32(a)
#define _mm512_srai_epi32(a, n) emulated_srai_epi32(a, n)
#define _mm512_cvtepu16_epi32(a) emulated_cvtepu16_epi32(a)
#define _mm512_cvtph_ps(a) emulated_cvtph_ps(a)
#define _mm512_cvtepi32_ps(a) emulated_cvtepi32_ps(a)
#define _mm512_cvtepi32_epi8(a) emulated_cvtepi32_epi8(a)
#define _mm512_maskz_loadu_ps(m, p) emulated_maskz_loadu_ps(m, p)
#define _mm512_mask_storeu_ps(p, m, x) emulated_mask_storeu_ps(p, m, x)
#define __m512 simde__m512
#define __m512i simde__m512i
#define __mmask16 simde__mmask16

// Tile registers belong to a thread, have no shape before a configuration is loaded, and none after their release.
typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} EmulatedShapes;
typedef struct {
  EmulatedShapes shapes;
  uint8_t data[8][16][64];
} EmulatedTiles;
static __thread EmulatedTiles emulated_tiles;
// Threads that hold tiles now, and tile products so far, over all sources of the library.
__attribute__((weak, visibility("default"))) int emulated_holders, emulated_products;

static inline void emulated_check(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "emulated tiles: %s\n", what);
  abort();
}
static inline void emulated_loadconfig(const void *shapes) {
  EmulatedTiles *t = &emulated_tiles;
  emulated_check(t->shapes.palette == 0, "configured twice without a release");
  memcpy(&t->shapes, shapes, 64);
  emulated_check(t->shapes.palette == 1 && t->shapes.start == 0, "an unknown palette");
  for (int i = 0; i < 8; i++) emulated_check(t->shapes.rows[i] <= 16 && t->shapes.row_bytes[i] <= 64, "a tile larger than 1 KB");
  __atomic_add_fetch(&emulated_holders, 1, __ATOMIC_SEQ_CST);
}
static inline void emulated_release(void) {
  emulated_check(emulated_tiles.shapes.palette == 1, "released without a configuration");
  memset(&emulated_tiles, 0, sizeof emulated_tiles);
  __atomic_sub_fetch(&emulated_holders, 1, __ATOMIC_SEQ_CST);
}
static inline uint8_t (*emulated_tile(int i))[64] {
  emulated_check(emulated_tiles.shapes.palette == 1 && emulated_tiles.shapes.rows[i] > 0, "a tile used without a shape");
  return emulated_tiles.data[i];
}
static inline void emulated_zero(int i) { memset(emulated_tile(i), 0, 1024); }
static inline void emulated_loadd(int i, const void *from, int64_t stride) {
  uint8_t(*tile)[64] = emulated_tile(i);
  for (int r = 0; r < emulated_tiles.shapes.rows[i]; r++)
    memcpy(tile[r], (const char *)from + r * stride, emulated_tiles.shapes.row_bytes[i]);
}
static inline void emulated_stored(int i, void *to, int64_t stride) {
  uint8_t(*tile)[64] = emulated_tile(i);
  for (int r = 0; r < emulated_tiles.shapes.rows[i]; r++)
    memcpy((char *)to + r * stride, tile[r], emulated_tiles.shapes.row_bytes[i]);
}
static inline void emulated_dp(int sums, int left, int right, int right_signed) {
  const EmulatedShapes *s = &emulated_tiles.shapes;
  uint8_t(*c)[64] = emulated_tile(sums), (*a)[64] = emulated_tile(left), (*b)[64] = emulated_tile(right);
  emulated_check(s->rows[sums] == s->rows[left] && s->row_bytes[sums] == s->row_bytes[right] &&
                     s->row_bytes[left] == 4 * s->rows[right],
                 "shapes that do not fit each other");
  __atomic_add_fetch(&emulated_products, 1, __ATOMIC_SEQ_CST);
  for (int m = 0; m < s->rows[sums]; m++)
    for (int n = 0; n < s->row_bytes[sums] / 4; n++) {
      int32_t sum;
      memcpy(&sum, c[m] + 4 * n, 4);
      for (int k = 0; k < s->row_bytes[left]; k++) {
        uint8_t code = b[k / 4][4 * n + k % 4];
        sum += (int8_t)a[m][k] * (right_signed ? (int8_t)code : code);
      }
      memcpy(c[m] + 4 * n, &sum, 4);
    }
}
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbssd
#define _tile_loadconfig(shapes) emulated_loadconfig(shapes)
#define _tile_release() emulated_release()
#define _tile_zero(i) emulated_zero(i)
#define _tile_loadd(i, from, stride) emulated_loadd(i, from, stride)
#define _tile_stored(i, to, stride) emulated_stored(i, to, stride)
#define _tile_dpbsud(c, a, b) emulated_dp(c, a, b, 0)
#define _tile_dpbssd(c, a, b) emulated_dp(c, a, b, 1)
