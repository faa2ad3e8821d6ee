// paged_attention: plans a call's work, does it on all threads, and puts together what was done in parts.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attend.h"
#include "parallel.h"

namespace paged {
namespace {

struct Heads {
  const char* data;
  at::ScalarType dtype;
  int64_t token_stride, head_stride, dim;  // strides in elements

  explicit Heads(const at::Tensor& q)
      : data(static_cast<const char*>(q.const_data_ptr())),
        dtype(q.scalar_type()),
        token_stride(q.stride(0)),
        head_stride(q.stride(1)),
        dim(q.size(2)) {}

  // Calls `use(element)` with a pointer of the elements' type to the head's first.
  template <class Use>
  void with(int64_t token, int64_t head, const Use& use) const {
    const int64_t offset = token * token_stride + head * head_stride;
    if (dtype == at::kFloat) return use(reinterpret_cast<const float*>(data) + offset);
    if (dtype == at::kBFloat16) return use(reinterpret_cast<const c10::BFloat16*>(data) + offset);
    use(reinterpret_cast<const c10::Half*>(data) + offset);
  }
};

// A call's results: of each token and head its values' columns, and where its context is in parts, of each part those,
// the largest exponent and the sum of weights.
struct Results {
  char* out;
  at::ScalarType dtype;
  int64_t num_heads, value_dim, value_row;
  float* parts;       // [slot][head][value_row + kGroup]
  const float* sinks;  // exponents of 2, one a head; null: none

  float* part(int64_t slot, int64_t head) const { return parts + (slot * num_heads + head) * (value_row + kGroup); }

  // out * factor, in the results' type.
  void put(int64_t token, int64_t head, const float* values, float factor) const {
    const int64_t offset = (token * num_heads + head) * value_dim;
    if (dtype == at::kFloat) return put_as(reinterpret_cast<float*>(out) + offset, values, factor);
    if (dtype == at::kBFloat16) return put_as(reinterpret_cast<c10::BFloat16*>(out) + offset, values, factor);
    put_as(reinterpret_cast<c10::Half*>(out) + offset, values, factor);
  }

  template <typename T>
  void put_as(T* to, const float* values, float factor) const {
    for (int64_t i = 0; i < value_dim; ++i) to[i] = static_cast<T>(values[i] * factor);
  }

  void clear(int64_t token) const {
    const int64_t bytes = num_heads * value_dim * static_cast<int64_t>(c10::elementSize(dtype));
    std::memset(out + token * bytes, 0, bytes);
  }

