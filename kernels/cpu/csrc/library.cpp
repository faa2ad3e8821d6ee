// All operations of a level; kernels/cpu/native.py, linear.py and norms.py document them. What takes little to compile
// is included, not compiled on its own: torch's headers take longer than all of it.
#include <torch/library.h>

#include "attention.h"
#include "bandwidth.h"
#include "copy.h"
#include "decoder_layer.h"
#include "dot_rate.h"
#include "large_pages.h"
#include "linear.h"
#include "linear_argmax.h"
#include "norm.h"
#include "pack.h"
#include "write.h"

namespace paged {

TORCH_LIBRARY(PAGED_LIBRARY, m) {
  m.def(
      "plan_attention(Tensor? block_tables, int table_stride, Tensor query_start, Tensor context_lens, Tensor[] segments, "
      "int num_tokens, int num_heads, Tensor key_cache, Tensor value_cache, int window) -> Tensor",
      &plan_attention);
  m.def(
      "paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor plan, float scale, float soft_cap, "
      "Tensor? sinks) -> Tensor",
      &paged_attention);
  m.def(
      "attend_projected(Tensor qkv, Tensor? query_norm, Tensor? key_norm, float epsilon, Tensor? cos, Tensor? sin, "
      "bool interleaved, Tensor slots, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor plan, float scale, "
      "float soft_cap, Tensor? sinks) -> Tensor",
      &attend_projected);
  m.def("write_kv(Tensor k, Tensor v, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()", &write_kv);
  m.def("copy_blocks(Tensor(a!)[] caches, Tensor source, Tensor destination) -> ()", &copy_blocks);
  m.def("zero_bytes(int count) -> Tensor", &zero_bytes);
  m.def("populate(Tensor(a!)[] tensors) -> ()", &populate);
  m.def("touch_blocks(Tensor(a!)[] caches, Tensor blocks) -> ()", &touch_blocks);
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, bool plus_one) -> Tensor", &norms::rms_norm);
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool plus_one) -> (Tensor, Tensor)",
        &norms::add_rms_norm);
  m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", &norms::layer_norm);
  m.def("add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
        &norms::add_layer_norm);
  m.def("read_bandwidth_probe(Tensor tensor) -> int", &read_bandwidth_probe);
  m.def("pack(Tensor[] weights, bool gated) -> Tensor", &pack);
  m.def("pack_int8(Tensor[] weights, bool gated) -> (Tensor, Tensor, Tensor)", &pack_int8);
  m.def("unpack_rows(Tensor panels, Tensor? scales, Tensor ids, int outputs, int inputs) -> Tensor", &unpack_rows);
  m.def(
      "linear(Tensor x, Tensor panels, Tensor? scales, Tensor? sums, int outputs, Tensor? bias, Tensor? residual, "
      "int activation, Tensor(a!)? out) -> Tensor",
      &linear);
  m.def("linear_sums(Tensor x, Tensor panels, Tensor? scales, Tensor? sums, int outputs) -> Tensor", &linear_sums);
  m.def("gated(Tensor x, Tensor panels, Tensor? scales, Tensor? sums, int outputs, int activation) -> Tensor", &gated);
  m.def(
      "linear_argmax(Tensor x, Tensor panels, Tensor? scales, Tensor? sums, int outputs, Tensor? bias, "
      "float? soft_cap) -> (Tensor, Tensor)",
      &linear_argmax);
  m.def(
      "make_decoder_layer(Tensor?[] norms, float[] eps, bool[] plus_one, bool parallel, Tensor?[] weights, int[] outputs, "
      "int activation, int head_dim, Tensor?[] head_norms, float head_norm_eps, bool interleaved, float scale, "
      "float soft_cap, Tensor? sinks) -> Tensor",
      &make_decoder_layer);
  m.def(
      "decoder_layer(Tensor layer, Tensor x, Tensor? cos, Tensor? sin, Tensor slots, Tensor(a!) key_cache, "
      "Tensor(b!) value_cache, Tensor plan) -> Tensor",
      &decoder_layer);
  m.def("dot_rate_probe(int rounds) -> int", &dot_rate_probe);
}

}  // namespace paged
