// Numbers in 8 bits, as the caches may keep them: of each token's key, and of its value, those of one head have a scale in
// common, and a byte is the number over that scale, rounded, plus 128.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace paged {

constexpr int kByteOrigin = 128;
constexpr float kLargestByte = 127.f;

// The largest |x|; NaN or infinite where one is.
inline float largest_of(const float* x, int64_t count) {
  // Without its sign a float is ordered as an integer, and what is not finite comes last.
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest;
  std::memcpy(&largest, &most, sizeof(largest));
  return largest;
}

// How numbers become integers of at most `limit`: `inverse` times them, which times `scale` are they again. Those that
// are not all finite have the scale NaN, so that nothing computed from them is finite.
struct IntegerScale {
  float scale, inverse;

  IntegerScale(float largest, float limit) {
    if (!std::isfinite(largest)) {
      scale = std::numeric_limits<float>::quiet_NaN(), inverse = 0.f;
    } else if (largest < std::numeric_limits<float>::min() * limit) {  // the inverse would be infinite
      scale = inverse = 0.f;
    } else {
      scale = largest / limit, inverse = limit / largest;
    }
  }
};

// Byte i goes to `to[i / group * stride + i % group * step]`. Returns the scale.
inline float put_bytes(const float* from, int64_t count, uint8_t* to, int64_t group, int64_t stride, int64_t step) {
  const IntegerScale scale(largest_of(from, count), kLargestByte);
  const bool known = scale.scale == scale.scale;
  constexpr float kShift = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
  for (int64_t i = 0; i < count; ++i) {
    const float shifted = (known ? from[i] : 0.f) * scale.inverse + kShift;
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    to[i / group * stride + i % group * step] = static_cast<uint8_t>(bits + kByteOrigin);
  }
  return scale.scale;
}

}  // namespace paged
