// The two products of attention on tiles, where there are enough query rows to fill them.
//
// A tile of queries holds 16 rows of 32 dimensions, one of keys 16 words of depth for 16 tokens: as the cache has them.
// A tile of values is 16 rows of words, that is 32 tokens; where blocks are smaller, or some of the tokens are not seen, a
// copy is put together first.
#pragma once

#include "products.h"
#include "scratch.h"

#if defined(PAGED_TILES)
#include "tiles.h"
#endif

namespace paged {

// What a thread multiplies with during a call: `score` and `weigh` of products.h for most kinds.
template <class Kind>
class Products {
 public:
  static int padded(int num_rows) { return num_rows; }

  void score(const typename Kind::Number* queries, int64_t query_stride, int num_queries, const uint32_t* const* keys,
             const uint32_t* const* ahead, Fetch how, int64_t stride, int64_t depth, int num_vectors, float* scores) {
    paged::score<Kind>(queries, query_stride, num_queries, keys, ahead, how, stride, depth, num_vectors, scores);
  }
  // out_stride: also that of rows of values
  void weigh(typename Kind::Number* weights, int num_queries, int, const ValueRows& rows, Fetch how,
             const float* decay, float* out, int64_t out_stride) {
    paged::weigh<Kind>(weights, num_queries, rows, how, decay, out, out_stride);
  }
};

#if defined(PAGED_TILES)

struct Bf16Tiles : Bf16Dot {};

template <>
class Products<Bf16Tiles> {
  using Number = uint16_t;
  static constexpr int kRows = 16, kTokens = 32;  // of a tile; tokens of one of values
  static constexpr int kLeastRows = 8;            // of queries for which tiles are worth it

 public:
  // Rows of queries, scores, weights and results that memory must be there for; what is in those behind does not matter.
  static int padded(int num_rows) { return (num_rows + kRows - 1) / kRows * kRows; }

  void score(const Number* queries, int64_t query_stride, int num_queries, const uint32_t* const* keys,
             const uint32_t* const* ahead, Fetch how, int64_t stride, int64_t depth, int num_vectors, float* scores) {
    if (num_queries < kLeastRows || depth % kRows)
      return paged::score<Bf16Dot>(queries, query_stride, num_queries, keys, ahead, how, stride, depth, num_vectors,
                                   scores);
    shape();
    in_pairs(padded(num_queries) / kRows, num_vectors, [&](auto m, auto n, int row, int vector) {
      score_tiles<m, n>(queries + row * kRows * query_stride, query_stride, keys + vector, stride, depth,
                        scores + row * kRows * kStep + vector * kRows);
    });
  }

  void weigh(Number* weights, int num_queries, int num_vectors, const ValueRows& rows, Fetch how,
             const float* decay, float* out, int64_t out_stride) {
    if (num_queries < kLeastRows)
      return paged::weigh<Bf16Dot>(weights, num_queries, rows, how, decay, out, out_stride);
    shape();
    const uint32_t* values[kStep / kTokens];
    find_values(rows, out_stride, values);
    for (int row = 0; row < num_queries; ++row) {
      // Copied values of tokens that nobody sees are zero; their weights have to be finite.
      std::memset(weights + row * kStep + num_vectors * kRows, 0, (kStep - num_vectors * kRows) * sizeof(Number));
      if (decay[row] == 1.f) continue;
      for (int64_t i = 0; i < out_stride; ++i) out[row * out_stride + i] *= decay[row];
    }
    in_pairs(padded(num_queries) / kRows, static_cast<int>(out_stride / kRows), [&](auto m, auto n, int row, int vector) {
      weigh_tiles<m, n>(weights + row * kRows * kStep, values, vector * kRows,
                        out + row * kRows * out_stride + vector * kRows, out_stride);
    });
  }

 private:
  // Tiles 0 to 3 are sums, 4 and 5 of queries or weights, 6 and 7 of keys or values.
  void shape() { tiles_.shape({{kRows, kRows, kRows, kRows, kRows, kRows, kRows, kRows}}); }

  // Calls `block` for every tile of sums, two by two where there are as many.
  template <class Block>
  static void in_pairs(int rows, int columns, const Block& block) {
    using One = std::integral_constant<int, 1>;
    using Two = std::integral_constant<int, 2>;
    for (int row = 0; row < rows; row += 2) {
      for (int column = 0; column < columns; column += 2) {
        const bool narrow = column + 1 == columns;
        if (row + 1 < rows) {
          narrow ? block(Two(), One(), row, column) : block(Two(), Two(), row, column);
        } else {
          narrow ? block(One(), One(), row, column) : block(One(), Two(), row, column);
        }
      }
    }
  }

