#pragma once

// Of weights in 8 bits and many rows, what widening_kernel.h does with each block of them is done once for all: a strip of
// a panel's piece, as wide as a block of sums, is widened into memory that stays in the first cache while all rows pass.
// A byte takes three instructions, where two numbers of 16 bits take one each, which goes beside what multiplies. Where a
// block is as wide as the panel (AVX-512), or nothing is widened, there are no strips.
#include <array>
#include <cstdint>
#include <utility>

#include "piece.h"
#include "product.h"

#if !defined(PAGED_BF16_DOT)
#include "widening_kernel.h"
#endif

namespace paged {

#if defined(PAGED_BF16_DOT)

constexpr int kStrips = 1;
constexpr bool strips_pay(Arithmetic, int64_t) { return false; }

template <Arithmetic A>
struct WidenedStrip {
  static constexpr int64_t kMostSteps = 0;
  void widen(const Piece&, int) {}
  void multiply(const Piece&, int64_t) const {}
};

#else

constexpr int kStrips = kPanelVectors / kBlockVectors;
constexpr int64_t kStripNumbers = 4096;   // 16 KB: half of a first cache, beside rows and sums
constexpr int64_t kLeastStripBlocks = 5;  // of rows: fewer are done before a strip has paid

constexpr bool strips_pay(Arithmetic arithmetic, int64_t num_blocks) {
  return arithmetic == Arithmetic::int8 && kStrips > 1 && num_blocks >= kLeastStripBlocks;
}

template <Arithmetic A>
class WidenedStrip {
  static constexpr int kNumbers = Widened<A>::kNumbers;
  static constexpr int kFloats = kBlockVectors * kLanes;

 public:
  static constexpr int64_t kMostSteps = kStripNumbers / kFloats / kNumbers;
  static_assert(kMostSteps % kStepsRound == 0);

  // The outputs from strip * kFloats on of a piece of at most kMostSteps.
  void widen(const Piece& piece, int strip) {
    first_output_ = strip * kFloats;
    const char* panel = piece.panel + first_output_ * kStepBytes;
    float* to = numbers_;
    for (int64_t step = 0; step < piece.steps; ++step, panel += kStepRow) {
#pragma GCC unroll 4
      for (int i = 0; i < kNumbers; ++i, to += kFloats) {
#pragma GCC unroll 8
        for (int n = 0; n < kBlockVectors; ++n) {
          const Numbers number = Widened<A>::number(load_vector<Words>(panel + n * sizeof(Words)), i);
          __builtin_memcpy(to + n * kLanes, &number, sizeof(number));
        }
      }
    }
  }

  // As vector_product, of the outputs alone that were widened.
  void multiply(const Piece& piece, int64_t num_rows) const {
    static constexpr auto kTable = table(std::make_integer_sequence<int, kVectorRows>{});
    (this->*kTable[num_rows - 1])(piece);
  }

 private:
  template <int... M>
  static constexpr auto table(std::integer_sequence<int, M...>) {
    return std::array{&WidenedStrip::block<M + 1>...};
  }

  template <int M>
  void block(const Piece& piece) const {
    constexpr int kGroups = (M + 2) / 3, kStepsAtOnce = 4;  // groups as in dot_kernel.h
    constexpr int kInputs = kStepsAtOnce * kNumbers;
    Numbers sums[M][kBlockVectors];
    const char* groups[kGroups];
    float* to = piece.sums + first_output_;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kBlockVectors; ++n) {
        sums[m][n] = piece.add ? load_vector<Numbers>(to + m * kPanel + n * kLanes) : Numbers{};
      }
    }
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) groups[g] = piece.rows + 3 * g * piece.stride;

    const float* numbers = numbers_;
    const char* prefetch = piece.prefetch;
    const int64_t stride = piece.stride, lines = piece.lines;
    for (int64_t step = 0; step < piece.steps; step += kStepsAtOnce) {
      for (int64_t i = 0; i < lines; ++i, prefetch += 64) __builtin_prefetch(prefetch, 0, 2);
#pragma GCC unroll 16
      for (int i = 0; i < kInputs; ++i) {
        Numbers weights[kBlockVectors];
#pragma GCC unroll 8
        for (int n = 0; n < kBlockVectors; ++n) weights[n] = load_vector<Numbers>(numbers + i * kFloats + n * kLanes);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          float x;
          __builtin_memcpy(&x, groups[m / 3] + (m % 3) * stride + i * sizeof(float), sizeof(x));
#pragma GCC unroll 8
          for (int n = 0; n < kBlockVectors; ++n) sums[m][n] += x * weights[n];
        }
      }
      numbers += kInputs * kFloats;
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) groups[g] += kInputs * sizeof(float);
    }

#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kBlockVectors; ++n) {
        __builtin_memcpy(to + m * kPanel + n * kLanes, &sums[m][n], sizeof(Numbers));
      }
    }
  }

  int first_output_ = 0;
  alignas(64) float numbers_[kStripNumbers];
};

#endif

}  // namespace paged
