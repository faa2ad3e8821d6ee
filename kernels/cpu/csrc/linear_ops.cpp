// The operations over packed weights; kernels/cpu/linear.py documents them. One file: torch's headers take longer to
// compile than all that is included below.
#if defined(PAGED_BF16_DOT)

#include <torch/library.h>

#include "dot_rate.h"
#include "linear.h"
#include "linear_argmax.h"
#include "pack.h"

namespace paged {

TORCH_LIBRARY_FRAGMENT(PAGED_LIBRARY, m) {
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
  m.def("dot_rate_probe(int rounds) -> int", &dot_rate_probe);
}

}  // namespace paged

#endif
