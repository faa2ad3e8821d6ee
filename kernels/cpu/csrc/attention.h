// Attention over paged caches, and what is done to a projection before it.
//
// The operations take tensors as kernels/cpu/native.py checks and prepares them: last dimensions contiguous, sinks, norm
// weights, cos and sin in fp32. `window` and `soft_cap` are 0 for none. `segments`: nothing, or first, end, row_start,
// rows and own_start of SharedBlocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace paged {

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& block_tables, const at::Tensor& query_start,
                           const at::Tensor& context_lens, double scale, int64_t window, double soft_cap,
                           const std::optional<at::Tensor>& sinks, at::TensorList segments);

// The same for rows that lie in one piece, row r from block r * blocks_per_row on, without a look at a table: what shows
// the cost of a table. Nothing that is served calls it.
at::Tensor contiguous_attention(const at::Tensor& q, const at::Tensor& key_cache, const at::Tensor& value_cache,
                                int64_t blocks_per_row, const at::Tensor& query_start, const at::Tensor& context_lens,
                                double scale);

// qkv: [num_tokens, num_heads + 2 num_kv_heads, head_dim]. Norm weights [head_dim], cos and sin [num_tokens, rotated].
at::Tensor attend_projected(const at::Tensor& qkv, const std::optional<at::Tensor>& query_norm,
                            const std::optional<at::Tensor>& key_norm, double epsilon,
                            const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin, bool interleaved,
                            const at::Tensor& slots, const at::Tensor& key_cache, const at::Tensor& value_cache,
                            const at::Tensor& block_tables, const at::Tensor& query_start,
                            const at::Tensor& context_lens, double scale, int64_t window, double soft_cap,
                            const std::optional<at::Tensor>& sinks, at::TensorList segments);

}  // namespace paged
