// What becomes of attended values: the results themselves, or parts of them that are put together at the end.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "kv_layout.h"
#include "simd.h"

namespace paged {

// Of each token, `stride` elements from the next, and head the columns of its values, [head][value_dim]; and where a token's
// context is in parts, for each part those, the largest exponent and the sum of weights.
struct Results {
  char* out;
  c10::ScalarType dtype;
  int64_t stride, num_heads, value_dim, value_row;
  float* parts;        // [slot][head][value_row + kGroup]
  const float* sinks;  // exponents of 2, one a head; null: none
  bool* unused;        // [slot] a part that nobody has put

  float* part(int64_t slot, int64_t head) const { return parts + (slot * num_heads + head) * (value_row + kGroup); }

  void put_part(int64_t slot, int64_t head, const float* values, float largest, float sum) const {
    float* to = part(slot, head);
    std::memcpy(to, values, value_row * sizeof(float));
    to[value_row] = largest;
    to[value_row + 1] = sum;
  }

  void clear(int64_t token) const {
    const auto element_size = static_cast<int64_t>(c10::elementSize(dtype));
    std::memset(out + token * stride * element_size, 0, num_heads * value_dim * element_size);
  }

  // Divides by the sum of weights, in which the head's sink takes part. Only where every score is -inf is the sum zero;
  // then nothing is known, which NaN says.
  void finish(int64_t token, int64_t head, const float* values, float largest, float sum) const {
    if (sinks == nullptr) return put(token, head, values, 1.f / sum);
    const float sink = sinks[head], top = std::max(sink, largest);
    const float factor = exp2(largest - top);
    put(token, head, values, factor / (sum * factor + exp2(sink - top)));
  }

  // Parts weighed by how large their scores are: log-sum-exp. One that saw nothing has the sum zero and is left out;
  // what is NaN is not. `sums` has room for value_row numbers.
  void merge(int64_t token, int64_t head, int64_t first_slot, int64_t last_slot, float* sums) const {
    float largest = kMinusInfinity, sum = 0.f;
    for (int64_t slot = first_slot; slot < last_slot; ++slot)
      if (!unused[slot]) largest = std::max(largest, part(slot, head)[value_row]);
    const float origin = largest == kMinusInfinity ? 0.f : largest;
    std::memset(sums, 0, value_row * sizeof(float));
    for (int64_t slot = first_slot; slot < last_slot; ++slot) {
      const float* values = part(slot, head);
      if (unused[slot] || values[value_row + 1] == 0.f) continue;
      const float weight = exp2(values[value_row] - origin);
      sum += weight * values[value_row + 1];
      for (int64_t i = 0; i < value_row; ++i) sums[i] += weight * values[i];
    }
    finish(token, head, sums, largest, sum);
  }

 private:
  void put(int64_t token, int64_t head, const float* values, float factor) const {
    const int64_t offset = token * stride + head * value_dim;
    if (dtype == c10::kFloat) return put_as(reinterpret_cast<float*>(out) + offset, values, factor);
    if (dtype == c10::kBFloat16) return narrow(values, value_dim, reinterpret_cast<uint16_t*>(out) + offset, factor);
    put_as(reinterpret_cast<c10::Half*>(out) + offset, values, factor);
  }

  template <typename T>
  void put_as(T* to, const float* values, float factor) const {
    for (int64_t i = 0; i < value_dim; ++i) to[i] = static_cast<T>(values[i] * factor);
  }
};

}  // namespace paged
