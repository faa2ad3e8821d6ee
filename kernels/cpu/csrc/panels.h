#pragma once

// How a packed weight lies in memory.
//
// A weight [outputs, inputs] is cut into panels of 32 outputs, and its inputs into steps of 4 bytes: two bf16 or four
// int8. A panel is [step][32 outputs][4 bytes], so that one step is two vectors of 64 bytes which a dot-product
// instruction takes as they are, and 16 steps are two AMX tiles whose rows lie 128 bytes apart. A product reads its
// panels once, from beginning to end. Outputs and inputs that a weight lacks are zero.
//
//      outputs 0..15             outputs 16..31
//   ┌─────────────────────────┬─────────────────────────┐
//   │ w[0][0,1] … w[15][0,1]  │ w[16][0,1] … w[31][0,1] │  step 0
//   │ w[0][2,3] … w[15][2,3]  │ w[16][2,3] … w[31][2,3] │  step 1
//   └─────────────────────────┴─────────────────────────┘  …
//
// A gated panel has 16 outputs of the gate on its left and the same 16 of the projection that it gates on its right.

#include <cstdint>

namespace paged {

constexpr int64_t kPanel = 32;             // outputs of a panel
constexpr int64_t kLane = 16;              // outputs of one vector: half a panel
constexpr int64_t kStepBytes = 4;          // what one step takes of each row
constexpr int64_t kStepRow = kPanel * kStepBytes;
constexpr int64_t kStepsRound = 16;        // the number of steps is a multiple of this: one AMX tile

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Steps for so many bytes of a row, padded.
inline int64_t padded_steps(int64_t bytes) { return divide_up(bytes, kStepBytes * kStepsRound) * kStepsRound; }

}  // namespace paged
