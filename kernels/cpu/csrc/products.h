// The two products of attention over paged words: queries with keys, and weights with values.
//
// Both are the same small matrix product: M rows, each number (or pair) of which is broadcast, with lines of words of N
// vectors. What a word holds and how it is multiplied is the kind's affair; numbers of a word that are multiplied one after
// the other are its parts, of which one at a time is in registers, beside all sums:
//
//   Fp32     one float
//   Bf16     two bf16, widened to floats and multiplied one after the other
//   Bf16Dot  two bf16, multiplied and added by one instruction
//
// Lines that come later are fetched ahead, one for each that is used, so that memory is read at an even pace (Fetch).
#pragma once

#include <algorithm>
#include <iterator>

#include "kv_layout.h"
#include "simd.h"

namespace paged {

constexpr int kStep = 128;  // tokens of context that are attended to at once
constexpr int kGroupsPerStep = kStep / kGroup;

struct Fp32 {
  using Number = float;  // of queries and weights
  using Part = Vec;
  static constexpr int kPack = 1, kParts = 1;
  template <int kPart>
  static Vec load(const uint32_t* words) {
    return Vec::loadu(words);
  }
  template <int kPart>
  static Vec broadcast(const float* row, int64_t i) {
    return Vec(row[i]);
  }
  static Vec multiply_add(const Vec& a, const Vec& b, const Vec& sum) { return at::vec::fmadd(a, b, sum); }
  static void store(float* to, const Vec& x) { x.store(to); }
  static float number(float x) { return x; }
};

struct Bf16 {
  using Number = float;
  using Part = Vec;
  static constexpr int kPack = 2, kParts = 2;
  template <int kPart>
  static Vec load(const uint32_t* words) {
    const IntVec pair = IntVec::loadu(words);
    return at::vec::cast<float>(kPart == 0 ? pair << IntVec(16) : pair & IntVec(-65536));
  }
  template <int kPart>
  static Vec broadcast(const float* row, int64_t i) {
    return Vec(row[2 * i + kPart]);
  }
  static Vec multiply_add(const Vec& a, const Vec& b, const Vec& sum) { return at::vec::fmadd(a, b, sum); }
  static void store(float* to, const Vec& x) { x.store(to); }
  static float number(float x) { return x; }
};

#if defined(PAGED_BF16_DOT)
struct Bf16Dot {
  using Number = uint16_t;
  using Part = __m512bh;
  static constexpr int kPack = 2, kParts = 1;
  template <int kPart>
  static Part load(const uint32_t* words) {
    return (__m512bh)_mm512_loadu_si512(words);
  }
  template <int kPart>
  static Part broadcast(const uint16_t* row, int64_t i) {
    int32_t pair;
    __builtin_memcpy(&pair, row + 2 * i, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Vec multiply_add(const Part& a, const Part& b, const Vec& sum) { return _mm512_dpbf16_ps(sum, a, b); }
  static void store(uint16_t* to, const Vec& x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
  }
  static uint16_t number(float x) { return to_bf16(x); }
};
#endif

// Which lines are fetched while others are used.
//
//   far   those that the next head reads at this place, into the second cache: waiting there, a line takes none of the few
//         places that a core has for lines on their way to the first
//   near  those that are kNear lines further on: a head's keys go on with its values, and these with the next head's keys
//   next  those at this place of what is read next, of a block's parts, which are read one after the other; as far ones
enum class Fetch { none, far, near, next };

constexpr int kNear = 32;  // of each group: with eight of them a third of the first cache

// Always inline: a call has no result, and GCC drops one that it takes for a function without effects.
template <Fetch kFetch = Fetch::far>
__attribute__((always_inline)) inline void fetch(const void* line) {
  if constexpr (kFetch == Fetch::far || kFetch == Fetch::next) __builtin_prefetch(line, 0, 2);
  if constexpr (kFetch == Fetch::near) __builtin_prefetch(line, 0, 3);
}

// sums[m][first + n] += words[n] x row m's numbers with index `i`, of M rows `stride` numbers apart.
template <class Kind, int kPart = 0, int M, int N, int kSums>
__attribute__((always_inline)) inline void add_products(const typename Kind::Number* row, int64_t stride, int64_t i,
                                                        const uint32_t* const (&words)[N], Vec (&sums)[M][kSums],
                                                        int first = 0) {
  typename Kind::Part parts[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n) parts[n] = Kind::template load<kPart>(words[n]);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const auto number = Kind::template broadcast<kPart>(row + m * stride, i);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][first + n] = Kind::multiply_add(number, parts[n], sums[m][first + n]);
  }
  if constexpr (kPart + 1 < Kind::kParts) {
    const uint32_t* again[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      again[n] = words[n];
      // Not known to be the same place: words that are kept for their next part push sums out of few registers.
      if (kRegisters == 16 && N > 2) asm("" : "+r"(again[n]));
    }
    add_products<Kind, kPart + 1>(row, stride, i, again, sums, first);
  }
}

// scores[m][token] for N vectors of tokens: `keys[n]` is where a vector's first dimension lies, `stride` words before the
// next. Fetched are as many lines from `ahead[n]` on; near ones are the keys' own, and then those from `ahead[n]` on.
template <class Kind, int M, int N, Fetch kFetch>
void score_block(const typename Kind::Number* queries, int64_t query_stride, const uint32_t* const* keys,
                 const uint32_t* const* ahead, int64_t stride, int64_t depth, float* scores) {
  // A sum waits for the one before it: few of them are cut into several that do not wait for each other.
  constexpr int kMany = kRegisters == 32 ? 8 : 6;  // twice six is more than 16 registers hold
  constexpr int kChains = M * N >= kMany ? 1 : M * N >= 4 ? 2 : 4;
  Vec sums[kChains][M][N];
#pragma GCC unroll 8
  for (int chain = 0; chain < kChains; ++chain)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[chain][m][n] = Vec(0.f);
  // `line(n, d)` is what vector n fetches with dimension d.
  const auto add = [&](int64_t d, Vec(&to)[M][N], const auto& line) __attribute__((always_inline)) {
    const uint32_t* words[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      words[n] = keys[n] + d * stride;
      if (kFetch != Fetch::none && n * kLanes % kGroup == 0) fetch<kFetch>(line(n, d));
    }
    add_products<Kind>(queries, query_stride, d, words, to);
  };
  int64_t d = 0;
  const auto add_until = [&](int64_t end, const auto& line) __attribute__((always_inline)) {
    for (; d + kChains <= end; d += kChains)
#pragma GCC unroll 8
      for (int chain = 0; chain < kChains; ++chain) add(d + chain, sums[chain], line);
    for (; d < end; ++d) add(d, sums[0], line);
  };
  if constexpr (kFetch == Fetch::near) {
    const int64_t own = depth - kNear;
    add_until(own, [&](int n, int64_t i) { return keys[n] + (i + kNear) * stride; });
    add_until(depth, [&](int n, int64_t i) { return ahead[n] + (i - own) * kGroup; });
  } else {
    add_until(depth, [&](int n, int64_t i) { return ahead[n] + i * stride; });
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      Vec sum = sums[0][m][n];
#pragma GCC unroll 8
      for (int chain = 1; chain < kChains; ++chain) sum = sum + sums[chain][m][n];
      sum.store(scores + m * kStep + n * kLanes);
    }
  }
}

