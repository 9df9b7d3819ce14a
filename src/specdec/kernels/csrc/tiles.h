// Sixteen rows at a time on AMX: one tile product gives a group's integer sums for sixteen rows and sixteen channels, and
// packed codes lie in memory as a tile wants them (row p of the tile is bytes 64 p ... 64 p + 63). The float steps are
// those of every other path.
#ifndef SPECDEC_TILES_H
#define SPECDEC_TILES_H

#include "blocks.h"

#define TILE_ROWS 16
#define STAGE 6  // groups unpacked, then multiplied, then scaled: no step waits for what the one before has just stored
// Tile registers, by the literal numbers that compilers insist on.
#define SUMS 0
#define QS 1
#define CODES 2

typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileShapes;

// A thread holds tile registers only while it multiplies: the system saves them at each switch of threads.
ALWAYS void tiles_begin(void) {
  static const TileShapes shapes = {
      .palette = 1,
      .row_bytes = {[SUMS] = 4 * LANES, [QS] = GROUP, [CODES] = 4 * LANES},
      .rows = {[SUMS] = TILE_ROWS, [QS] = TILE_ROWS, [CODES] = GROUP / 4},
  };
  _tile_loadconfig(&shapes);
}
ALWAYS void tiles_end(void) { _tile_release(); }

// Integer sums of `count` (at most STAGE) groups with the same groups of TILE_ROWS rows, stride apart.
ALWAYS void tile_dots(const uint8_t *w, const RowGroup *x, int64_t stride, int count, int q4, i32x16 c[STAGE][TILE_ROWS]) {
  _Alignas(64) uint8_t codes[STAGE][64 * GROUP / 4];
  if (q4) {
    for (int i = 0; i < count; i++) unpack_codes(w + i * Q4_BYTES, codes[i]);
    __asm__ volatile("" ::: "memory");  // compilers do not know that a tile load reads memory
  }
  for (int i = 0; i < count; i++) {
    _tile_zero(SUMS);
    _tile_loadd(QS, x[i].q, stride * (int64_t)sizeof(RowGroup));
    _tile_loadd(CODES, q4 ? codes[i] : w + i * Q8_BYTES, 64);
    if (q4) _tile_dpbsud(SUMS, QS, CODES);
    else _tile_dpbssd(SUMS, QS, CODES);
    _tile_stored(SUMS, c[i], 64);
  }
}

#endif
