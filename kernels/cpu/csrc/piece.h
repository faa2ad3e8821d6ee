#pragma once

#include <cstdint>

namespace paged {

// One call of a kernel: a few rows times a piece of one panel.
struct Piece {
  const char* rows;  // the first row, at the piece's first step
  int64_t stride;    // bytes from row to row
  const char* panel;
  int64_t steps;     // a multiple of kStepsRound
  float* sums;       // [rows][32]
  bool add;          // to what is in sums; otherwise they are overwritten
  const char* prefetch;  // what will be read next
  int64_t lines;         // of 64 bytes, to be prefetched with every 4 steps
};

}  // namespace paged
