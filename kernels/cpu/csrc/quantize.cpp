#if defined(PAGED_BF16_DOT)  // others leave rows in fp32

#include "quantize.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "lanes.h"
#include "panels.h"
#include "parallel.h"

namespace paged {
namespace {

constexpr int64_t kRowsPerItem = 8;
constexpr float kLargest = 127.0f;

// The largest |x|; NaN or infinity where one of them is not finite.
float largest(const c10::BFloat16* x, int64_t inputs) {
  // Without its sign a bf16 is ordered as an integer, and what is not finite comes last.
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < inputs; i += 32) {
    const int64_t left = inputs - i;
    const __mmask32 lanes = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(lanes, x + i), magnitude));
  }
  alignas(64) uint16_t all[32];
  _mm512_store_si512(all, most);
  uint32_t bits = 0;
  for (const uint16_t one : all) bits = one > bits ? one : bits;
  bits <<= 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float quantize_row(const c10::BFloat16* x, int64_t inputs, uint8_t* to, int64_t padded) {
  const float most = largest(x, inputs);
  if (!std::isfinite(most)) {
    std::memset(to, kZeroPoint, padded);
    return std::numeric_limits<float>::quiet_NaN();
  }
  // Next to nothing would have an infinite inverse.
  const bool is_zero = most < std::numeric_limits<float>::min() * kLargest;
  const __m512 inverse = _mm512_set1_ps(is_zero ? 0.0f : kLargest / most);
  const __m512i zero_point = _mm512_set1_epi32(kZeroPoint);
  for (int64_t i = 0; i < padded; i += kLane) {
    const __m512 values = load_bf16(x + i, first_lanes(inputs - i));
    const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(values, inverse)), zero_point);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(rounded));
  }
  return is_zero ? 0.0f : most / kLargest;
}

}  // namespace

void quantize_rows(const c10::BFloat16* x, int64_t stride, int64_t count, int64_t inputs, uint8_t* to,
                   int64_t to_stride, int64_t padded, float* scales) {
  for_each_item(divide_up(count, kRowsPerItem), [&](int64_t item) {
    for (int64_t r = item * kRowsPerItem; r < std::min(count, (item + 1) * kRowsPerItem); ++r) {
      scales[r] = quantize_row(x + r * stride, inputs, to + r * to_stride, padded);
    }
  });
}

}  // namespace paged

#endif