  template <int M, int N>
  static void multiply() {
    tiles::dot_bf16<0, 4, 6>();
    if constexpr (N == 2) tiles::dot_bf16<1, 4, 7>();
    if constexpr (M == 2) tiles::dot_bf16<2, 5, 6>();
    if constexpr (M == 2 && N == 2) tiles::dot_bf16<3, 5, 7>();
  }

  template <int M, int N>
  static void score_tiles(const Number* queries, int64_t query_stride, const uint32_t* const* keys, int64_t stride,
                          int64_t depth, float* scores) {
    tiles::zero<0>();
    if constexpr (N == 2) tiles::zero<1>();
    if constexpr (M == 2) tiles::zero<2>();
    if constexpr (M == 2 && N == 2) tiles::zero<3>();
    const int64_t query_bytes = query_stride * static_cast<int64_t>(sizeof(Number)), key_bytes = stride * 4;
    for (int64_t d = 0; d < depth; d += kRows) {
      tiles::load<4>(queries + 2 * d, query_bytes);
      if constexpr (M == 2) tiles::load<5>(queries + kRows * query_stride + 2 * d, query_bytes);
      tiles::load<6>(keys[0] + d * stride, key_bytes);
      if constexpr (N == 2) tiles::load<7>(keys[1] + d * stride, key_bytes);
      multiply<M, N>();
    }
    store_sums<M, N>(scores, kStep);
  }

  template <int M, int N>
  static void weigh_tiles(const Number* weights, const uint32_t* const* values, int64_t column, float* out,
                          int64_t out_stride) {
    const int64_t out_bytes = out_stride * 4, weight_bytes = kStep * static_cast<int64_t>(sizeof(Number));
    tiles::load<0>(out, out_bytes);
    if constexpr (N == 2) tiles::load<1>(out + kRows, out_bytes);
    if constexpr (M == 2) tiles::load<2>(out + kRows * out_stride, out_bytes);
    if constexpr (M == 2 && N == 2) tiles::load<3>(out + kRows * out_stride + kRows, out_bytes);
    for (int half = 0; half < kStep / kTokens; ++half) {
      if (values[half] == nullptr) continue;
      tiles::load<4>(weights + half * kTokens, weight_bytes);
      if constexpr (M == 2) tiles::load<5>(weights + kRows * kStep + half * kTokens, weight_bytes);
      tiles::load<6>(values[half] + column, out_bytes);
      if constexpr (N == 2) tiles::load<7>(values[half] + column + kRows, out_bytes);
      multiply<M, N>();
    }
    store_sums<M, N>(out, out_stride);
  }

  template <int M, int N>
  static void store_sums(float* to, int64_t stride) {
    tiles::store<0>(to, stride * 4);
    if constexpr (N == 2) tiles::store<1>(to + kRows, stride * 4);
    if constexpr (M == 2) tiles::store<2>(to + kRows * stride, stride * 4);
    if constexpr (M == 2 && N == 2) tiles::store<3>(to + kRows * stride + kRows, stride * 4);
  }

  // Of each half of the step where its 16 rows of values lie: in place if they follow each other, else as a copy in which
  // rows that nobody sees are zero; null if nobody sees any.
  void find_values(const ValueRows& rows, int64_t stride, const uint32_t** values) {
    static thread_local Scratch kept;
    const uint32_t* of_step[kStep / 2] = {};
    for (int i = 0; i < rows.count; ++i) of_step[rows.weight[i]] = rows.values[i];
    uint32_t* copy = kept.get<uint32_t>(kStep / 2 * stride);
    for (int half = 0; half < kStep / kTokens; ++half, copy += kRows * stride) {
      const uint32_t* const* of_half = of_step + half * kRows;
      int num_seen = 0;
      bool in_place = true;
      for (int row = 0; row < kRows; ++row) {
        num_seen += of_half[row] != nullptr;
        in_place = in_place && of_half[row] != nullptr && of_half[row] == of_half[0] + row * stride;
      }
      values[half] = in_place ? of_half[0] : num_seen > 0 ? copy : nullptr;
      if (values[half] != copy) continue;
      for (int row = 0; row < kRows; ++row) {
        if (of_half[row] != nullptr) {
          std::memcpy(copy + row * stride, of_half[row], stride * sizeof(uint32_t));
        } else {
          std::memset(copy + row * stride, 0, stride * sizeof(uint32_t));
        }
      }
    }
  }

  Tiles tiles_;
};

#endif

}  // namespace paged
