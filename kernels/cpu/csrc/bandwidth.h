// The yardstick of what reads memory: a sum over a tensor's cache lines by the same threads that the kernels use.
#pragma once

#include <ATen/core/Tensor.h>

#include "parallel.h"

namespace paged {

constexpr int64_t kLineBytes = 64, kPieceBytes = 1 << 18;

inline int64_t read_piece(const char* data, int64_t bytes) {
  typedef int64_t Line __attribute__((vector_size(kLineBytes)));
  Line sums[4] = {};
  const int64_t num_lines = bytes / kLineBytes;
  const Line* lines = reinterpret_cast<const Line*>(data);
  for (int64_t i = 0; i + 4 <= num_lines; i += 4) {
    for (int64_t j = 0; j < 4; ++j) {
      __builtin_prefetch(data + (i + j) * kLineBytes + 4096);
      sums[j] ^= lines[i + j];
    }
  }
  const Line sum = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  int64_t folded = 0;
  for (int i = 0; i < 8; ++i) folded ^= sum[i];
  return folded;
}

// Reads every line of a contiguous tensor once, in order, in pieces that threads take as they come; a result makes sure
// that the reads are not left out.
inline int64_t read_bandwidth_probe(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "tensor: must be contiguous");
  const char* data = static_cast<const char*>(tensor.const_data_ptr());
  const int64_t bytes = static_cast<int64_t>(tensor.nbytes()) / kPieceBytes * kPieceBytes;
  std::atomic<int64_t> sum{0};
  for_each_item(bytes / kPieceBytes, [&](int64_t piece) { sum ^= read_piece(data + piece * kPieceBytes, kPieceBytes); });
  return sum;
}

}  // namespace paged
