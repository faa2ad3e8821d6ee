// paged_attention and attend_projected: do what was planned on all threads, put together what was done in parts.
#include "attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <memory>

#include "attend.h"
#include "heads.h"
#include "kv_write.h"
#include "parallel.h"
#include "results.h"

namespace paged {
namespace {

// Where a call's queries come from: as they are given, or from a projection, whose keys and values are written, too.
struct Call {
  KvLayout cache;
  Results results;
  ScoreFactors factors;
  int64_t group, key_dim;
  const Heads* queries;
  const Projected* projected;
  const int64_t* slots;  // of projected tokens
};

// The key and value of one head of a projected token into their slot. `room` is for two heads.
void write_projected(const Call& call, int64_t token, int64_t head, float* room) {
  float* value = room + call.key_dim;
  call.projected->key(token, head, room);
  call.projected->value(token, head, value);
  write_slot(call.cache, call.slots[token], head, room, call.key_dim, value);
}

// Numbers of a row of queries, whose memory is a multiple of 32.
template <class Kind>
int64_t query_row(const Call& call) {
  return (row_size<Kind>(call.cache.depth * Kind::kPack) + 31) / 32 * 32;
}

// A row of queries, with zeros behind the head's size.
template <class Kind>
void put_query(const Call& call, const float* from, typename Kind::Number* to) {
  const int64_t size = call.cache.depth * Kind::kPack;
  if constexpr (Kind::kPack == 4) {
    Kind::put_row(from, call.key_dim, size, to);
  } else {
    narrow(from, call.key_dim, to);
    std::memset(to + call.key_dim, 0, (size - call.key_dim) * sizeof(*to));
  }
}

// `early`: rows of projected queries that were made before, [token][head].
template <class Kind>
void load_query(const Call& call, const QueryToken& query, int64_t head, const typename Kind::Number* early,
                float* room, typename Kind::Number* to) {
  using Number = typename Kind::Number;
  if (call.projected != nullptr) {
    if (!query.alone || query.slot >= 0) {
      const int64_t row = query_row<Kind>(call);
      std::memcpy(to, early + (query.token * call.results.num_heads + head) * row, row * sizeof(Number));
    } else {
      call.projected->query(query.token, head, room);
      put_query<Kind>(call, room, to);
    }
    return;
  }
  call.queries->with(query.token, head, [&](const auto* from) {
    using From = std::remove_cv_t<std::remove_reference_t<decltype(*from)>>;
    if constexpr (std::is_same_v<From, Number> && Kind::kPack != 4) {
      std::memcpy(to, from, call.key_dim * sizeof(Number));
      std::memset(to + call.key_dim, 0, (call.cache.depth * Kind::kPack - call.key_dim) * sizeof(Number));
    } else {
      widen(from, call.key_dim, room);
      put_query<Kind>(call, room, to);
    }
  });
}

template <class Kind>
void do_item(const Call& call, const Plan& plan, const Item& item, const typename Kind::Number* early, Ahead& ahead,
             Products<Kind>& products, Room<Kind>& room) {
  using Number = typename Kind::Number;
  const Unit& unit = *item.unit;
  const QueryToken* tokens = plan.queries.data() + unit.first_query;
  const int num_rows = static_cast<int>(unit.num_queries * call.group);
  const int padded = Products<Kind>::padded(num_rows);
  const int64_t value_row = call.cache.value_row, stride = query_row<Kind>(call);
  float* head_room = room.heads.template get<float>(2 * std::max(call.key_dim, value_row));
  if (call.projected != nullptr && tokens[0].alone && tokens[0].slot < 0)
    write_projected(call, tokens[0].token, item.head, head_room);
  int32_t* low = room.ranges.template get<int32_t>(2 * num_rows);
  int32_t* high = low + num_rows;
  Running* running = room.running.template get<Running>(num_rows);
  float* out = room.out.template get<float>(padded * value_row);
  std::memset(out, 0, num_rows * value_row * sizeof(float));
  Number* queries = room.queries.template get<Number>(padded * stride);
  for (int row = 0; row < num_rows; ++row) {
    const QueryToken& query = tokens[row / call.group];
    low[row] = query.low, high[row] = query.high;
    running[row].clear();
    load_query<Kind>(call, query, item.head * call.group + row % call.group, early, head_room, queries + row * stride);
  }
  attend<Kind>(call.cache, call.factors, item, {num_rows, stride, queries, low, high, out, running}, ahead, products,
               room);
  for (int row = 0; row < num_rows; ++row) {
    const QueryToken& query = tokens[row / call.group];
    const int64_t head = item.head * call.group + row % call.group;
    const float *values = out + row * value_row, sum = running[row].sum();
    if (query.slot < 0) {
      call.results.finish(query.token, head, values, running[row].largest, sum);
    } else {
      call.results.put_part(query.slot, head, values, running[row].largest, sum);
    }
  }
}

// Projected tokens that units may not begin without: those of chunks, and those whose context is in parts.
template <class Kind>
const typename Kind::Number* do_early(const Call& call, const Plan& plan) {
  using Number = typename Kind::Number;
  if (call.projected == nullptr || plan.early_tokens.empty()) return nullptr;
  thread_local Scratch scratch;
  const int64_t num_heads = call.results.num_heads;
  const int64_t row = query_row<Kind>(call);
  Number* queries = scratch.get<Number>((plan.early_tokens.back() + 1) * num_heads * row);
  for_each_item(static_cast<int64_t>(plan.early_tokens.size()), [&](int64_t i) {
    thread_local Scratch heads;
    float* room = heads.get<float>(2 * std::max(call.key_dim, call.cache.value_row));
    const int64_t token = plan.early_tokens[i];
    for (int64_t head = 0; head < call.cache.num_kv_heads; ++head) write_projected(call, token, head, room);
    for (int64_t head = 0; head < num_heads; ++head) {
      call.projected->query(token, head, room);
      put_query<Kind>(call, room, queries + (token * num_heads + head) * row);
    }
  });
  return queries;
}

constexpr int64_t kManyUnits = 8;  // for each thread

template <class Kind>
void attend_all(const Call& call, const Plan& plan) {
  const typename Kind::Number* early = do_early<Kind>(call, plan);
  const int64_t num_heads = call.cache.num_kv_heads, num_units = static_cast<int64_t>(plan.units.size());
  const int64_t num_items = num_units * num_heads;
  const auto item_at = [&](int64_t i) {
    return i < num_items ? Item{&plan.units[i / num_heads], i % num_heads} : Item{};
  };
  // A unit's heads lie side by side, so one thread reads them, where that does not leave others without work at the end.
  const int64_t at_once = num_units >= kManyUnits * at::get_num_threads() ? num_heads : 1;
  std::atomic<int64_t> next{0};
  on_each_thread(static_cast<int>(std::min<int64_t>(at::get_num_threads(), num_items)), [&](int) {
    thread_local Room<Kind> room;
    Ahead ahead(call.cache);
    Products<Kind> products;
    int64_t at = 0, end = 0;
    const auto take = [&] {
      if (at == end) at = next.fetch_add(at_once), end = at + at_once;
      return item_at(at++);
    };
    for (Item item = take(), following; item.unit; item = following) {
      following = take();
      ahead.begin(item, following);
      do_item<Kind>(call, plan, item, early, ahead, products, room);
    }
  });
  for_each_item(static_cast<int64_t>(plan.merged_tokens.size()), [&](int64_t i) {
    thread_local Scratch scratch;
    float* sums = scratch.get<float>(call.results.value_row);
    for (int64_t head = 0; head < call.results.num_heads; ++head)
      call.results.merge(plan.merged_tokens[i], head, plan.merge_start[i], plan.merge_start[i + 1], sums);
  });
}

// The plan in a tensor of plan_attention's. It must be one for what the call is given: it says which tokens there are.
const Plan& planned(const at::Tensor& plan, const KvLayout& cache, int64_t num_tokens, int64_t num_heads) {
  TORCH_CHECK(plan.scalar_type() == at::kByte && plan.numel() == sizeof(Plan), "plan: is none of plan_attention's");
  const Plan& made = *static_cast<const Plan*>(plan.const_data_ptr());
  const PlanSizes& sizes = made.sizes;
  TORCH_CHECK(sizes.num_tokens == num_tokens && sizes.group * cache.num_kv_heads == num_heads &&
                  sizes.num_kv_heads == cache.num_kv_heads && sizes.block_size == cache.block_size,
              "plan: is one for other sizes");
  return made;
}

// Results in `out`, [num_tokens, num_heads, value_dim]; exactly one of `queries` and `projected` is given.
void run(const at::Tensor& out, const Heads* queries, const Projected* projected, const int64_t* slots, int64_t key_dim,
         c10::ScalarType query_type, const KvLayout& cache, const Plan& plan, double scale, double soft_cap,
         const std::optional<at::Tensor>& sinks) {
  thread_local Scratch parts, sink_exponents;
  const int64_t group = plan.sizes.group, num_heads = group * cache.num_kv_heads;
  Results results{static_cast<char*>(out.mutable_data_ptr()), out.scalar_type(), num_heads, cache.value_dim,
                  cache.value_row, nullptr, nullptr};
  results.parts = parts.get<float>(plan.num_slots * num_heads * (cache.value_row + kGroup));
  if (sinks) {
    float* exponents = sink_exponents.get<float>(num_heads);
    const float* given = sinks->const_data_ptr<float>();
    for (int64_t head = 0; head < num_heads; ++head) exponents[head] = given[head] * kLog2E;
    results.sinks = exponents;
  }
  for (const int32_t token : plan.blank_tokens) results.clear(token);
  const Call call{cache, results, ScoreFactors(scale, soft_cap), group, key_dim, queries, projected, slots};
  if (cache.pack == 1) return attend_all<Fp32>(call, plan);
#if defined(PAGED_BF16_DOT)
  if (cache.pack == 4) return attend_all<Int8Dot>(call, plan);
#else
  if (cache.pack == 4) return attend_all<Int8>(call, plan);
#endif
#if defined(PAGED_TILES)
  if (query_type == c10::kBFloat16) return attend_all<Bf16Tiles>(call, plan);
#elif defined(PAGED_BF16_DOT)
  if (query_type == c10::kBFloat16) return attend_all<Bf16Dot>(call, plan);
#endif
  attend_all<Bf16>(call, plan);
}

}  // namespace

at::Tensor plan_attention(const std::optional<at::Tensor>& block_tables, int64_t table_stride,
                          const at::Tensor& query_start, const at::Tensor& context_lens, at::TensorList segments,
                          int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t block_size,
                          int64_t window) {
  Batch batch{{num_tokens, num_heads / num_kv_heads, num_kv_heads, block_size}, context_lens.size(0), table_stride};
  if (block_tables) batch.tables = block_tables->const_data_ptr<int32_t>();
  batch.query_start = query_start.const_data_ptr<int32_t>();
  batch.context_lens = context_lens.const_data_ptr<int32_t>();
  batch.window = window;
  if (!segments.empty()) {
    batch.num_segments = segments[0].size(0);
    batch.segment_first = segments[0].const_data_ptr<int32_t>();
    batch.segment_end = segments[1].const_data_ptr<int32_t>();
    batch.segment_row_start = segments[2].const_data_ptr<int32_t>();
    batch.segment_rows = segments[3].const_data_ptr<int32_t>();
    batch.own_start = segments[4].const_data_ptr<int32_t>();
  }
  auto plan = std::make_unique<Plan>();
  plan->make(batch, at::get_num_threads());
  const auto forget = [block_tables](void* made) { delete static_cast<Plan*>(made); };
  return at::from_blob(plan.release(), {sizeof(Plan)}, forget, at::TensorOptions().dtype(at::kByte));
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& plan, double scale, double soft_cap,
                           const std::optional<at::Tensor>& sinks) {
  const KvLayout cache(key_cache, value_cache);
  const at::Tensor out = at::empty({q.size(0), q.size(1), cache.value_dim}, q.options());
  const Heads queries(q);
  run(out, &queries, nullptr, nullptr, q.size(2), q.scalar_type(), cache, planned(plan, cache, q.size(0), q.size(1)),
      scale, soft_cap, sinks);
  return out;
}

at::Tensor attend_projected(const at::Tensor& qkv, const std::optional<at::Tensor>& query_norm,
                            const std::optional<at::Tensor>& key_norm, double epsilon,
                            const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin, bool interleaved,
                            const at::Tensor& slots, const at::Tensor& key_cache, const at::Tensor& value_cache,
                            const at::Tensor& plan, double scale, double soft_cap,
                            const std::optional<at::Tensor>& sinks) {
  const KvLayout cache(key_cache, value_cache);
  const int64_t num_tokens = qkv.size(0), num_heads = qkv.size(1) - 2 * cache.num_kv_heads;
  const auto data = [](const std::optional<at::Tensor>& tensor) {
    return tensor ? tensor->const_data_ptr<float>() : nullptr;
  };
  const Projected projected{Heads(qkv),
                            num_heads,
                            cache.num_kv_heads,
                            data(query_norm),
                            data(key_norm),
                            static_cast<float>(epsilon),
                            {data(cos), data(sin), cos ? cos->size(1) : 0, interleaved}};
  const at::Tensor out = at::empty({num_tokens, num_heads * cache.value_dim}, qkv.options());
  run(out, nullptr, &projected, slots.const_data_ptr<int64_t>(), qkv.size(2), qkv.scalar_type(), cache,
      planned(plan, cache, num_tokens, num_heads), scale, soft_cap, sinks);
  return out;
}

}  // namespace paged
