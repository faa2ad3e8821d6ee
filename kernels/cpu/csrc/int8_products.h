// The products of attention over words of four numbers in 8 bits.
//
//   Int8     four bytes, widened to floats and multiplied one after the other
//   Int8Dot  four bytes, multiplied and added by one instruction; what they meet, queries and weights, is in 16 bits, as
//            two planes of 8, and so costs no accuracy beside that of the cache
//
// The bytes' scales are the tokens', not the products': they go into scores and weights (softmax.h).
#pragma once

#include "int8_row.h"
#include "products.h"

namespace paged {

struct Int8 {
  using Number = float;
  using Part = Vec;
  static constexpr int kPack = 4, kParts = 4;
  template <int kPart>
  static Vec load(const uint32_t* words) {
    // A byte in the lowest bits of 2^23 as a float is that number of ones more.
    const IntVec byte = (IntVec::loadu(words) >> IntVec(8 * kPart)) & IntVec(255);
    return at::vec::cast<float>(byte | IntVec(0x4b000000)) - Vec(8388608.f + kByteOrigin);
  }
  template <int kPart>
  static Vec broadcast(const float* row, int64_t i) {
    return Vec(row[4 * i + kPart]);
  }
  static Vec multiply_add(const Vec& a, const Vec& b, const Vec& sum) { return at::vec::fmadd(a, b, sum); }
  static void put_row(const float* from, int64_t count, int64_t size, float* to) {
    std::memcpy(to, from, count * sizeof(float));
    std::memset(to + count, 0, (size - count) * sizeof(float));
  }
};

#if defined(PAGED_BF16_DOT)
// A row of `size` numbers: the high bytes of its integers, the low ones (both signed), and what turns a sum of products
// with bytes of a cache into that with their numbers.
struct Int8Dot {
  using Number = int8_t;
  static constexpr int kPack = 4;
  static constexpr float kLargest = 127.f * 256.f;

  struct Tail {
    float scale;
    int32_t origin;  // what the bytes' origin adds
  };
  static constexpr int64_t row_size(int64_t size) { return 2 * size + static_cast<int64_t>(sizeof(Tail)); }
  static Tail tail(const int8_t* row, int64_t size) {
    Tail tail;
    std::memcpy(&tail, row + 2 * size, sizeof(tail));
    return tail;
  }

  // `count` numbers, and zeros up to `size`, a multiple of 4.
  static void put_row(const float* from, int64_t count, int64_t size, int8_t* to) {
    const IntegerScale scale(largest_of(from, count), kLargest);
    const bool known = scale.scale == scale.scale;
    const __m512 inverse = _mm512_set1_ps(scale.inverse);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < size; i += 16) {
      const __m512 x = known ? _mm512_maskz_loadu_ps(lanes(count - i), from + i) : _mm512_setzero_ps();
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
      put_bytes(to + i, size - i, _mm512_cvtepi32_epi8(high));
      put_bytes(to + size + i, size - i, _mm512_cvtepi32_epi8(low));
      sum = _mm512_add_epi32(sum, whole);
    }
    const Tail tail{scale.scale, kByteOrigin * _mm512_reduce_add_epi32(sum)};
    std::memcpy(to + 2 * size, &tail, sizeof(tail));
  }

 private:
  // The first `count` of 16. Masked stores of bytes are slow where the mask is not known.
  static void put_bytes(int8_t* to, int64_t count, __m128i bytes) {
    if (count >= 16) return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    _mm_mask_storeu_epi8(to, lanes(count), bytes);
  }
  static __mmask16 lanes(int64_t count) {
    return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << std::max<int64_t>(count, 0)) - 1);
  }
};

// Sums of the products of M rows with N vectors of words.
template <int M, int N>
struct Int8Sums {
  __m512i high[M][N], low[M][N];

  __attribute__((always_inline)) void clear() {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) high[m][n] = low[m][n] = _mm512_setzero_si512();
  }

  // Adds the products of four numbers, at `at` in each row.
  __attribute__((always_inline)) void add(const __m512i (&words)[N], const int8_t* at, int64_t row, int64_t size) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i high_four = four(at + m * row), low_four = four(at + m * row + size);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        high[m][n] = _mm512_dpbusd_epi32(high[m][n], words[n], high_four);
        low[m][n] = _mm512_dpbusd_epi32(low[m][n], words[n], low_four);
      }
    }
  }

  // Exact, though what is added in between may wrap: the result fits for rows of up to 512.
  __attribute__((always_inline)) __m512 value(int m, int n, const Int8Dot::Tail& tail) const {
    const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(high[m][n], 8), low[m][n]);
    const __m512i sum = _mm512_sub_epi32(both, _mm512_set1_epi32(tail.origin));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(tail.scale));
  }

 private:
  static __m512i four(const int8_t* from) {
    int32_t word;
    std::memcpy(&word, from, sizeof(word));
    return _mm512_set1_epi32(word);
  }
};

