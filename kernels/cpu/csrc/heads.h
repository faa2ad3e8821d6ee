// Heads of a step's tokens as floats: as they are given, or as a projection's output becomes them by norm and rotation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstring>

#include "simd.h"

namespace paged {

inline void widen(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof(float)); }
inline void widen(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from_bf16(from[i]);
}
inline void widen(const c10::Half* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

// Always inline, as `fetch` of products.h.
__attribute__((always_inline)) inline void expect_bytes(const void* first, int64_t count) {
  for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(static_cast<const char*>(first) + i);
}

// Heads in memory: `[num_tokens, num_heads, dim]`, of fp32, bf16 or fp16, the last dimension's elements side by side.
struct Heads {
  const char* data;
  c10::ScalarType dtype;
  int64_t token_stride, head_stride, dim;  // strides in elements

  explicit Heads(const at::Tensor& tensor)
      : data(static_cast<const char*>(tensor.const_data_ptr())),
        dtype(tensor.scalar_type()),
        token_stride(tensor.stride(0)),
        head_stride(tensor.stride(1)),
        dim(tensor.size(2)) {}

  // Calls `use(pointer to the head's first element)`; bf16 as uint16_t.
  template <class Use>
  void with(int64_t token, int64_t head, const Use& use) const {
    const int64_t offset = token * token_stride + head * head_stride;
    if (dtype == c10::kFloat) return use(reinterpret_cast<const float*>(data) + offset);
    if (dtype == c10::kBFloat16) return use(reinterpret_cast<const uint16_t*>(data) + offset);
    use(reinterpret_cast<const c10::Half*>(data) + offset);
  }

  // Fetches a head that another thread wrote last: it lies far from the head before it, and nothing else foresees it.
  __attribute__((always_inline)) void expect(int64_t token, int64_t head) const {
    const auto size = static_cast<int64_t>(c10::elementSize(dtype));
    expect_bytes(data + (token * token_stride + head * head_stride) * size, dim * size);
  }

  void load(int64_t token, int64_t head, float* to) const {
    with(token, head, [&](const auto* from) { widen(from, dim, to); });
  }
};

// Rotary embedding: pairs of a head's first `dim` numbers are turned by their angle.
struct Rotation {
  const float *cos, *sin;  // [num_tokens, dim]; null: nothing is turned
  int64_t dim;
  bool interleaved;  // pairs are neighbours; else half of `dim` apart

  void apply(int64_t token, float* head) const {
    if (cos == nullptr) return;
    const float *c = cos + token * dim, *s = sin + token * dim;
    if (interleaved) {
      for (int64_t i = 0; i < dim; i += 2) {
        const float a = head[i], b = head[i + 1];
        head[i] = a * c[i] - b * s[i];
        head[i + 1] = b * c[i + 1] + a * s[i + 1];
      }
      return;
    }
    const int64_t half = dim / 2;
    float* other = head + half;
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) {
      const float a = head[i], b = other[i];
      head[i] = a * c[i] - b * s[i];
      other[i] = b * c[half + i] + a * s[half + i];
    }
  }
};

inline Vec load_vector(const float* from) { return Vec::loadu(from); }
template <class From>
Vec load_vector(const From* from) {
  float numbers[kLanes];
  widen(from, kLanes, numbers);
  return Vec::loadu(numbers);
}

// `head` over its root mean square, times `weight`.
inline void rms_norm(float* head, int64_t dim, const float* weight, float epsilon) {
  Vec squares(0.f);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const Vec x = Vec::loadu(head + i);
    squares = at::vec::fmadd(x, x, squares);
  }
  float sum = sum_of(squares);
  for (; i < dim; ++i) sum += head[i] * head[i];
  const float factor = 1.f / std::sqrt(sum / static_cast<float>(dim) + epsilon);
  for (i = 0; i < dim; ++i) head[i] = head[i] * factor * weight[i];
}

// The output of a layer's merged projection, as heads of queries, then of keys, then of values.
struct Projected {
  Heads heads;
  int64_t num_heads, num_kv_heads;
  const float *query_norm, *key_norm;  // weights [dim]; null: no norm
  float epsilon;
  Rotation rotation;

  void query(int64_t token, int64_t head, float* to) const { make(token, head, query_norm, to); }
  void key(int64_t token, int64_t head, float* to) const { make(token, num_heads + head, key_norm, to); }
  void value(int64_t token, int64_t head, float* to) const { heads.load(token, num_heads + num_kv_heads + head, to); }

  void expect_query(int64_t token, int64_t head) const { heads.expect(token, head); }
  void expect_key_and_value(int64_t token, int64_t head) const {
    heads.expect(token, num_heads + head);
    heads.expect(token, num_heads + num_kv_heads + head);
  }

 private:
  void make(int64_t token, int64_t head, const float* norm, float* to) const {
    heads.with(token, head, [&](const auto* from) {
      const bool halves = rotation.cos == nullptr || (!rotation.interleaved && rotation.dim == heads.dim);
      if (halves && heads.dim == 4 * kLanes) return make_in_registers<4>(token, from, norm, to);
      if (halves && heads.dim == 8 * kLanes) return make_in_registers<8>(token, from, norm, to);
      widen(from, heads.dim, to);
      if (norm != nullptr) rms_norm(to, heads.dim, norm, epsilon);
      rotation.apply(token, to);
    });
  }

  // Of heads of V vectors, each half of which is one of a pair: what is above takes them from memory and back three times.
  template <int V, class From>
  void make_in_registers(int64_t token, const From* from, const float* norm, float* to) const {
    Vec x[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) x[i] = load_vector(from + i * kLanes);
    if (norm != nullptr) {
      Vec even(0.f), odd(0.f);
#pragma GCC unroll 4
      for (int i = 0; i < V; i += 2) even = at::vec::fmadd(x[i], x[i], even), odd = at::vec::fmadd(x[i + 1], x[i + 1], odd);
      const Vec factor(1.f / std::sqrt(sum_of(even + odd) / static_cast<float>(heads.dim) + epsilon));
#pragma GCC unroll 8
      for (int i = 0; i < V; ++i) x[i] = x[i] * factor * Vec::loadu(norm + i * kLanes);
    }
    if (rotation.cos != nullptr) {
      const float *cos = rotation.cos + token * heads.dim, *sin = rotation.sin + token * heads.dim;
#pragma GCC unroll 4
      for (int i = 0; i < V / 2; ++i) {
        const int low = i * kLanes, high = (i + V / 2) * kLanes;
        const Vec a = x[i], b = x[i + V / 2];
        x[i] = a * Vec::loadu(cos + low) - b * Vec::loadu(sin + low);
        x[i + V / 2] = b * Vec::loadu(cos + high) + a * Vec::loadu(sin + high);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < V; ++i) x[i].store(to + i * kLanes);
  }
};

}  // namespace paged