  // Divide by the sum of weights, in which the head's sink takes part. Only where every score is -inf is the sum zero;
  // then nothing is known, which NaN says.
  void finish(int64_t token, int64_t head, const float* values, float largest, float sum) const {
    if (sinks == nullptr) return put(token, head, values, 1.f / sum);
    const float sink = sinks[head], top = std::max(sink, largest);
    const float factor = exp2(largest - top);
    put(token, head, values, factor / (sum * factor + exp2(sink - top)));
  }
};

struct Call {
  KvLayout cache;
  Heads q;
  Results results;
  ScoreFactors factors;
  int64_t group;
};

template <class Kind>
typename Kind::Number* load_queries(const Call& call, const Plan& plan, const Item& item, Room<Kind>& room,
                                    int64_t stride) {
  using Number = typename Kind::Number;
  Number* to = room.queries.template get<Number>(item.unit->num_queries * call.group * stride);
  Number* row = to;
  for (int i = 0; i < item.unit->num_queries; ++i) {
    for (int64_t g = 0; g < call.group; ++g, row += stride) {
      call.q.with(plan.queries[item.unit->first_query + i].token, item.head * call.group + g, [&](const auto* from) {
        using From = std::remove_cv_t<std::remove_reference_t<decltype(*from)>>;
        if constexpr (std::is_same_v<From, c10::BFloat16> && std::is_same_v<Number, uint16_t>) {
          std::memcpy(row, from, call.q.dim * sizeof(Number));
        } else {
          for (int64_t d = 0; d < call.q.dim; ++d) row[d] = Kind::number(static_cast<float>(from[d]));
        }
      });
      std::memset(row + call.q.dim, 0, (stride - call.q.dim) * sizeof(Number));
    }
  }
  return to;
}

template <class Kind>
void do_item(const Call& call, const Plan& plan, const Item& item, Ahead& ahead, Room<Kind>& room) {
  const Unit& unit = *item.unit;
  const QueryToken* tokens = plan.queries.data() + unit.first_query;
  const int num_rows = static_cast<int>(unit.num_queries * call.group);
  const int64_t value_row = call.cache.value_row, stride = (call.cache.depth * Kind::kPack + 31) / 32 * 32;
  int32_t* low = room.ranges.template get<int32_t>(2 * num_rows);
  int32_t* high = low + num_rows;
  Running* running = room.running.template get<Running>(num_rows);
  float* out = room.out.template get<float>(num_rows * value_row);
  std::memset(out, 0, num_rows * value_row * sizeof(float));
  for (int row = 0; row < num_rows; ++row) {
    low[row] = tokens[row / call.group].low, high[row] = tokens[row / call.group].high;
    running[row].clear();
  }
  const auto* queries = load_queries<Kind>(call, plan, item, room, stride);
  attend<Kind>(call.cache, call.factors, item, {num_rows, stride, queries, low, high, out, running}, ahead, room);
  for (int row = 0; row < num_rows; ++row) {
    const QueryToken& query = tokens[row / call.group];
    const int64_t head = item.head * call.group + row % call.group;
    const float *values = out + row * value_row, sum = running[row].sum();
    if (query.slot < 0) {
      call.results.finish(query.token, head, values, running[row].largest, sum);
    } else {
      float* part = call.results.part(query.slot, head);
      std::memcpy(part, values, value_row * sizeof(float));
      part[value_row] = running[row].largest;
      part[value_row + 1] = sum;
    }
  }
}

// One token's head from its parts, weighed by how large their scores are: log-sum-exp. A part that saw nothing has the
// sum zero and is left out; what is NaN is not.
void merge(const Results& results, int64_t token, int64_t head, int64_t first_slot, int64_t last_slot, float* out) {
  float largest = kMinusInfinity, sum = 0.f;
  for (int64_t slot = first_slot; slot < last_slot; ++slot)
    largest = std::max(largest, results.part(slot, head)[results.value_row]);
  const float origin = largest == kMinusInfinity ? 0.f : largest;
  std::memset(out, 0, results.value_row * sizeof(float));
  for (int64_t slot = first_slot; slot < last_slot; ++slot) {
    const float* part = results.part(slot, head);
    if (part[results.value_row + 1] == 0.f) continue;
    const float weight = exp2(part[results.value_row] - origin);
    sum += weight * part[results.value_row + 1];
    for (int64_t i = 0; i < results.value_row; ++i) out[i] += weight * part[i];
  }
  results.finish(token, head, out, largest, sum);
}

template <class Kind>
void attend_all(const Call& call, const Plan& plan) {
  const int64_t num_heads = call.cache.num_kv_heads;
  const auto num_items = static_cast<int64_t>(plan.units.size()) * num_heads;
  const auto item_at = [&](int64_t i) {
    return i < num_items ? Item{&plan.units[i / num_heads], i % num_heads} : Item{};
  };
  std::atomic<int64_t> next{0};
  on_each_thread(static_cast<int>(std::min<int64_t>(at::get_num_threads(), num_items)), [&](int) {
    thread_local Room<Kind> room;
    Ahead ahead(call.cache);
    for (Item item = item_at(next++), following; item.unit; item = following) {
      following = item_at(next++);
      ahead.begin(item, following);
      do_item<Kind>(call, plan, item, ahead, room);
    }
  });
  for_each_item(static_cast<int64_t>(plan.merged_tokens.size()), [&](int64_t i) {
    thread_local Scratch scratch;
    float* out = scratch.get<float>(call.results.value_row);
    for (int64_t head = 0; head < call.results.num_heads; ++head)
      merge(call.results, plan.merged_tokens[i], head, plan.merge_start[i], plan.merge_start[i + 1], out);
  });
}

template <typename T>
const T* data_or_null(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// Tensors as kernels/cpu/__init__.py checks and prepares them: last dimensions contiguous, sinks in fp32. `window` and
// `soft_cap` are 0 for none. `segments`: first, end, row_start, rows, own_start; or nothing.
at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& block_tables, const at::Tensor& query_start,
                           const at::Tensor& context_lens, double scale, int64_t window, double soft_cap,
                           const std::optional<at::Tensor>& sinks, at::TensorList segments) {
  const KvLayout cache(key_cache, value_cache);
  const int64_t num_heads = q.size(1);
  at::Tensor out = at::empty({q.size(0), num_heads, cache.value_dim}, q.options());
  Batch batch{};
  batch.num_rows = context_lens.size(0);
  batch.num_tokens = q.size(0);
  batch.block_size = cache.block_size;
  batch.table_stride = block_tables.stride(0);
  batch.tables = block_tables.const_data_ptr<int32_t>();
  batch.query_start = query_start.const_data_ptr<int32_t>();
  batch.context_lens = context_lens.const_data_ptr<int32_t>();
  batch.window = window;
  batch.group = num_heads / cache.num_kv_heads;
  batch.num_kv_heads = cache.num_kv_heads;
  if (!segments.empty()) {
    batch.num_segments = segments[0].size(0);
    batch.segment_first = segments[0].const_data_ptr<int32_t>();
    batch.segment_end = segments[1].const_data_ptr<int32_t>();
    batch.segment_row_start = segments[2].const_data_ptr<int32_t>();
    batch.segment_rows = segments[3].const_data_ptr<int32_t>();
    batch.own_start = segments[4].const_data_ptr<int32_t>();
  }
  thread_local Plan plan;
  plan.make(batch, at::get_num_threads());

  thread_local Scratch parts, sink_exponents;
  Results results{static_cast<char*>(out.mutable_data_ptr()), q.scalar_type(), num_heads, cache.value_dim,
                  cache.value_row, nullptr, nullptr};
  results.parts = parts.get<float>(plan.num_slots * num_heads * (cache.value_row + kGroup));
  if (const float* given = data_or_null<float>(sinks)) {
    float* exponents = sink_exponents.get<float>(num_heads);
    for (int64_t head = 0; head < num_heads; ++head) exponents[head] = given[head] * kLog2E;
    results.sinks = exponents;
  }
  for (const int32_t token : plan.blank_tokens) results.clear(token);
  const Call call{cache, Heads(q), results, ScoreFactors(scale, soft_cap), batch.group};
  if (cache.pack == 1) {
    attend_all<Fp32>(call, plan);
#if defined(PAGED_BF16_DOT)
  } else if (q.scalar_type() == at::kBFloat16) {
    attend_all<Bf16Dot>(call, plan);
#endif
  } else {
    attend_all<Bf16>(call, plan);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(PAGED_LIBRARY, m) {
  m.def(
      "paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor query_start, "
      "Tensor context_lens, float scale, int window, float soft_cap, Tensor? sinks, Tensor[] segments) -> Tensor",
      &paged_attention);
}

}  // namespace paged
