// The yardstick of what multiplies: dot products of bf16 on registers alone, by the same threads that the kernels use.
#if defined(PAGED_BF16_DOT)

#include <immintrin.h>
#include <torch/library.h>

#include "parallel.h"

#if defined(PAGED_TILES)
#include "tiles.h"
#endif

namespace paged {
namespace {

#if defined(PAGED_TILES)

constexpr int64_t kFlops = 4 * 2 * 16 * 16 * 32;  // of a round

void dots(int64_t rounds) {
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

constexpr int kSums = 16;
constexpr int64_t kFlops = kSums * 2 * 32;

void dots(int64_t rounds) {
  __m512 sums[kSums] = {};
#pragma GCC unroll 16
  for (int s = 0; s < kSums; ++s) asm volatile("" : "+v"(sums[s]));  // so that none is taken for another
  __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(ones));  // and no round is left out
#pragma GCC unroll 16
    for (int s = 0; s < kSums; ++s) sums[s] = _mm512_dpbf16_ps(sums[s], ones, ones);
  }
#pragma GCC unroll 16
  for (int s = 0; s < kSums; ++s) asm volatile("" ::"v"(sums[s]));
}

#endif

// Runs `rounds` on each thread; what all of them together computed, in floating-point operations.
int64_t dot_rate_probe(int64_t rounds) {
  const int num_threads = at::get_num_threads();
  on_each_thread(num_threads, [&](int) { dots(rounds); });
  return num_threads * rounds * kFlops;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(PAGED_LIBRARY, m) { m.def("dot_rate_probe(int rounds) -> int", &dot_rate_probe); }

}  // namespace paged

#endif
