#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace paged {

// Quantised activations are uint8 around this; what it adds to a sum is taken off again.
constexpr int32_t kZeroPoint = 128;

// Each row of `x` to round(x / scale) + kZeroPoint with scale = max |x| / 127; inputs from `inputs` to `padded` are
// kZeroPoint. A row that is not finite gets the scale NaN, so that nothing computed from it is finite. Strides in elements.
void quantize_rows(const c10::BFloat16* x, int64_t stride, int64_t count, int64_t inputs, uint8_t* to, int64_t to_stride,
                   int64_t padded, float* scales);

}  // namespace paged
