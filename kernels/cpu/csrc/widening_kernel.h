#pragma once

// The kernel of CPUs that multiply no bf16: weights are widened to fp32 in registers and meet rows that are fp32. An
// instruction that widens goes beside those that multiply, and a weight takes half the memory, or a quarter.
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "panels.h"
#include "piece.h"
#include "product.h"
#include "simd.h"

namespace paged {

typedef float Numbers __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kSums = kRegisters == 32 ? 24 : 12;  // registers; the others hold weights, and a row's number
// A block of many rows is two vectors wide, or four short ones.
constexpr int kBlockVectors = std::max(kPanelVectors / 2, 2);
constexpr int kVectorRows = kSums / kBlockVectors;

// Fewer rows take a whole panel at once, which then is read from its beginning to its end.
constexpr int block_vectors(int num_rows) { return num_rows * kPanelVectors <= kSums ? kPanelVectors : kBlockVectors; }

// A piece that is read more than once stays in the first cache.
constexpr int64_t vector_piece_steps(int64_t num_rows) {
  return num_rows <= kVectorRows && block_vectors(static_cast<int>(num_rows)) == kPanelVectors ? 2048 : 128;
}

template <Arithmetic A>
struct Widened;

template <>
struct Widened<Arithmetic::bf16> {
  static constexpr int kNumbers = 2;  // of a word
  static Numbers number(const Words& words, int i) { return i == 0 ? Numbers(words << 16) : Numbers(words & 0xffff0000u); }
};

template <>
struct Widened<Arithmetic::int8> {
  static constexpr int kNumbers = 4;
  static Numbers number(const Words& words, int i) {
    return __builtin_convertvector(Integers(words << (24 - 8 * i)) >> 24, Numbers);
  }
};

template <typename T>
inline T load_vector(const void* from) {
  T vector;
  __builtin_memcpy(&vector, from, sizeof(T));
  return vector;
}

// M rows times W vectors of the panel's outputs. Few rows have too few sums to hide the latency of an instruction: they
// keep `U` of each, in turns.
template <Arithmetic A, int M, int W, int U>
void widened_block(const Piece& piece, int first_vector, int64_t lines) {
  constexpr int kGroups = (M + 2) / 3, kNumbers = Widened<A>::kNumbers;  // groups as in dot_kernel.h
  constexpr int64_t kRowStep = row_step_bytes(A);
  Numbers sums[U][M][W];
  const char* groups[kGroups];
  float* to = piece.sums + first_vector * kLanes;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < W; ++n) {
      sums[0][m][n] = piece.add ? load_vector<Numbers>(to + m * kPanel + n * kLanes) : Numbers{};
#pragma GCC unroll 2
      for (int u = 1; u < U; ++u) sums[u][m][n] = Numbers{};
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) groups[g] = piece.rows + 3 * g * piece.stride;

  const char *panel = piece.panel + first_vector * sizeof(Words), *prefetch = piece.prefetch;
  const int64_t stride = piece.stride;
  for (int64_t step = 0; step < piece.steps; step += 4) {
    for (int64_t i = 0; i < lines; ++i, prefetch += 64) __builtin_prefetch(prefetch, 0, 2);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
#pragma GCC unroll 4
      for (int i = 0; i < kNumbers; ++i) {
        Numbers weights[W];
#pragma GCC unroll 8
        for (int n = 0; n < W; ++n) {
          weights[n] = Widened<A>::number(load_vector<Words>(panel + s * kStepRow + n * sizeof(Words)), i);
        }
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          float x;
          __builtin_memcpy(&x, groups[m / 3] + (m % 3) * stride + s * kRowStep + i * sizeof(float), sizeof(x));
#pragma GCC unroll 8
          for (int n = 0; n < W; ++n) sums[i % U][m][n] += x * weights[n];
        }
      }
    }
    panel += 4 * kStepRow;
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) groups[g] += 4 * kRowStep;
  }

#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < W; ++n) {
      Numbers sum = sums[0][m][n];
#pragma GCC unroll 2
      for (int u = 1; u < U; ++u) sum += sums[u][m][n];
      __builtin_memcpy(to + m * kPanel + n * kLanes, &sum, sizeof(sum));
    }
  }
}

template <Arithmetic A, int M>
void widened_rows(const Piece& piece) {
  constexpr int W = block_vectors(M), U = 2 * M * W <= kSums ? 2 : 1;
  for (int vector = 0; vector < kPanelVectors; vector += W) {
    widened_block<A, M, W, U>(piece, vector, vector == 0 ? piece.lines : 0);
  }
}

template <Arithmetic A, int... M>
constexpr std::array<void (*)(const Piece&), sizeof...(M)> widened_table(std::integer_sequence<int, M...>) {
  return {widened_rows<A, M + 1>...};
}

// `num_rows` from 1 to kVectorRows.
template <Arithmetic A>
void vector_product(const Piece& piece, int64_t num_rows) {
  static constexpr auto kTable = widened_table<A>(std::make_integer_sequence<int, kVectorRows>{});
  kTable[num_rows - 1](piece);
}

}  // namespace paged
