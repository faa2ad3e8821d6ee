// How the caches of one layer lie in memory, seen as words of 32 bits: one fp32 number, two bf16 or
// four bytes.
//
//   keys    [block][kv head][depth][token]    a word holds one dimension of a token's key, or two or four that follow each other
//   values  [block][kv head][token][column]   a word holds one column of one token's value, or of two or four tokens'
//
// Of bytes (int8_row.h), two more words of each token come behind its key: the scales of its key and of its value, fp32.
//
// So a vector of words is 16 (8, 4) tokens of a key's dimension, or columns of a value: products need no gather, and are
// the pairs that dot products of bf16 and tiles take. Blocks are multiples of 16 tokens; a value's columns are padded to
// a multiple of 16, and a pad's content never matters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace paged {

constexpr int kGroup = 16;  // tokens that lie side by side in every layout: a block has a whole number of groups

struct KvLayout {
  uint32_t *keys, *values;
  int64_t pack;  // numbers in a word: 1, 2 or 4
  int64_t num_blocks, num_kv_heads, block_size, value_dim;
  int64_t depth, key_rows;  // of keys in words, without and with the scales of bytes
  int64_t key_block, key_head, value_block, value_head, value_row;  // strides, in words

  KvLayout(const at::Tensor& key_cache, const at::Tensor& value_cache)
      : keys(static_cast<uint32_t*>(key_cache.mutable_data_ptr())),
        values(static_cast<uint32_t*>(value_cache.mutable_data_ptr())),
        pack(key_cache.size(4)),
        num_blocks(key_cache.size(0)),
        num_kv_heads(key_cache.size(1)),
        block_size(key_cache.size(3)),
        value_dim(value_cache.size(3)),
        depth(key_cache.size(2) - (pack == 4 ? 2 : 0)),
        key_rows(key_cache.size(2)),
        key_block(key_cache.stride(0) / pack),
        key_head(key_cache.stride(1) / pack),
        value_block(value_cache.stride(0) / pack),
        value_head(value_cache.stride(1) / pack),
        value_row(value_cache.stride(2) / pack) {
    TORCH_CHECK(key_cache.stride(2) == block_size * pack, "key_cache: a head's block must be contiguous");
    TORCH_CHECK(value_cache.size(2) * pack == block_size, "value_cache: blocks are not of the keys' size");
  }

  const uint32_t* key(int64_t block, int64_t head, int64_t offset) const {
    return keys + block * key_block + head * key_head + offset;
  }
  const uint32_t* value(int64_t block, int64_t head, int64_t offset) const {
    return values + block * value_block + head * value_head + offset / pack * value_row;
  }
};

}  // namespace paged
