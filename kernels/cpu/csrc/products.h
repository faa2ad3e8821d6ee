// The two products of attention over paged words: queries with keys, and weights with values.
//
// Both are the same small matrix product: M rows, each number (or pair) of which is broadcast, with lines of words of N
// vectors. What a word holds and how it is multiplied is the kind's affair:
//
//   Fp32     one float
//   Bf16     two bf16, widened to floats and multiplied one after the other
//   Bf16Dot  two bf16, multiplied and added by one instruction
//
// Lines that come later are fetched ahead, one for each that is used, so that memory is read at an even pace.
#pragma once

#include "simd.h"

namespace paged {

constexpr int kStep = 128;  // tokens of context that are attended to at once
constexpr int kGroupsPerStep = kStep / 16;

struct Fp32 {
  using Number = float;  // of queries and weights
  static constexpr int kPack = 1;
  struct Line {
    Vec x;
  };
  static Line load(const uint32_t* words) { return {Vec::loadu(words)}; }
  static Line broadcast(const float* row, int64_t i) { return {Vec(row[i])}; }
  static Vec multiply_add(const Line& a, const Line& b, const Vec& sum) { return at::vec::fmadd(a.x, b.x, sum); }
  static void store(float* to, const Vec& x) { x.store(to); }
  static float number(float x) { return x; }
};

struct Bf16 {
  using Number = float;
  static constexpr int kPack = 2;
  struct Line {
    Vec first, second;
  };
  static Line load(const uint32_t* words) {
    const IntVec pair = IntVec::loadu(words);
    return {at::vec::cast<float>(pair << IntVec(16)), at::vec::cast<float>(pair & IntVec(-65536))};
  }
  static Line broadcast(const float* row, int64_t i) { return {Vec(row[2 * i]), Vec(row[2 * i + 1])}; }
  static Vec multiply_add(const Line& a, const Line& b, const Vec& sum) {
    return at::vec::fmadd(a.second, b.second, at::vec::fmadd(a.first, b.first, sum));
  }
  static void store(float* to, const Vec& x) { x.store(to); }
  static float number(float x) { return x; }
};

#if defined(PAGED_BF16_DOT)
struct Bf16Dot {
  using Number = uint16_t;
  static constexpr int kPack = 2;
  using Line = __m512bh;
  static Line load(const uint32_t* words) { return (__m512bh)_mm512_loadu_si512(words); }
  static Line broadcast(const uint16_t* row, int64_t i) {
    int32_t pair;
    __builtin_memcpy(&pair, row + 2 * i, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Vec multiply_add(const Line& a, const Line& b, const Vec& sum) { return _mm512_dpbf16_ps(sum, a, b); }
  static void store(uint16_t* to, const Vec& x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
  }
  static uint16_t number(float x) { return to_bf16(x); }
};
#endif

// Into the second cache: waiting there, a line takes none of the few places that a core has for lines on their way to the
// first. Always inline: a call has no result, and GCC drops one that it takes for a function without effects.
__attribute__((always_inline)) inline void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// scores[m][token] for N vectors of tokens: `keys[n]` is where a vector's first dimension lies, `stride` words before the
// next. Of the lines that `ahead[n]` leads to as many are fetched, if any.
template <class Kind, int M, int N, bool kFetching>
void score_block(const typename Kind::Number* queries, int64_t query_stride, const uint32_t* const* keys,
                 const uint32_t* const* ahead, int64_t stride, int64_t depth, float* scores) {
  // A sum waits for the one before it: few of them are cut into several that do not wait for each other.
  constexpr int kParts = M * N >= 8 ? 1 : M * N >= 4 ? 2 : 4;
  Vec sums[kParts][M][N];
#pragma GCC unroll 8
  for (int part = 0; part < kParts; ++part)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[part][m][n] = Vec(0.f);
  const auto add = [&](int64_t d, Vec(&to)[M][N]) __attribute__((always_inline)) {
    typename Kind::Line lines[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      lines[n] = Kind::load(keys[n] + d * stride);
      if (kFetching && n * kLanes % kGroup == 0) fetch(ahead[n] + d * stride);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto number = Kind::broadcast(queries + m * query_stride, d);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) to[m][n] = Kind::multiply_add(number, lines[n], to[m][n]);
    }
  };
  int64_t d = 0;
  for (; d + kParts <= depth; d += kParts)
#pragma GCC unroll 8
    for (int part = 0; part < kParts; ++part) add(d + part, sums[part]);
  for (; d < depth; ++d) add(d, sums[0]);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      Vec sum = sums[0][m][n];
#pragma GCC unroll 8
      for (int part = 1; part < kParts; ++part) sum = sum + sums[part][m][n];
      sum.store(scores + m * kStep + n * kLanes);
    }
  }
}

