// write_kv: keys and values of a step's tokens into their slots.
#pragma once

#include <ATen/core/Tensor.h>

#include "heads.h"
#include "kv_write.h"
#include "parallel.h"
#include "scratch.h"

namespace paged {

// k: [num_tokens, num_kv_heads, key_dim], v likewise; their last dimensions are contiguous.
inline void write_kv(const at::Tensor& k, const at::Tensor& v, const at::Tensor& key_cache, const at::Tensor& value_cache,
              const at::Tensor& slots) {
  const KvLayout cache(key_cache, value_cache);
  const Heads keys(k), values(v);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int64_t num_tokens = k.size(0);
  for_each_item(num_tokens, [&](int64_t first) {
    thread_local Scratch scratch;
    float* key = scratch.get<float>(keys.dim + values.dim);
    float* value = key + keys.dim;
    const int64_t end = end_of_group(first, num_tokens, [&](int64_t token) { return slot[token]; });
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      for (int64_t token = first; token < end; ++token) {
        keys.load(token, head, key);
        values.load(token, head, value);
        write_slot(cache, slot[token], head, key, keys.dim, value);
      }
    }
  });
}

}  // namespace paged
