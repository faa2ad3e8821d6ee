#pragma once

// The yardstick of what multiplies: dot products of bf16 on registers alone, by the same threads that the kernels use.
#include <immintrin.h>

#include <cstdint>

#include "parallel.h"

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

#else

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

#endif

// Runs `rounds` on each thread; what all of them together computed, in floating-point operations.
inline int64_t dot_rate_probe(int64_t rounds) {
  const int num_threads = at::get_num_threads();
  on_each_thread(num_threads, [&](int) { dots(rounds); });
  return num_threads * rounds * kRoundFlops;
}

}  // namespace paged