// Sums take two registers each.
constexpr int int8_width(int m) { return m == 1 ? 8 : m <= 3 ? 4 : 2; }

template <int M, int N, bool kFetching>
void score_bytes(const int8_t* queries, int64_t query_stride, const uint32_t* const* keys, const uint32_t* const* ahead,
                 int64_t stride, int64_t depth, float* scores) {
  Int8Sums<M, N> sums;
  sums.clear();
  for (int64_t d = 0; d < depth; ++d) {
    __m512i words[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      words[n] = _mm512_loadu_si512(keys[n] + d * stride);
      if (kFetching) fetch(ahead[n] + d * stride);
    }
    sums.add(words, queries + d * Int8Dot::kPack, query_stride, depth * Int8Dot::kPack);
  }
  for (int64_t d = depth; kFetching && d < depth + 2; ++d)  // scales
    for (int n = 0; n < N; ++n) fetch(ahead[n] + d * stride);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Int8Dot::Tail tail = Int8Dot::tail(queries + m * query_stride, depth * Int8Dot::kPack);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) _mm512_storeu_ps(scores + m * kStep + n * kLanes, sums.value(m, n, tail));
  }
}

template <int M, int N, bool kFetching>
void weigh_bytes(const int8_t* weights, const ValueRows& rows, int64_t column, const float* decay, float* out,
                 int64_t out_stride) {
  constexpr int64_t kRow = Int8Dot::row_size(kStep);
  Int8Sums<M, N> sums;
  sums.clear();
  for (int i = 0; i < rows.count; ++i) {
    const uint32_t *values = rows.values[i] + column, *ahead = rows.ahead[i] + column;
    __m512i words[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      words[n] = _mm512_loadu_si512(values + n * kLanes);
      if (kFetching) fetch(ahead + n * kLanes);
    }
    sums.add(words, weights + rows.weight[i] * Int8Dot::kPack, kRow, kStep);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const Int8Dot::Tail tail = Int8Dot::tail(weights + m * kRow, kStep);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* to = out + m * out_stride + n * kLanes;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), _mm512_set1_ps(decay[m]), sums.value(m, n, tail)));
    }
  }
}

template <>
inline void score<Int8Dot>(const int8_t* queries, int64_t query_stride, int num_queries, const uint32_t* const* keys,
                           const uint32_t* const* ahead, Fetch how, int64_t stride, int64_t depth, int num_vectors,
                           float* scores) {
  in_fetching_rows(num_queries, how, [&](auto m, int row, auto fetches) {
    in_blocks<std::min(4, int8_width(m))>(0, num_vectors, [&](auto n, int vector) {
      score_bytes<m, n, fetches != Fetch::none>(queries + row * query_stride, query_stride, keys + vector, ahead + vector,
                                                stride, depth, scores + row * kStep + vector * kLanes);
    });
  });
}

template <>
inline void weigh<Int8Dot>(const int8_t* weights, int num_queries, const ValueRows& rows, Fetch how,
                           const float* decay, float* out, int64_t out_stride) {
  in_fetching_rows(num_queries, how, [&](auto m, int row, auto fetches) {
    in_blocks<int8_width(m)>(0, static_cast<int>(out_stride) / kLanes, [&](auto n, int vector) {
      weigh_bytes<m, n, fetches != Fetch::none>(weights + row * Int8Dot::row_size(kStep), rows, vector * kLanes,
                                                decay + row, out + row * out_stride + vector * kLanes, out_stride);
    });
  });
}
#endif

// How rows of queries and of weights lie: for bf16 and fp32 as numbers side by side.
template <class Kind>
constexpr int64_t row_size(int64_t size) {
#if defined(PAGED_BF16_DOT)
  if constexpr (std::is_same_v<Kind, Int8Dot>) return Int8Dot::row_size(size);
#endif
  return size;
}

}  // namespace paged