// Rows of values that are weighed before the next ones. Where a block of sums is narrower than they are, all their columns
// come before other rows: memory gives rows as they lie faster than two lines of each, then two more of each.
constexpr int kRowsAtOnce = kRegisters == 32 ? kStep : kGroupsPerStep;

// Rows of a step's values: where row i lies, which word of each row of weights it meets, and a row that is to be fetched.
struct ValueRows {
  int count;
  bool whole;  // all rows of all groups: the first of each, then the second of each, and so on
  int32_t weight[kStep];
  const uint32_t *values[kStep], *ahead[kStep];

  // Where there are more rows than kRowsAtOnce, the first of those to be fetched are so while weights are made: these take
  // long enough for memory to fall idle. A part of them for one row of weights.
  void fetch_first(int row, int num_rows, int64_t size) const {
    if (kRowsAtOnce == kStep) return;
    const int first = std::min(count, kRowsAtOnce);
    for (int i = first * row / num_rows; i < first * (row + 1) / num_rows; ++i)
      for (int64_t column = 0; column < size; column += kGroup) fetch(ahead[i] + column);
  }
  // What is fetched with row i.
  const uint32_t* ahead_of(int i) const {
    if (kRowsAtOnce == kStep) return ahead[i];
    return ahead[std::min(i + kRowsAtOnce, count - 1)];
  }
};

