#pragma once

#include <algorithm>
#include <cstdint>

#include "panels.h"
#include "piece.h"
#include "product.h"
#include "tiles.h"

namespace paged {

constexpr int64_t kTileRows = 32;

// Tiles 0 to 3 are the sums [top, bottom][left, right], 4 and 5 the rows (top, bottom), 6 and 7 the panel (left, right).
template <Arithmetic A, int C, int X, int W>
inline void tile_dot() {
  if constexpr (A == Arithmetic::bf16) {
    tiles::dot_bf16<C, X, W>();
  } else {
    tiles::dot_int8<C, X, W>();
  }
}

template <Arithmetic A, bool Bottom>
void tile_rows(const Piece& piece) {
  constexpr int64_t kSumRow = kPanel * sizeof(float), kHalf = kStepRow / 2;
  float *top = piece.sums, *bottom = piece.sums + 16 * kPanel;
  if (piece.add) {
    tiles::load<0>(top, kSumRow), tiles::load<1>(top + kLane, kSumRow);
    if constexpr (Bottom) tiles::load<2>(bottom, kSumRow), tiles::load<3>(bottom + kLane, kSumRow);
  } else {
    tiles::zero<0>(), tiles::zero<1>();
    if constexpr (Bottom) tiles::zero<2>(), tiles::zero<3>();
  }
  const char *panel = piece.panel, *rows = piece.rows, *prefetch = piece.prefetch;
  for (int64_t step = 0; step < piece.steps; step += 16) {
    for (int64_t i = 0; i < 4 * piece.lines; ++i, prefetch += 64) _mm_prefetch(prefetch, _MM_HINT_T1);
    tiles::load<4>(rows, piece.stride);
    tiles::load<6>(panel, kStepRow);
    tile_dot<A, 0, 4, 6>();
    tiles::load<7>(panel + kHalf, kStepRow);
    tile_dot<A, 1, 4, 7>();
    if constexpr (Bottom) {
      tiles::load<5>(rows + 16 * piece.stride, piece.stride);
      tile_dot<A, 2, 5, 6>();
      tile_dot<A, 3, 5, 7>();
    }
    rows += 16 * kStepBytes;
    panel += 16 * kStepRow;
  }
  tiles::store<0>(top, kSumRow), tiles::store<1>(top + kLane, kSumRow);
  if constexpr (Bottom) tiles::store<2>(bottom, kSumRow), tiles::store<3>(bottom + kLane, kSumRow);
}

// `num_rows` from 1 to kTileRows.
template <Arithmetic A>
void tile_product(Tiles& own, const Piece& piece, int64_t num_rows) {
  const auto top = static_cast<uint8_t>(std::min<int64_t>(num_rows, 16));
  const auto bottom = static_cast<uint8_t>(num_rows - top);
  own.shape({{top, top, bottom, bottom, top, bottom, 16, 16}});
  if (bottom) {
    tile_rows<A, true>(piece);
  } else {
    tile_rows<A, false>(piece);
  }
}

}  // namespace paged
