// One head's key and value of one token into their slot.
#pragma once

#include "int8_row.h"
#include "kv_layout.h"
#include "simd.h"

namespace paged {

inline void put_number(float* to, float value) { *to = value; }
inline void put_number(uint16_t* to, float value) { *to = to_bf16(value); }

// To: float for words of one number, uint16_t for words of two.
template <typename To>
void write_slot(const KvLayout& cache, int64_t slot, int64_t head, const float* key, int64_t key_dim,
                const float* value) {
  constexpr int64_t kPack = sizeof(uint32_t) / sizeof(To);
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  To* keys = reinterpret_cast<To*>(const_cast<uint32_t*>(cache.key(block, head, offset)));
  const int64_t stride = cache.block_size * kPack;
  for (int64_t d = 0; d < key_dim; ++d) put_number(keys + d / kPack * stride + d % kPack, key[d]);
  // The other half of the last word meets a query's zero, and may not be NaN.
  if (key_dim % kPack) put_number(keys + key_dim / kPack * stride + 1, 0.f);
  To* values = reinterpret_cast<To*>(const_cast<uint32_t*>(cache.value(block, head, offset))) + offset % kPack;
  for (int64_t d = 0; d < cache.value_dim; ++d) put_number(values + d * kPack, value[d]);
}

inline void write_bytes(const KvLayout& cache, int64_t slot, int64_t head, const float* key, int64_t key_dim,
                        const float* value) {
  constexpr int64_t kPack = sizeof(uint32_t);
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  uint32_t* words = const_cast<uint32_t*>(cache.key(block, head, offset));
  uint8_t* values = reinterpret_cast<uint8_t*>(const_cast<uint32_t*>(cache.value(block, head, offset)));
  const float scales[] = {
      put_bytes(key, key_dim, reinterpret_cast<uint8_t*>(words), kPack, cache.block_size * kPack, 1),
      put_bytes(value, cache.value_dim, values + offset % kPack, 1, kPack, 0),
  };
  for (int64_t i = 0; i < 2; ++i) std::memcpy(words + (cache.depth + i) * cache.block_size, &scales[i], sizeof(float));
}

inline void write_slot(const KvLayout& cache, int64_t slot, int64_t head, const float* key, int64_t key_dim,
                       const float* value) {
  if (cache.pack == 4) return write_bytes(cache, slot, head, key, key_dim, value);
  if (cache.pack == 1) return write_slot<float>(cache, slot, head, key, key_dim, value);
  write_slot<uint16_t>(cache, slot, head, key, key_dim, value);
}

}  // namespace paged