// Rows of a step's values: where row i lies, which word of each row of weights it meets, and the row of which as much may be
// fetched as is used of it.
struct ValueRows {
  int count;
  int32_t weight[kStep];
  const uint32_t *values[kStep], *ahead[kStep];
};

// out[m][i] = out * decay[m] + weights x values, for N vectors of columns from `column` of the values on.
template <class Kind, int M, int N, bool kFetching>
void weigh_block(const typename Kind::Number* weights, const ValueRows& rows, int64_t column, const float* decay,
                 float* out, int64_t out_stride) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = Vec::loadu(out + m * out_stride + n * kLanes) * Vec(decay[m]);
  for (int i = 0; i < rows.count; ++i) {
    const uint32_t *values = rows.values[i] + column, *ahead = rows.ahead[i] + column;
    typename Kind::Line lines[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      lines[n] = Kind::load(values + n * kLanes);
      if (kFetching && n * kLanes % kGroup == 0) fetch(ahead + n * kLanes);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto number = Kind::broadcast(weights + m * kStep, rows.weight[i]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = Kind::multiply_add(number, lines[n], sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n].store(out + m * out_stride + n * kLanes);
}

// The most rows of a block, and how many vectors wide a block of so many rows may be, that fit the registers.
constexpr int kBlockRows = kRegisters == 32 ? 6 : 4;
template <class Kind>
constexpr int score_width(int m) {
  if (kRegisters == 32) return m <= 2 && sizeof(typename Kind::Line) == sizeof(Vec) ? 8 : 4;
  return m <= 2 ? 4 : 2;
}
constexpr int weigh_width(int m) { return kRegisters == 32 ? (m <= 3 ? 8 : 4) : (m <= 2 ? 4 : 2); }

// Calls `block(width, index)` for vectors [first, last), the widest blocks first; width as std::integral_constant.
template <int Width, class Block>
void in_blocks(int first, int last, const Block& block) {
  for (; first + Width <= last; first += Width) block(std::integral_constant<int, Width>(), first);
  if constexpr (Width > 1) {
    if (first < last) in_blocks<Width / 2>(first, last, block);
  }
}

// Calls `block(rows, first)` for `num_rows` rows in blocks of about the same size; rows as std::integral_constant.
template <int M = kBlockRows, class Block>
void with_rows(int rows, const Block& block) {
  if constexpr (M > 1) {
    if (rows < M) return with_rows<M - 1>(rows, block);
  }
  block(std::integral_constant<int, M>());
}

template <class Block>
void in_rows(int num_rows, const Block& block) {
  const int num_blocks = (num_rows + kBlockRows - 1) / kBlockRows;
  for (int i = 0, first = 0; i < num_blocks; ++i) {
    const int rows = (num_rows - first + num_blocks - i - 1) / (num_blocks - i);
    with_rows(rows, [&](auto m) { block(m, first); });
    first += rows;
  }
}

// Calls `block(rows, first, fetching)` for blocks of rows; the first ones fetch, if any do, since lines are fetched once.
template <class Block>
void in_fetching_rows(int num_rows, bool fetching, const Block& block) {
  in_rows(num_rows, [&](auto m, int row) {
    fetching && row == 0 ? block(m, row, std::true_type()) : block(m, row, std::false_type());
  });
}

// keys and ahead: of each vector of the step's tokens; scores [num_queries][kStep].
template <class Kind>
void score(const typename Kind::Number* queries, int64_t query_stride, int num_queries, const uint32_t* const* keys,
           const uint32_t* const* ahead, bool fetching, int64_t stride, int64_t depth, int num_vectors, float* scores) {
  in_fetching_rows(num_queries, fetching, [&](auto m, int row, auto fetches) {
    in_blocks<score_width<Kind>(m)>(0, num_vectors, [&](auto n, int vector) {
      score_block<Kind, m, n, fetches>(queries + row * query_stride, query_stride, keys + vector, ahead + vector, stride,
                                       depth, scores + row * kStep + vector * kLanes);
    });
  });
}

// weights [num_queries][kStep]; out [num_queries][out_stride].
template <class Kind>
void weigh(const typename Kind::Number* weights, int num_queries, const ValueRows& rows, bool fetching,
           const float* decay, float* out, int64_t out_stride) {
  in_fetching_rows(num_queries, fetching, [&](auto m, int row, auto fetches) {
    in_blocks<weigh_width(m)>(0, static_cast<int>(out_stride) / kLanes, [&](auto n, int vector) {
      weigh_block<Kind, m, n, fetches>(weights + row * kStep, rows, vector * kLanes, decay + row,
                                       out + row * out_stride + vector * kLanes, out_stride);
    });
  });
}

}  // namespace paged
