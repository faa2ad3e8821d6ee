// write_kv: keys and values of a step's tokens into their slots.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "kv_layout.h"
#include "parallel.h"
#include "simd.h"

namespace paged {
namespace {

inline void put(float* to, float value) { *to = value; }
inline void put(uint16_t* to, float value) { *to = to_bf16(value); }

// One head of one token: [dim] numbers to every `stride`th word, `pack` of them in each.
template <typename To, typename From>
void write_key(const From* from, int64_t dim, To* to, int64_t stride, int64_t pack) {
  for (int64_t d = 0; d < dim; ++d) put(to + d / pack * stride * pack + d % pack, static_cast<float>(from[d]));
  if (dim % pack) put(to + dim / pack * stride * pack + 1, 0.f);  // the word's other half meets a query's zero
}

template <typename To, typename From>
void write_value(const From* from, int64_t dim, To* to, int64_t pack) {
  for (int64_t d = 0; d < dim; ++d) put(to + d * pack, static_cast<float>(from[d]));
}

template <typename To, typename From>
void write_all(const at::Tensor& k, const at::Tensor& v, const KvLayout& cache, const at::Tensor& slots) {
  const From *keys = static_cast<const From*>(k.const_data_ptr()), *values = static_cast<const From*>(v.const_data_ptr());
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t num_tokens = k.size(0), num_heads = cache.num_kv_heads;
  constexpr int64_t kTokens = 8;  // of one head at a time
  const int64_t num_pieces = (num_tokens + kTokens - 1) / kTokens;
  for_each_item(num_pieces * num_heads, [&](int64_t item) {
    const int64_t head = item % num_heads, first = item / num_heads * kTokens;
    for (int64_t token = first; token < std::min(first + kTokens, num_tokens); ++token) {
      const int64_t block = slot[token] / cache.block_size, offset = slot[token] % cache.block_size;
      auto* key = reinterpret_cast<To*>(const_cast<uint32_t*>(cache.key(block, head, offset)));
      auto* value = reinterpret_cast<To*>(const_cast<uint32_t*>(cache.value(block, head, offset)));
      write_key(keys + token * k.stride(0) + head * k.stride(1), k.size(2), key, cache.block_size, cache.pack);
      write_value(values + token * v.stride(0) + head * v.stride(1), v.size(2), value + offset % cache.pack, cache.pack);
    }
  });
}

template <typename To>
void write_as(const at::Tensor& k, const at::Tensor& v, const KvLayout& cache, const at::Tensor& slots) {
  if (k.scalar_type() == at::kFloat) return write_all<To, float>(k, v, cache, slots);
  if (k.scalar_type() == at::kBFloat16) return write_all<To, c10::BFloat16>(k, v, cache, slots);
  write_all<To, c10::Half>(k, v, cache, slots);
}

// k and v have the same type, and their last dimensions are contiguous.
void write_kv(const at::Tensor& k, const at::Tensor& v, const at::Tensor& key_cache, const at::Tensor& value_cache,
              const at::Tensor& slots) {
  const KvLayout cache(key_cache, value_cache);
  if (cache.pack == 1) {
    write_as<float>(k, v, cache, slots);
  } else {
    write_as<uint16_t>(k, v, cache, slots);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(PAGED_LIBRARY, m) {
  m.def("write_kv(Tensor k, Tensor v, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()", &write_kv);
}

}  // namespace paged