// sums += weights x one row of each group, `first` being that of the first. Line by line of all groups: each group is a page or
// two of its own, and so many that are read side by side come faster than one after the other. What is in a cache already is
// better met row by row: a weight then stays in its register for all lines of a row.
template <class Kind, Fetch kFetch, int M, int N>
__attribute__((always_inline)) inline void add_of_groups(const typename Kind::Number* weights, const ValueRows& rows,
                                                         int first, int64_t column, Vec (&sums)[M][N]) {
  constexpr int kLine = std::min(N, kGroup / kLanes);  // vectors
  const typename Kind::Number* row = weights + rows.weight[first] * Kind::kPack;
  const uint32_t *values[kGroupsPerStep], *ahead[kGroupsPerStep];
  for (int group = 0; group < kGroupsPerStep; ++group) {
    values[group] = rows.values[first + group] + column;
    ahead[group] = rows.ahead_of(first + group) + column;
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; n += kLine) {
    asm("" : "+r"(row));  // not known to be the same: weights that are kept for all lines push sums out of registers
#pragma GCC unroll 8
    for (int group = 0; group < kGroupsPerStep; ++group) {
      fetch<kFetch>(ahead[group] + n * kLanes);
      const uint32_t* words[kLine];
#pragma GCC unroll 8
      for (int i = 0; i < kLine; ++i) words[i] = values[group] + (n + i) * kLanes;
      add_products<Kind>(row, kStep, group * (kGroup / Kind::kPack), words, sums, n);
    }
  }
}

// out[m][i] = out * decay[m] + weights x values of rows [first, last), for N vectors of columns from `column` on.
template <class Kind, int M, int N, Fetch kFetch>
void weigh_block(const typename Kind::Number* weights, const ValueRows& rows, int first, int last, int64_t column,
                 const float* decay, float* out, int64_t out_stride) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = Vec::loadu(out + m * out_stride + n * kLanes) * Vec(decay[m]);
  if (kFetch != Fetch::none && rows.whole) {
    for (int i = first; i < last; i += kGroupsPerStep) add_of_groups<Kind, kFetch>(weights, rows, i, column, sums);
    first = last;
  }
  for (int i = first; i < last; ++i) {
    const uint32_t *values = rows.values[i] + column, *ahead = rows.ahead_of(i) + column;
    const uint32_t* words[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      words[n] = values + n * kLanes;
      if (n * kLanes % kGroup == 0) fetch<kFetch>(ahead + n * kLanes);
    }
    add_products<Kind>(weights, kStep, rows.weight[i], words, sums);
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
  if (kRegisters == 32) return m <= 2 && Kind::kParts == 1 ? 8 : 4;
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

// Calls `block(rows, first, how)` for blocks of rows; the first ones fetch, if any do, since lines are fetched once.
template <class Block>
void in_fetching_rows(int num_rows, Fetch how, const Block& block) {
  in_rows(num_rows, [&](auto m, int row) {
    if (how == Fetch::none || row > 0) return block(m, row, std::integral_constant<Fetch, Fetch::none>());
    if (how == Fetch::far) return block(m, row, std::integral_constant<Fetch, Fetch::far>());
    block(m, row, std::integral_constant<Fetch, Fetch::near>());
  });
}

// keys and ahead: of each vector of the step's tokens; scores [num_queries][kStep].
template <class Kind>
void score(const typename Kind::Number* queries, int64_t query_stride, int num_queries, const uint32_t* const* keys,
           const uint32_t* const* ahead, Fetch how, int64_t stride, int64_t depth, int num_vectors, float* scores) {
  in_fetching_rows(num_queries, how, [&](auto m, int row, auto fetches) {
    in_blocks<score_width<Kind>(m)>(0, num_vectors, [&](auto n, int vector) {
      score_block<Kind, m, n, fetches>(queries + row * query_stride, query_stride, keys + vector, ahead + vector, stride,
                                       depth, scores + row * kStep + vector * kLanes);
    });
  });
}

constexpr float kOnes[] = {1, 1, 1, 1, 1, 1};  // what was weighed in this step does not decay
static_assert(std::size(kOnes) >= kBlockRows);

// weights [num_queries][kStep]; out [num_queries][out_stride].
template <class Kind>
void weigh(const typename Kind::Number* weights, int num_queries, const ValueRows& rows, Fetch how,
           const float* decay, float* out, int64_t out_stride) {
  in_fetching_rows(num_queries, how, [&](auto m, int row, auto fetches) {
    for (int first = 0; first < std::max(1, rows.count); first += kRowsAtOnce) {
      const int last = std::min(first + kRowsAtOnce, rows.count);
      in_blocks<weigh_width(m)>(0, static_cast<int>(out_stride) / kLanes, [&](auto n, int vector) {
        weigh_block<Kind, m, n, fetches>(weights + row * kStep, rows, first, last, vector * kLanes,
                                         first == 0 ? decay + row : kOnes, out + row * out_stride + vector * kLanes,
                                         out_stride);
      });
    }
  });
}

}  // namespace paged
