// One head's key and value of one token into their slot.
#pragma once

#include <algorithm>
#include <cstring>

#include "int8_row.h"
#include "kv_layout.h"
#include "simd.h"

namespace paged {

// To: float for words of one number, uint16_t for words of two.
template <typename To>
void write_slot(const KvLayout& cache, int64_t slot, int64_t head, const float* key, int64_t key_dim,
                const float* value) {
  constexpr int64_t kPack = sizeof(uint32_t) / sizeof(To), kAtOnce = 64;
  To numbers[kAtOnce];
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  uint32_t* words = const_cast<uint32_t*>(cache.key(block, head, offset));
  for (int64_t d = 0; d < key_dim; d += kAtOnce) {
    const int64_t count = std::min(kAtOnce, key_dim - d);
    narrow(key + d, count, numbers);
    // The other half of the last word meets a query's zero, and may not be NaN.
    if (count % kPack) numbers[count] = 0;
    for (int64_t i = 0; i < count; i += kPack, words += cache.block_size) std::memcpy(words, numbers + i, sizeof(*words));
  }
  To* values = reinterpret_cast<To*>(const_cast<uint32_t*>(cache.value(block, head, offset))) + offset % kPack;
  for (int64_t d = 0; d < cache.value_dim; d += kAtOnce) {
    const int64_t count = std::min(kAtOnce, cache.value_dim - d);
    narrow(value + d, count, numbers);
    for (int64_t i = 0; i < count; ++i) values[(d + i) * kPack] = numbers[i];
  }
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

// Of two tokens of bf16 whose values share words: `slot` and the one behind it. keys and values: [2][dim].
inline void write_pair(const KvLayout& cache, int64_t slot, int64_t head, const float* keys, int64_t key_dim,
                       const float* values) {
  constexpr int64_t kAtOnce = 64;
  uint16_t first[kAtOnce], second[kAtOnce];
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  uint32_t* words = const_cast<uint32_t*>(cache.key(block, head, offset));
  for (int64_t d = 0; d < key_dim; d += kAtOnce) {
    const int64_t count = std::min(kAtOnce, key_dim - d);
    narrow(keys + d, count, first);
    narrow(keys + key_dim + d, count, second);
    if (count % 2) first[count] = second[count] = 0;
    for (int64_t i = 0; i < count; i += 2, words += cache.block_size) {
      std::memcpy(words, first + i, sizeof(*words));
      std::memcpy(words + 1, second + i, sizeof(*words));
    }
  }
  words = const_cast<uint32_t*>(cache.value(block, head, offset));
  for (int64_t d = 0; d < cache.value_dim; d += kAtOnce) {
    const int64_t count = std::min(kAtOnce, cache.value_dim - d);
    narrow(values + d, count, first);
    narrow(values + cache.value_dim + d, count, second);
    for (int64_t i = 0; i < count; ++i) words[d + i] = first[i] | static_cast<uint32_t>(second[i]) << 16;
  }
}

// Fetches the lines of a slot that nobody has read lately; they come while its key is computed. Always inline: GCC drops a
// call that it takes for one without effects.
__attribute__((always_inline)) inline void expect_slot(const KvLayout& cache, int64_t slot, int64_t head) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  const uint32_t *key = cache.key(block, head, offset), *value = cache.value(block, head, offset);
  for (int64_t i = 0; i < cache.key_rows; ++i) __builtin_prefetch(key + i * cache.block_size, 1);
  for (int64_t i = 0; i < cache.value_row; i += kGroup) __builtin_prefetch(value + i, 1);
}

// Tokens whose slots lie in one group have cache lines in common, so one thread writes them: of `count` tokens those from
// `first` up to the returned one; none where the token before `first` is in its group, too. `slot` is of the i-th.
template <class Slot>
int64_t end_of_group(int64_t first, int64_t count, const Slot& slot) {
  const int64_t group = slot(first) / kGroup;
  if (first > 0 && slot(first - 1) / kGroup == group) return first;
  int64_t end = first + 1;
  while (end < count && slot(end) / kGroup == group) ++end;
  return end;
}

}  // namespace paged
