#pragma once

#include <cstdint>
#include <functional>

namespace paged {

enum class Arithmetic {
  bf16,  // rows bf16, weights bf16, sums fp32
  int8,  // rows uint8, weights int8, sums int32
};

// The rows of the left side: `stride` bytes apart, each with all steps of the panels.
struct Rows {
  const char* data;
  int64_t stride;
  int64_t count;
};

// The right side: see panels.h.
struct Panels {
  const char* data;
  int64_t count;
  int64_t steps;
};

// What becomes of sums: `sums` is [num_rows][32] for rows from `first_row` on and the outputs of `panel`; fp32, or
// int32 by arithmetic int8, and free to be changed. `worker` is below max_workers(). Called from many threads at once,
// never twice for the same sums; one worker sees the panels of a row in rising order.
struct Tile {
  float* sums;
  int64_t first_row;
  int64_t num_rows;
  int64_t panel;
  int worker;
};
using Epilogue = std::function<void(const Tile&)>;

// An upper bound of workers that a product called now will use.
int max_workers();

// Multiplies all rows with all panels on torch's threads. Panels are handed out as workers become free, so that a core
// which something else keeps busy delays one panel, not its share of them.
void product(Arithmetic arithmetic, const Rows& rows, const Panels& panels, const Epilogue& epilogue);

}  // namespace paged
