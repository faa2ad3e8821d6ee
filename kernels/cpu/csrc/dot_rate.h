#pragma once

// The yardstick of what multiplies: products on registers alone, of bf16 where the level has them and else of fp32, by
// the same threads that the kernels use.
#if defined(PAGED_BF16_DOT)
#include <immintrin.h>
#endif

#include <cstdint>

#include "parallel.h"
#include "simd.h"

#if defined(PAGED_TILES)
#include "tiles.h"
#endif

namespace paged {

#if defined(PAGED_TILES)

constexpr int64_t kRoundFlops = 4 * 2 * 16 * 16 * 32;  // of a round

inline void dots(int64_t rounds) {
  if (!tiles::available()) return;
  Tiles own;
  own.shape({{16, 16, 16, 16, 16, 16, 16, 16}});
  for (int64_t i = 0; i < rounds; ++i) {
    tiles::dot_bf16<0, 4, 6>();
    tiles::dot_bf16<1, 4, 7>();
    tiles::dot_bf16<2, 5, 6>();
    tiles::dot_bf16<3, 5, 7>();
  }
}

#elif defined(PAGED_BF16_DOT)

constexpr int kRoundSums = 16;
constexpr int64_t kRoundFlops = kRoundSums * 2 * 32;

inline void dots(int64_t rounds) {
  __m512 sums[kRoundSums] = {};
#pragma GCC unroll 16
  for (int s = 0; s < kRoundSums; ++s) asm volatile("" : "+v"(sums[s]));  // so that none is taken for another
  __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(ones));  // and no round is left out
#pragma GCC unroll 16
    for (int s = 0; s < kRoundSums; ++s) sums[s] = _mm512_dpbf16_ps(sums[s], ones, ones);
  }
#pragma GCC unroll 16
  for (int s = 0; s < kRoundSums; ++s) asm volatile("" ::"v"(sums[s]));
}

#else

constexpr int kRoundSums = 12;
constexpr int64_t kRoundFlops = kRoundSums * 2 * kLanes;

inline void dots(int64_t rounds) {
  typedef float Numbers __attribute__((vector_size(4 * kLanes)));
#if defined(__x86_64__)
#define PAGED_IN_A_REGISTER "+x"
#else
#define PAGED_IN_A_REGISTER "+w"
#endif
  Numbers sums[kRoundSums] = {}, ones = Numbers{} + 1.0f;
#pragma GCC unroll 16
  for (int s = 0; s < kRoundSums; ++s) asm volatile("" : PAGED_IN_A_REGISTER(sums[s]));  // as above
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : PAGED_IN_A_REGISTER(ones));
#pragma GCC unroll 16
    for (int s = 0; s < kRoundSums; ++s) sums[s] += ones * ones;
  }
#pragma GCC unroll 16
  for (int s = 0; s < kRoundSums; ++s) asm volatile("" : PAGED_IN_A_REGISTER(sums[s]));
#undef PAGED_IN_A_REGISTER
}

#endif

// Runs `rounds` on each thread; what all of them together computed, in floating-point operations.
inline int64_t dot_rate_probe(int64_t rounds) {
  const int num_threads = at::get_num_threads();
  for_each_item(num_threads, [&](int64_t) { dots(rounds); });
  return num_threads * rounds * kRoundFlops;
}

}  // namespace paged
