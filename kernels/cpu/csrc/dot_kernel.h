#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "panels.h"
#include "piece.h"
#include "product.h"

namespace paged {

// The kernel of CPUs that multiply bf16: dot products of steps as they are packed.

constexpr int kVectorRows = 12;

// A piece goes past in the second cache.
constexpr int64_t vector_piece_steps(int64_t) { return 2048; }

template <Arithmetic A>
struct Dot;

template <>
struct Dot<Arithmetic::bf16> {
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Sum s) { _mm512_storeu_ps(p, s); }
  static Sum plus(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static Sum dot(Sum s, __m512i x, __m512i w) { return _mm512_dpbf16_ps(s, (__m512bh)x, (__m512bh)w); }
};

template <>
struct Dot<Arithmetic::int8> {
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum load(const float* p) { return _mm512_loadu_si512(p); }
  static void store(float* p, Sum s) { _mm512_storeu_si512(p, s); }
  static Sum plus(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static Sum dot(Sum s, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(s, x, w); }
};

inline __m512i broadcast_step(const char* row) {
  int32_t step;
  std::memcpy(&step, row, sizeof(step));
  return _mm512_set1_epi32(step);
}

// M rows in 2·M sums. Few rows have too few sums to hide the latency of an instruction: they keep `U` of each, one for
// every U-th step.
template <Arithmetic A, int M, int U>
void dot_rows(const Piece& piece) {
  using D = Dot<A>;
  constexpr int kGroups = (M + 2) / 3;  // three rows are addressed from one pointer: there are not enough for each row
  typename D::Sum sums[U][M][2];
  const char* groups[kGroups];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      sums[0][m][n] = piece.add ? D::load(piece.sums + m * kPanel + n * kLane) : D::zero();
#pragma GCC unroll 4
      for (int u = 1; u < U; ++u) sums[u][m][n] = D::zero();
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) groups[g] = piece.rows + 3 * g * piece.stride;

  const char *panel = piece.panel, *prefetch = piece.prefetch;
  const int64_t stride = piece.stride, lines = piece.lines;
  for (int64_t step = 0; step < piece.steps; step += 4) {
    for (int64_t i = 0; i < lines; ++i, prefetch += 64) _mm_prefetch(prefetch, _MM_HINT_T1);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const __m512i left = _mm512_loadu_si512(panel + u * kStepRow);
      const __m512i right = _mm512_loadu_si512(panel + u * kStepRow + kStepRow / 2);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const __m512i x = broadcast_step(groups[m / 3] + (m % 3) * stride + u * kStepBytes);
        sums[u % U][m][0] = D::dot(sums[u % U][m][0], x, left);
        sums[u % U][m][1] = D::dot(sums[u % U][m][1], x, right);
      }
    }
    panel += 4 * kStepRow;
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) groups[g] += 4 * kStepBytes;
  }

#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      auto sum = sums[0][m][n];
#pragma GCC unroll 4
      for (int u = 1; u < U; ++u) sum = D::plus(sum, sums[u][m][n]);
      D::store(piece.sums + m * kPanel + n * kLane, sum);
    }
  }
}

constexpr int dot_sums(int rows) { return rows <= 2 ? 4 : rows <= 5 ? 2 : 1; }

template <Arithmetic A, int... M>
constexpr std::array<void (*)(const Piece&), sizeof...(M)> dot_table(std::integer_sequence<int, M...>) {
  return {dot_rows<A, M + 1, dot_sums(M + 1)>...};
}

// `num_rows` from 1 to kVectorRows.
template <Arithmetic A>
void vector_product(const Piece& piece, int64_t num_rows) {
  static constexpr auto kTable = dot_table<A>(std::make_integer_sequence<int, kVectorRows>{});
  kTable[num_rows - 1](piece);
}

}  // namespace paged
