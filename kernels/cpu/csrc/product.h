#pragma once

#include <cstdint>

#include "panels.h"

namespace paged {

// What weights are kept in. CPUs that multiply bf16 (PAGED_BF16_DOT) take rows as they are packed: bf16, or uint8 with
// sums in int32. Others widen both: rows once for a call, weights in registers, and all of it is fp32.
enum class Arithmetic { bf16, int8 };

// What a row has for one step of a panel.
constexpr int64_t row_step_bytes(Arithmetic arithmetic) {
#if defined(PAGED_BF16_DOT)
  return kStepBytes;
#else
  return (arithmetic == Arithmetic::bf16 ? 2 : 4) * static_cast<int64_t>(sizeof(float));
#endif
}

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

// Sums of `num_rows` rows, a few, from `first_row` on with the outputs of `panel`.
struct Tile {
  float* sums;  // [num_rows][32] fp32, or int32 where rows are uint8
  int64_t first_row;
  int64_t num_rows;
  int64_t panel;
  int worker;  // below max_workers()
};

// What becomes of sums. Called from many threads at once, for each row and panel once; one worker sees the panels of a
// row in rising order.
class Epilogue {
 public:
  // Panels whose outputs share cache lines: the same worker takes them.
  virtual int64_t panels_together() const { return 1; }

  // The tile comes next, when its sums have been computed: the time to fetch what it will be written to.
  virtual void expect(const Tile& tile) const = 0;

  // The sums are free to be changed.
  virtual void take(const Tile& tile) const = 0;

 protected:
  ~Epilogue() = default;
};

// Multiplies all rows with all panels. Panels are handed out as workers become free, so that a core which something else
// keeps busy delays one panel, not its share of them.
void product(Arithmetic arithmetic, const Rows& rows, const Panels& panels, const Epilogue& epilogue);

}  // namespace paged
