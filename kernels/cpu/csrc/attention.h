// Attention over paged caches, and what is done to a projection before it.
//
// The operations take tensors as kernels/cpu/native.py checks and prepares them: last dimensions contiguous, sinks, norm
// weights, cos and sin in fp32. `window` and `soft_cap` are 0 for none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace paged {

// How the work of calls over these rows is cut up: a Plan, in a tensor of bytes that owns it. It looks into the tables and
// keeps them, so their numbers may not change while it is used. `segments`: nothing, or first, end, row_start, rows and
// own_start of SharedBlocks.
//
// Row r has its blocks in block_tables from r * table_stride on. Without tables it lies in one piece, from block
// r * table_stride on, and a call looks at no table: what shows the cost of one. Nothing that is served does so.
at::Tensor plan_attention(const std::optional<at::Tensor>& block_tables, int64_t table_stride,
                          const at::Tensor& query_start, const at::Tensor& context_lens, at::TensorList segments,
                          int64_t num_tokens, int64_t num_heads, const at::Tensor& key_cache,
                          const at::Tensor& value_cache, int64_t window);

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& plan, double scale, double soft_cap,
                           const std::optional<at::Tensor>& sinks);

// qkv: [num_tokens, num_heads + 2 num_kv_heads, head_dim]. Norm weights [head_dim], cos and sin [num_tokens, rotated].
at::Tensor attend_projected(const at::Tensor& qkv, const std::optional<at::Tensor>& query_norm,
                            const std::optional<at::Tensor>& key_norm, double epsilon,
                            const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin, bool interleaved,
                            const at::Tensor& slots, const at::Tensor& key_cache, const at::Tensor& value_cache,
                            const at::Tensor& plan, double scale, double soft_cap,
                            const std::optional<at::Tensor>& sinks);

}  // namespace paged
